"""Measures the seconds that work takes on a device.

Short kernels are recorded in a CUDA graph, repeated until it is two milliseconds long, and timed by events around a
replay that follows another replay: so no number includes the CPU's time to launch them, or a graph's time to begin.
Inputs rotate among sets that together do not fit in the cache, and hold random numbers: with zeros the same product is
faster. The median of many rounds counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

MAX_SETS = 64
WARM_UP_S = 0.1
"""An idle device has low clocks."""
GRAPH_S = 2e-3
"""A graph begins some microseconds after its launch, and single kernels may be as short as that."""
CACHES = 5
"""Caches do not always evict the oldest data: with random eviction, a fifth of twice the cache's size would still be
there when its turn comes, of five times its size almost nothing."""


def num_sets(bytes_each: int, cache_bytes: int) -> int:
    """How many inputs of `bytes_each` to rotate among, so that none is still in the cache at its next use. Limited,
    because a toy would need too many."""
    return min(max(1, -(-CACHES * cache_bytes // bytes_each)), MAX_SETS)


def cache_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size) if device == "cuda" else 0


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(works: Sequence[Callable[[], object]], device: str, *, num_rounds: int = 30) -> float:
    """Median seconds of one of `works`, which do the same on different inputs and do not wait for the device."""
    for work in works:
        work()  # compiles, chooses algorithms
    synchronize(device)
    if device == "cuda":
        return _replayed_seconds(works, num_rounds) / len(works)
    return statistics.median(_host_seconds(lambda: [work() for work in works]) for _ in range(num_rounds)) / len(works)


def waiting_seconds_of(work: Callable[[], object], device: str, *, num_rounds: int = 10) -> float:
    """Median seconds of work that is long or waits for the device, from its beginning until the device is done."""

    def once() -> None:
        work()
        synchronize(device)

    _warm_up(once, device)
    return statistics.median(_host_seconds(once) for _ in range(num_rounds))


def _warm_up(once: Callable[[], None], device: str) -> None:
    once()  # compiles, chooses algorithms
    start_s = time.perf_counter()
    while device == "cuda" and time.perf_counter() - start_s < WARM_UP_S:
        once()


def _host_seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _replayed_seconds(works: Sequence[Callable[[], object]], num_rounds: int) -> float:
    """Seconds of all of `works`, one after the other."""
    num_passes = max(1, math.ceil(GRAPH_S / _seconds_of_graph(_recorded(works, 1), 3)))
    return _seconds_of_graph(_recorded(works, num_passes), num_rounds) / num_passes


def _recorded(works: Sequence[Callable[[], object]], num_passes: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_passes):
            for work in works:
                work()
    return graph


def _seconds_of_graph(graph: torch.cuda.CUDAGraph, num_rounds: int) -> float:
    def once() -> None:
        graph.replay()
        torch.cuda.synchronize()

    _warm_up(once, "cuda")
    milliseconds = []
    for _ in range(num_rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # while it runs, everything after it is queued
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds) / 1e3
