"""Ctrl-C while a command is still importing what it needs: it ends there and then, and says nothing.

Python's own answer is an exception, raised in whichever module is being imported: a traceback of nobody's making. There
is nothing to clean up yet. Imports next to nothing: whatever is imported before `leave_at_once` has that traceback.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code of what Ctrl-C has ended."""


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """Until `raise_again`. Not where Ctrl-C is ignored, as of what a shell runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Ctrl-C is `KeyboardInterrupt` from here on."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
