"""A temporary folder of one process. Its owner removes it; if the owner was killed, the next process that makes such a
folder does.

    made ── `OWNER` appears, locked ──> in use ── cleanup ──> gone
                                          │ its process is killed: the lock is released
                                          └── clear_left_behind, by the next process ──> gone

It uses a lock instead of a process id, since containers that share a temporary folder have separate process ids.
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
    """`path` is in `directory` (default: the temporary folder). Its name begins with `prefix`, which all folders for
    the same purpose share. Only this user can read it."""

    def __init__(self, prefix: str, directory: str | None = None) -> None:
        clear_left_behind(prefix, directory)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        new = self.path / f"{OWNER}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / OWNER)  # the name appears only once it is locked

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clear_left_behind(prefix: str, directory: str | None = None) -> None:
    """Remove folders whose owners are gone, except those that we may not open or remove."""
    for owner in Path(directory or tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with suppress(OSError):
            if owner.parent.lstat().st_uid != os.getuid():  # others can create names there, too
                continue
            fd = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent)
            finally:
                os.close(fd)
