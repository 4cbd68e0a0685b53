"""Ctrl-C while a command is still importing what it needs: it ends there and then, and says nothing.

Python's own answer is an exception, raised in whichever module is being imported: a traceback of nobody's making. There
is nothing to clean up yet. Imports next to nothing: whatever is imported before `leave_at_once` has that traceback.

Once it has begun there is, and SIGTERM and SIGHUP are as Ctrl-C.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code of what Ctrl-C has ended."""
_ALIKE = (signal.SIGTERM, signal.SIGHUP)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """Until `raise_again`. Not where Ctrl-C is ignored, as of what a shell runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Ctrl-C is `KeyboardInterrupt` from here on; and so is SIGTERM, and a closed terminal's SIGHUP unless it is
    ignored: what was begun is cleaned up, and what `tandem bench` has measured is kept."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in _ALIKE:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _as_ctrl_c)


def _as_ctrl_c(signum: int, frame: FrameType | None) -> None:
    """Once: `timeout` sends SIGTERM twice and a terminal SIGHUP, where a second Ctrl-C would not wait."""
    for number in _ALIKE:
        signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
