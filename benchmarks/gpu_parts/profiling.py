"""Profiles a device with CUDA's profiler: how long it is busy during some work, and with which kernels.

The profiler lengthens the gaps between kernels, not the kernels: the time of a step is measured without it. It runs
last, because it may leave a process slower than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.gpu_parts.timing import synchronize

NAME_WIDTH = 90


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one call of the work."""

    name: str
    launches: float
    ms: float


@dataclass(frozen=True)
class DeviceWork:
    """The device's work in one call."""

    busy_ms: float
    """Time covered by kernels and copies, which may overlap on several streams."""
    kernels: list[KernelTime]
    """The longest first."""


def profiled(work: Callable[[], object], num_calls: int, device: str, *, num_warm_up_calls: int) -> DeviceWork:
    """Profile `work`. The first calls are discarded, because the profiler may miss parts of them. Raises `RuntimeError`
    if it saw nothing."""
    activity, kind = (
        (ProfilerActivity.CUDA, DeviceType.CUDA) if device == "cuda" else (ProfilerActivity.CPU, DeviceType.CPU)
    )
    phases = schedule(wait=0, warmup=num_warm_up_calls, active=num_calls, repeat=1)
    with profile(activities=[activity], schedule=phases) as profiler:
        for number in range(num_warm_up_calls + num_calls):
            work()
            if number + 1 in (num_warm_up_calls, num_warm_up_calls + num_calls):
                synchronize(device)  # so that each call belongs to one phase
            profiler.step()
    events = [event for event in profiler.events() if event.device_type == kind]
    if not events:
        raise RuntimeError("the profiler saw no work on the device")
    return DeviceWork(covered(map(span_of, events)) / 1e3 / num_calls, by_kernel(events, num_calls))


def by_kernel(events: Iterable[Any], num_calls: int) -> list[KernelTime]:
    spans = defaultdict(list)
    for event in events:
        start, end = span_of(event)
        spans[event.name].append(end - start)
    times = [KernelTime(name, len(each) / num_calls, sum(each) / 1e3 / num_calls) for name, each in spans.items()]
    return sorted(times, key=lambda time: -time.ms)


def write_table(path: Path, title: str, work: DeviceWork) -> None:
    """Append `work` to the file, one line per kernel."""
    total_ms = sum(time.ms for time in work.kernels) or 1.0
    with path.open("a") as file:
        print(f"{title}: busy for {work.busy_ms:.3f} ms", file=file)
        print(f"{'ms':>9} {'share':>6} {'launches':>9} {'us each':>9}  kernel", file=file)
        for time in work.kernels:
            each_us = 1e3 * time.ms / time.launches
            row = f"{time.ms:9.3f} {time.ms / total_ms:6.1%} {time.launches:9.1f} {each_us:9.2f}"
            print(f"{row}  {time.name[:NAME_WIDTH]}", file=file)


def span_of(event: Any) -> tuple[float, float]:
    """Microseconds."""
    return event.time_range.start, event.time_range.end


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
