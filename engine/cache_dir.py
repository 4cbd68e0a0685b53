"""The folder where fetched models and compiled kernels lie: each is made once, by one process, and appears whole.

absent ──lock──> <name>.part-* being filled ──rename──> <name>
                      │ failure: removed, and the next one starts anew; killed: the next one removes it
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
    """Of models."""
    return Path.home() / ".cache" / "tandem" / "models"


def kernels_dir() -> Path:
    """Of compiled kernels."""
    return Path.home() / ".cache" / "tandem" / "kernels"


PROGRESS = "tandem: "
"""How a line of `report` begins."""


def report(line: str) -> None:
    """One line on stderr: of progress, or of what ends the process."""
    print(f"{PROGRESS}{line}", file=sys.stderr, flush=True)  # noqa: T201


def build_once(directory: Path, name: str, build: Callable[[Path], None]) -> Path:
    """`directory/name`, filled by `build(empty folder)` if it is not there. Others who want it wait meanwhile."""
    target = directory / name
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f".{name}.lock"):
        if target.is_dir():
            return target
        for left in directory.glob(f"{escape(name)}.part-*"):  # by one that was killed: who fills it holds the lock
            shutil.rmtree(left, ignore_errors=True)
        # Under a name of its own: a compiler of the one that was killed may still be at work.
        part = Path(tempfile.mkdtemp(prefix=f"{name}.part-", dir=directory))
        try:
            build(part)
            # Made private by mkdtemp and safetensors; a model may be read by other users of a shared cache.
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
        yield  # closing the file lets go of the lock, also if this process dies
