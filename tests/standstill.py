"""Stops processes, and makes sure that they have stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

AT_MOST_S = 10.0


def hold_up(pid: int) -> None:
    """Stop a process, and return once none of its threads runs any more. Sending SIGSTOP is not enough: one thread
    receives it, and until that thread is scheduled the others go on and answer requests."""
    os.kill(pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + AT_MOST_S
    while any(_runs(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < give_up_at, f"process {pid} still runs, {AT_MOST_S:.0f} s after it was to stop"
        time.sleep(0.001)


def _runs(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T"
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False
