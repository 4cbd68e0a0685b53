"""Makes Ctrl-C end a command at once and silently while it is still importing modules.

By default, Python raises an exception in whichever module is being imported, with a meaningless traceback. There is
nothing to clean up yet. This module imports next to nothing, since modules imported before `leave_at_once` still have
that traceback.

Once the command has begun, there is something to clean up, and SIGTERM and SIGHUP act like Ctrl-C.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""
_ALIKE = (signal.SIGTERM, signal.SIGHUP)


def is_told_to_end() -> bool:
    """Whether a Ctrl-C was SIGTERM, or a terminal that was closed: nobody is there to go on."""
    return all(signal.getsignal(number) is signal.SIG_IGN for number in _ALIKE)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """Until `raise_again`, Ctrl-C ends the process at once; unless it is ignored, as for a shell's background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """From here on, Ctrl-C raises `KeyboardInterrupt`, and so do SIGTERM and, unless it is ignored, a closed terminal's
    SIGHUP: so the command cleans up, and `tandem bench` keeps what it has measured."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in _ALIKE:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _as_ctrl_c)


def _as_ctrl_c(signum: int, frame: FrameType | None) -> None:
    """Act as Ctrl-C, but only once: `timeout` sends SIGTERM twice, and a terminal also sends SIGHUP, while a second
    Ctrl-C would not wait for the clean-up."""
    for number in _ALIKE:
        signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
