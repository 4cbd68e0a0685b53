"""The cache folder of fetched models and compiled kernels. One process makes each entry, once, and it appears complete.

absent ──lock──> <name>.part-* being filled ──rename──> <name>
                      │ failure: removed, and the next process starts over; killed: the next process removes it
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path


def default_download_dir() -> Path:
    """The folder of models."""
    return Path.home() / ".cache" / "tandem" / "models"


def kernels_dir() -> Path:
    """The folder of compiled kernels."""
    return Path.home() / ".cache" / "tandem" / "kernels"


PROGRESS = "tandem: "
"""Prefix of each line of `report`."""


def report(line: str) -> None:
    """Print one line on stderr: progress, or why the process ends."""
    print(f"{PROGRESS}{line}", file=sys.stderr, flush=True)  # noqa: T201


def build_once(directory: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return `directory/name`; if it is missing, `build(empty folder)` fills it. Other processes wait meanwhile."""
    target = directory / name
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f".{name}.lock"):
        if target.is_dir():
            return target
        for left in directory.glob(f"{escape(name)}.part-*"):  # left by a killed process: a live one holds the lock
            shutil.rmtree(left, ignore_errors=True)
        # A unique name: a compiler that a killed process has started may still be running.
        part = Path(tempfile.mkdtemp(prefix=f"{name}.part-", dir=directory))
        try:
            build(part)
            # mkdtemp and safetensors make files private; other users of a shared cache may read a model.
            part.chmod(0o755)
            for path in part.iterdir():
                path.chmod(0o644)
            part.rename(target)
        except BaseException:
            shutil.rmtree(part)
            raise
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is making {path.name.removeprefix('.').removesuffix('.lock')}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also if this process dies
