"""Computes the times of operations from a trace of torch's profiler. A separate program, since reading a trace takes
seconds, during which an engine in the same process could not step.

    python -P engine/trace_times.py trace.json [trace.json.gz]     the second is written, if named

Prints a list of [name, calls, host ms, device ms] as JSON, the slowest first. Host times exclude the operations that an
operation calls. Imports only the standard library.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Row = list[Any]
"""name, calls, host ms, device ms"""


def op_times(events: Iterable[dict[str, Any]]) -> list[Row]:
    """Sum up Chrome's complete events ("ph": "X"), whose times are in microseconds."""
    rows: defaultdict[str, Row] = defaultdict(lambda: ["", 0, 0.0, 0.0])
    of_thread: defaultdict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in DEVICE:
            row = rows[event["name"]]
            row[1] += 1
            row[3] += event["dur"] / 1e3
        elif event.get("cat") in HOST:
            # Of calls that begin at the same time, the longest is the caller of the others.
            of_thread[event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for calls in of_thread.values():
        _add_own_times(sorted(calls), rows)
    for name, row in rows.items():
        row[0] = name
    return sorted(rows.values(), key=lambda row: max(row[2], row[3]), reverse=True)


def _add_own_times(calls: list[tuple[float, float, str]], rows: defaultdict[str, Row]) -> None:
    """Add the own times of one thread's calls: (begin, -duration, name), sorted."""
    open_calls: list[tuple[float, str]] = []
    """(end, name), the innermost last."""
    for begin, minus_duration, name in calls:
        while open_calls and open_calls[-1][0] <= begin:
            open_calls.pop()
        if open_calls:
            rows[open_calls[-1][1]][2] += minus_duration / 1e3
        row = rows[name]
        row[1] += 1
        row[2] -= minus_duration / 1e3
        open_calls.append((begin - minus_duration, name))


def main(trace: str, packed: str = "") -> None:
    path = Path(trace)
    print(json.dumps(op_times(json.loads(path.read_bytes())["traceEvents"])))  # noqa: T201
    if packed:
        with path.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
