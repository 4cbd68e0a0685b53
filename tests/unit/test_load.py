"""The load client: what it sends when, and what it makes of what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from benchmarks.load import Timing, Workload, percentile, run, summarise


def workload(rate: float = 50.0, num_requests: int = 20, seed: int = 1) -> Workload:
    return Workload(rate=rate, num_requests=num_requests, input_tokens=8, output_tokens=3, seed=seed)


def test_arrivals_are_poisson_and_of_the_seed() -> None:
    arrivals = workload(rate=4.0, num_requests=4000).arrivals_s()
    gaps = np.diff([0.0, *arrivals])
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert workload(seed=2).arrivals_s() != workload().arrivals_s() == workload().arrivals_s()
    assert workload(rate=float("inf")).arrivals_s() == [0.0] * 20


def test_no_two_runs_share_a_prompt() -> None:
    prompts = [tuple(prompt) for seed in (1, 2) for prompt in workload(seed=seed).prompts()]
    assert len(set(prompts)) == 40


def test_times_are_those_of_messages() -> None:
    good = Timing(1.0, [1.5, 1.52, 1.56], 3)
    late, slow = Timing(1.0, [2.1, 2.11, 2.12], 3), Timing(1.0, [1.1, 1.2, 1.3], 3)
    failed = Timing(1.0, error="gone")
    assert (good.ttft_ms, good.tpot_ms) == (pytest.approx(500), pytest.approx(30))
    summary = summarise(workload(), [good, late, slow, failed], max_ttft_ms=1000, max_tpot_ms=50)
    assert (summary.completed, summary.failed, summary.good_share) == (3, 1, 0.25)
    assert summary.duration_s == 2.12
    assert summary.p99_itl_ms == pytest.approx(100, rel=0.02)


def test_percentiles_are_numpys() -> None:
    values = [float(v) for v in np.random.default_rng(1).normal(size=57)]
    for percent in (0, 1, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


async def test_load_is_open_loop_and_counts_what_fails() -> None:
    """The server never answers one request and breaks off another: all others come and go all the same."""
    calls = 0

    async def send(prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("broke")
        for _ in range(output_tokens - (calls == 3)):
            await asyncio.sleep(0)
            yield 1

    summary = await run(workload(rate=1000.0), send, max_ttft_ms=1000, max_tpot_ms=1000)
    assert (summary.completed, summary.failed) == (18, 2)
