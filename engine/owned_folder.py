"""A temporary folder of one process: it goes with its owner; that of one which was killed, when the next one is made.

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

OWNER = "owner"


class OwnedFolder:
    """`path`, in `directory` or where temporary files are; its name begins with `prefix`, as others' for the same
    purpose do. Only this user sees into it."""

    def __init__(self, prefix: str, directory: str | None = None) -> None:
        clear_left_behind(prefix, directory)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        new = self.path / f"{OWNER}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / OWNER)  # nobody sees it without its lock

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_left_behind(prefix: str, directory: str | None = None) -> None:
    """Remove those whose owners are gone. What is not ours to open or to remove stays."""
    for owner in Path(directory or tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with suppress(OSError):
            if owner.parent.lstat().st_uid != os.getuid():  # whoever may write there could name what is not his
                continue
            fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
            finally:
                os.close(fd)
