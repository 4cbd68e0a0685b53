"""Ctrl-C while an `LLM` generates: it comes between two steps of the engine.

In the middle of one it would leave blocks with sequences that nobody computes any more, and ranks with a step that is
not computed everywhere; the engine would be of no use from then on, or wrong.

    with BetweenSteps() as interrupts:        Ctrl-C ── noted ──> check raises KeyboardInterrupt, or the context's end
        step, and then `interrupts.check()`            └─ again, before that ──> KeyboardInterrupt there and then

Nothing is changed in other threads than the main one, which hear of no Ctrl-C, nor where somebody else handles it.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class BetweenSteps:
    def __init__(self) -> None:
        self._is_noted = False
        self._handles = False

    def __enter__(self) -> BetweenSteps:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._handles = True
        return self

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if there was a Ctrl-C."""
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_noted:
            raise KeyboardInterrupt
        self._is_noted = True
