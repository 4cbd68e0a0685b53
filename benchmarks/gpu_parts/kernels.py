"""Runs the kernels' own tests (tests/unit/test_triton_*.py, test_flash_*.py) on this device, against float64."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, OutOfTime, Setting, require

ROOT = Path(__file__).resolve().parents[2]
NUM_PROCESSES = 15
"""Most of the time is spent compiling. Each process holds half a gigabyte of device memory."""
SHOWN_LINES = 40
LOG = "gpu-kernel-tests.log"
SUMMARY_S = 20.0
"""The part of the time limit reserved for pytest to print its results. xdist waits 10 s for its workers."""


TEST_LINE = re.compile(r"^\[gw\d+\] \[ *(\d+%)\] ([A-Z]+) | ([A-Z]+)(?: \(.*\))? +\[ *(\d+%)\]$")
"""A line of xdist, or of plain pytest, about a test: its outcome, and the share of tests that have ended."""


def measure(setting: Setting) -> Iterator[Row]:
    """Yields the number of tests that fail; their output is kept in a log, even if time runs out."""
    if setting.device != "cuda":
        raise NotRun("no GPU; interpreted they are among the project's own tests")
    require("pytest")
    path = setting.results / LOG
    exit_code = run_tests(path, setting.limit_s - SUMMARY_S)
    lines = path.read_text().strip().splitlines() or ["pytest said nothing"]
    if exit_code != 0:
        print("\n".join(lines[-SHOWN_LINES:]), flush=True)
    if exit_code is None:
        count, share = so_far(lines)
        yield row_of(count, f"out of time after {share} of the tests", lines)
        raise OutOfTime
    summary = lines[-1].strip("= ")
    if exit_code not in (0, 1):  # pytest did not run the tests
        raise RuntimeError(f"pytest ended with {exit_code}: {summary}")
    yield row_of(num_failed(summary), summary, lines)


def row_of(count: int, note: str, lines: Sequence[str]) -> Row:
    if count and (access := first_illegal_access(lines)):
        note = f"{note}; {access}"
    return Row(what="kernels' tests that fail", value=count, unit="tests", at_most=0, is_check=True, note=note)


def run_tests(path: Path, limit_s: float) -> int | None:
    """Run the tests with a log of their output. Returns pytest's exit code, or None if it was stopped because time ran
    out."""
    with path.open("w") as log:
        tests = subprocess.Popen(command(), cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            return tests.wait(limit_s)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)  # it then prints the failures, unless it hangs itself
            with suppress(subprocess.TimeoutExpired):
                tests.wait(SUMMARY_S - 5)
            return None
        finally:
            tests.kill()  # its workers end with the part's session
            tests.wait()


def command() -> list[str]:
    folder = ROOT / "tests/unit"
    names = [str(path) for kind in ("flash", "triton") for path in sorted(folder.glob(f"test_{kind}_*.py"))]
    parallel = ["-n", str(min(NUM_PROCESSES, os.cpu_count() or 1))] if find_spec("xdist") else []
    # Uses the fixtures of tests/unit/conftest.py, but not tests/conftest.py, which starts a Redis, nor the plugins that
    # the project's settings name. A file that cannot be imported because a package is missing must not keep the others
    # from running. Prints a line for each test, so the log shows all failures so far at any time.
    options = [
        "-v", "-rfE", f"--confcutdir={folder}", "--continue-on-collection-errors", "-p", "no:cacheprovider",
        "-o", "addopts=", "-m", "not slow", *parallel,
    ]  # fmt: skip
    return [sys.executable, "-m", "pytest", *options, *names]


def environment() -> dict[str, str]:
    """Keeps the existing path: packages may have been copied to this machine."""
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def num_failed(summary: str) -> int:
    """The number of failures in pytest's last line, including errors. Raises `ValueError` if it is not a summary
    line."""
    if not re.search(r"\d+ (passed|failed|error|skipped)", summary):
        raise ValueError(f"this is no summary of pytest's: {summary!r}")
    return sum(int(number) for number in re.findall(r"(\d+) (?:failed|errors?)\b", summary))


def so_far(lines: Sequence[str]) -> tuple[int, str]:
    """For an unfinished run: how many tests failed, and the share of all tests that ended."""
    ended = [match for match in map(TEST_LINE.search, lines) if match]
    num_bad = sum((match[2] or match[3]) in ("FAILED", "ERROR") for match in ended)
    return num_bad, (ended[-1][1] or ended[-1][4]) if ended else "0%"


def first_illegal_access(lines: Sequence[str]) -> str:
    """The first error about an illegal memory access, with its test: after it, everything in the same process fails,
    too."""
    test = ""
    for line in lines:
        if match := re.fullmatch(r"_{2,} (.+) _{2,}", line.strip()):
            test = f"{match[1]}: "
        elif line.startswith("E ") and "illegal memory access" in line:
            return f"{test}{line[1:].strip()}"
    return ""
