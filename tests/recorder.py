"""In the place of CUDA graphs, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

from engine.running.decode_graphs import Replay


class RelaunchingRecorder:
    """Launches again what was recorded."""

    def record(self, launch: Callable[[], None]) -> Replay:
        launch()
        return launch
