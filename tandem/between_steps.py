"""Makes Ctrl-C take effect between two steps of the engine while an `LLM` generates.

In the middle of a step, it would leave blocks owned by sequences that nobody computes any more, and a step that not all
ranks have computed: the engine would be unusable, or compute wrong results.

    with BetweenSteps() as interrupts:        Ctrl-C ── noted ──> check raises KeyboardInterrupt, or the context's end
        with interrupts.breaking(): step               └─ again, within a step ──> KeyboardInterrupt there and then
        interrupts.check()

Only a step may take long. Outside of a step, Ctrl-C waits for `check`, so that no request is half added or half
aborted. This class changes nothing in threads other than the main one, which get no Ctrl-C, and nothing if the program
has a handler of its own.
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
        """Raise `KeyboardInterrupt` if there was a Ctrl-C."""
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Within this block, a second Ctrl-C raises at once. What it interrupts is unusable then."""
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
