"""Benchmark parts that end in every possible way, for tests of the runner of benchmarks/gpu.py. The runner's processes
import this module, which does not import torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, OutOfTime, Setting

WORD = "word"


def row(value: float = 1.0) -> Row:
    return Row(what="first", value=value, unit="x")


def well(setting: Setting) -> Iterator[Row]:
    yield row(setting.known.get("first", 0.5))
    yield Row(what="second", value=2.0, unit="x")


def waiting(setting: Setting) -> Iterator[Row]:
    """Waits until `telling` runs as well."""
    yield row()
    while not (setting.results / WORD).exists():
        time.sleep(0.01)


def telling(setting: Setting) -> Iterator[Row]:
    (setting.results / WORD).touch()
    yield row()


def wrong(setting: Setting) -> Iterator[Row]:
    yield Row(what="error", value=0.5, unit="error", at_most=0.1, is_check=True)


def raising(setting: Setting) -> Iterator[Row]:
    yield row()
    raise RuntimeError("an illegal\naccess")


def missing(setting: Setting) -> Iterator[Row]:
    raise NotRun("nothing is installed")
    yield row()


def looking(setting: Setting) -> Iterator[Row]:
    """Yields the number of result files that exist while it runs."""
    yield row(len(list(setting.results.glob("gpu-*.json"))))


def dying(setting: Setting) -> Iterator[Row]:
    yield row()
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(setting: Setting) -> Iterator[Row]:
    """Hangs, and so does its child process, whose pid is the row's value."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield row(child.pid)
    time.sleep(60)


def stopping(setting: Setting) -> Iterator[Row]:
    """Stops by itself when its time is up."""
    yield row(setting.limit_s)
    raise OutOfTime
