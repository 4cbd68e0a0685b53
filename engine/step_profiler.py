"""Watches some steps of an engine with torch's profiler.

    made by whoever asks ──(stepping thread) step, step, … ──> done: `on_done` hears, `profile` reads what was seen
                                  └── stop ──> done with fewer

Watching begins with the first step, not before: an idle engine is not watched. What was seen is read on another thread
than the stepping one, since it takes longer than a step.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput

MAX_PROFILED_STEPS = 64
"""A step has thousands of events; what they take in memory is bounded so."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Of one operation, all its calls, without what it calls itself."""

    name: str
    num_calls: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    num_steps: int
    step_ms: float
    """Wall time of these steps together. What of it no operation has is Python's, and the profiler's own."""
    ops: list[OpTime]
    """Those that took longest first."""
    trace_gz: bytes
    """Chrome's trace format, as chrome://tracing and Perfetto read it; empty if not asked for."""


class StepProfiler:
    """Of one engine, for `num_steps` steps. `step` and `stop` on the stepping thread."""

    def __init__(self, num_steps: int, on_done: Callable[[], None]) -> None:
        """Raises `ValueError` for a number out of bounds."""
        if not 1 <= num_steps <= MAX_PROFILED_STEPS:
            raise ValueError(f"num_steps must be in [1, {MAX_PROFILED_STEPS}], is {num_steps}")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._torch = torch.profiler.profile(activities=activities)
        self._num_wanted = num_steps
        self._is_watching = False
        self._num_steps = 0
        self._step_ms = 0.0
        self._on_done = on_done
        self.is_done = False

    def step(self, engine: LLMEngine) -> list[RequestOutput]:
        """A step of the engine, watched. One that found nothing to compute does not count."""
        if not self._is_watching:
            self._is_watching = True
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
        """Watch no more. `on_done` is called, the first time."""
        if self.is_done:
            return
        self.is_done = True
        if self._is_watching:
            self._torch.stop()
        self._on_done()

    def profile(self, *, with_trace: bool) -> StepProfile:
        """What was seen, once it is done. Takes up to some seconds."""
        assert self.is_done
        if not self._num_steps:
            return StepProfile(0, 0.0, [], b"")
        ops = [_op_time(row) for row in self._torch.key_averages()]
        ops.sort(key=lambda op: max(op.host_ms, op.device_ms), reverse=True)
        return StepProfile(self._num_steps, self._step_ms, ops, self._trace() if with_trace else b"")

    def _trace(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._torch.export_chrome_trace(str(path))
            return gzip.compress(path.read_bytes())


def _op_time(row: Any) -> OpTime:
    # In microseconds.
    return OpTime(row.key, row.count, row.self_cpu_time_total / 1e3, row.self_device_time_total / 1e3)
