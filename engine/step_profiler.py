"""Profiles some steps of an engine with torch's profiler.

    made by the caller ──(stepping thread) step, step, … ──> done: `on_done` is called, `profile` reads the results
                                  └── stop ──> done with fewer

Profiling begins with the first step, not before. When it ends, it stops the engine for some microseconds per recorded
operation, so that the number of steps is limited. Another process (engine/trace_times.py) reads the results, since that
takes longer than the steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from engine import trace_times
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput

MAX_PROFILED_STEPS = 16
"""With transformers' code a step has some thousands of operations; 100,000 stop an engine for half a second."""
READING_S = 50.0


@dataclass(frozen=True, slots=True)
class OpTime:
    """Times of all calls of an operation or a device's kernel, without the operations that it calls."""

    name: str
    num_calls: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    num_steps: int
    step_ms: float
    """Total wall time of these steps. What no operation accounts for is Python's and the profiler's time."""
    ops: list[OpTime]
    """The slowest first."""
    trace_gz: bytes
    """Chrome's trace format, for chrome://tracing and Perfetto; empty if not requested."""


class StepProfiler:
    """Profiles `num_steps` steps of one engine. `step` and `stop` run on the stepping thread."""

    def __init__(self, num_steps: int, on_done: Callable[[], None]) -> None:
        """Raises `ValueError` if `num_steps` is out of bounds."""
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ValueError(f"num_steps must be in [1, {MAX_PROFILED_STEPS}], is {num_steps}")
        self._torch: torch.profiler.profile | None = None
        """Created on the stepping thread, which it profiles. None: no step was profiled."""
        self._num_wanted = num_steps
        self._num_steps = 0
        self._step_ms = 0.0
        self._on_done = on_done
        self.is_done = False

    def step(self, engine: LLMEngine) -> list[RequestOutput]:
        """Run and profile a step of the engine. A step that computes nothing does not count."""
        if self._torch is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._torch = torch.profiler.profile(activities=activities)
            self._torch.start()
        num_before, start_s = engine.stats.num_steps, time.perf_counter()
        outputs = engine.step()
        if engine.stats.num_steps > num_before:
            self._step_ms += 1e3 * (time.perf_counter() - start_s)
            self._num_steps += 1
        if self._num_steps == self._num_wanted:
            self.stop()
        return outputs

    def stop(self) -> None:
        """Stop profiling. The first call calls `on_done`."""
        if self.is_done:
            return
        self.is_done = True
        if self._torch is not None:
            self._torch.stop()
        self._on_done()

    def profile(self, *, with_trace: bool) -> StepProfile:
        """Read the results, once done. Call it on another thread, since it takes up to some seconds."""
        assert self.is_done
        if self._torch is None or not self._num_steps:
            return StepProfile(0, 0.0, [], b"")
        with tempfile.TemporaryDirectory() as folder:
            trace, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            self._torch.export_chrome_trace(str(trace))
            self._torch = None
            command = [sys.executable, "-P", trace_times.__file__, str(trace), *([str(packed)] if with_trace else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=READING_S)
            ops = [OpTime(*row) for row in json.loads(done.stdout)]
            return StepProfile(self._num_steps, self._step_ms, ops, packed.read_bytes() if with_trace else b"")
