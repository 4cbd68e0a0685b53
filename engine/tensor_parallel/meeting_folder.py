"""The folder in which ranks meet. It goes with its engine; that of one which was killed, when the next one starts.

    made ── `OWNER` appears, locked ──> in use ── cleanup ──> gone
                                          │ its process is killed: the lock ends
                                          └── clear_left_behind, by whoever comes next ──> gone

A lock, not a process id: containers that share a folder for temporary files have process ids of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "tandem-ranks-"
OWNER = "owner"


class MeetingFolder:
    def __init__(self) -> None:
        clear_left_behind()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{OWNER}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / OWNER)  # nobody sees it without its lock

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_left_behind() -> None:
    """Remove those whose owners are gone. What is not ours to open or to remove stays."""
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with suppress(OSError):
            if owner.parent.lstat().st_uid != os.getuid():  # whoever may write there could name what is not his
                continue
            fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
            finally:
                os.close(fd)
