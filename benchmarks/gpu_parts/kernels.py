"""The kernels' own tests (tests/unit/test_triton_*.py, test_flash_*.py), on this device, against float64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 12
"""Most of the time goes into compiling."""
SHOWN_LINES = 40


def measure(setting: Setting) -> Iterator[Row]:
    """The number of tests that fail; what they say is kept in gpu-kernel-tests.log, also where time runs out."""
    if setting.device != "cuda":
        raise NotRun("no GPU; interpreted they are among the project's own tests")
    path = setting.results / "gpu-kernel-tests.log"
    with path.open("w") as log:
        done = subprocess.run(command(), cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = path.read_text().strip().splitlines() or ["pytest said nothing"]
    summary = lines[-1].strip("= ")
    if done.returncode != 0:
        print("\n".join(lines[-SHOWN_LINES:]), flush=True)
    if done.returncode not in (0, 1):  # pytest did not run the tests
        raise RuntimeError(f"pytest ended with {done.returncode}: {summary}")
    yield Row(
        what="kernels' tests that fail", value=num_failed(summary), unit="tests", at_most=0, is_check=True, note=summary
    )


def command() -> list[str]:
    folder = ROOT / "tests/unit"
    names = [str(path) for kind in ("triton", "flash") for path in sorted(folder.glob(f"test_{kind}_*.py"))]
    parallel = ["-n", str(min(NUM_PROCESSES, os.cpu_count() or 1))] if find_spec("xdist") else []
    # Without tests/conftest.py, which starts a Redis, and without the plugins that the project's own settings name.
    # A file that cannot be imported, for want of a package, must not keep the others from running.
    options = [
        "-q", "-rfE", "--noconftest", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-o", "addopts=",
        *parallel,
    ]  # fmt: skip
    return [sys.executable, "-m", "pytest", *options, *names]


def environment() -> dict[str, str]:
    """What was on the path stays there: packages may have been carried to this machine."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def num_failed(summary: str) -> int:
    """Of pytest's last line; errors count. Raises `ValueError` where it is none."""
    if not re.search(r"\d+ (passed|failed|error|skipped)", summary):
        raise ValueError(f"this is no summary of pytest's: {summary!r}")
    return sum(int(number) for number in re.findall(r"(\d+) (?:failed|errors?)\b", summary))
