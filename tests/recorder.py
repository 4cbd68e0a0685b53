"""A stand-in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

from engine.running.decode_graphs import Replay


class RelaunchingRecorder:
    """Replays by launching the recorded work again."""

    def record(self, launch: Callable[[], None]) -> Replay:
        launch()
        return launch
