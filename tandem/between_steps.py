"""Ctrl-C while an `LLM` generates: it comes between two steps of the engine.

In the middle of one it would leave blocks with sequences that nobody computes any more, and ranks with a step that is
not computed everywhere; the engine would be of no use from then on, or wrong.

    with BetweenSteps() as interrupts:        Ctrl-C ── noted ──> check raises KeyboardInterrupt, or the context's end
        with interrupts.breaking(): step               └─ again, within a step ──> KeyboardInterrupt there and then
        interrupts.check()

Only a step may take long. Whatever comes outside of one waits for `check`: no request is added or aborted by half.
Nothing is changed in other threads than the main one, which hear of no Ctrl-C, nor where somebody else handles it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class BetweenSteps:
    def __init__(self) -> None:
        self._is_noted = False
        self._handles = False
        self._may_break = False

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

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Of what is of no use any more if a second Ctrl-C ends it."""
        self._may_break = True
        try:
            yield
        finally:
            self._may_break = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_noted and self._may_break:
            raise KeyboardInterrupt
        self._is_noted = True
