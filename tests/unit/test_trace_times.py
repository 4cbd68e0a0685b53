"""How long operations took, according to a trace: each without the operations that it calls."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine import trace_times
from engine.trace_times import op_times


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


EVENTS = [
    event("inner", 20, 10),
    event("outer", 0, 100),  # events are in no order
    event("inner", 40, 30),
    event("innermost", 45, 5),
    event("first child", 0, 4),  # begins when its caller does
    event("outer", 200, 50),
    event("inner", 10, 1000, tid=2),  # of another thread
    event("gemm", 30, 70, cat="kernel", tid=7),
    event("gemm", 130, 30, cat="kernel", tid=7),
    event("cudaLaunchKernel", 21, 2, cat="cuda_runtime"),
    event("iteration", 0, 5000, cat="Trace"),
    {"ph": "M", "name": "process_name"},
]


def test_calls_are_taken_out_of_their_callers() -> None:
    rows = {name: (calls, round(host, 6), round(device, 6)) for name, calls, host, device in op_times(EVENTS)}
    assert rows == {
        "outer": (2, (100 - 10 - 30 - 4 + 50) / 1e3, 0),
        "inner": (3, (10 - 2 + 30 - 5 + 1000) / 1e3, 0),
        "innermost": (1, 5 / 1e3, 0),
        "first child": (1, 4 / 1e3, 0),
        "cudaLaunchKernel": (1, 2 / 1e3, 0),
        "gemm": (2, 0, 100 / 1e3),
    }
    assert [row[0] for row in op_times(EVENTS)][:3] == ["inner", "outer", "gemm"]


def test_as_a_program(tmp_path: Path) -> None:
    trace, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    trace.write_text(json.dumps({"traceEvents": EVENTS}))
    command = [sys.executable, "-P", trace_times.__file__, str(trace), str(packed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert json.loads(done.stdout) == op_times(EVENTS)
    assert gzip.decompress(packed.read_bytes()) == trace.read_bytes()
