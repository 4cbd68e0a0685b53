"""An open-loop load client: requests come when they come, whether or not the server keeps up. One measure for every
server, whatever it speaks.

    Workload ──arrivals──> one task per request ──Send: a stream of token counts──> Timing ──> Summary

`Send` is all that differs between servers (`benchmarks/targets.py`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

Send = Callable[[list[int], int], AsyncIterator[int]]
"""(prompt token ids, output tokens) -> the number of new tokens in each message as it comes. Greedy, no early end."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts of one length; Poisson arrivals at `rate` per second, or all at once where it is infinite."""

    rate: float
    num_requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    vocab_size: int = 49_000

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [
            [rng.randrange(100, self.vocab_size) for _ in range(self.input_tokens)] for _ in range(self.num_requests)
        ]

    def arrivals_s(self) -> list[float]:
        """Since the start."""
        if self.rate == float("inf"):
            return [0.0] * self.num_requests
        rng = random.Random(self.seed + 1)
        gaps = [rng.expovariate(self.rate) for _ in range(self.num_requests)]
        return [sum(gaps[: i + 1]) for i in range(self.num_requests)]


@dataclass(slots=True)
class Timing:
    """One request, in seconds since the run's start."""

    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    """Of each message with tokens."""
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.arrived_s[0] - self.sent_s)

    @property
    def tpot_ms(self) -> float:
        return 1e3 * (self.arrived_s[-1] - self.arrived_s[0]) / max(1, self.num_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in zip(self.arrived_s, self.arrived_s[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run shows. Good requests had their first token within `max_ttft_ms`, the others within `max_tpot_ms`."""

    rate: float
    completed: int
    failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    p50_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    good_share: float


async def run(workload: Workload, send: Send, *, max_ttft_ms: float, max_tpot_ms: float) -> Summary:
    """Send the workload and wait for every answer. Failed requests are counted, and are not good."""
    start_s = time.perf_counter()

    async def one(prompt: list[int], at_s: float) -> Timing:
        await asyncio.sleep(at_s - (time.perf_counter() - start_s))
        timing = Timing(time.perf_counter() - start_s)
        try:
            async for num_tokens in send(prompt, workload.output_tokens):
                timing.arrived_s.append(time.perf_counter() - start_s)
                timing.num_tokens += num_tokens
        except Exception as error:  # whatever a server does wrong is a failed request
            timing.error = repr(error)
        if not timing.error and timing.num_tokens != workload.output_tokens:
            timing.error = f"{timing.num_tokens} tokens instead of {workload.output_tokens}"
        return timing

    timings = await asyncio.gather(*map(one, workload.prompts(), workload.arrivals_s()))
    return summarise(workload, timings, max_ttft_ms, max_tpot_ms)


def summarise(workload: Workload, timings: Sequence[Timing], max_ttft_ms: float, max_tpot_ms: float) -> Summary:
    done = [timing for timing in timings if not timing.error]
    if not done:
        raise RuntimeError(f"no request was answered: {timings[0].error}")
    duration_s = max(timing.arrived_s[-1] for timing in done)
    ttft, tpot = [timing.ttft_ms for timing in done], [timing.tpot_ms for timing in done]
    itl = [gap for timing in done for gap in timing.itl_ms] or [0.0]
    num_good = sum(t.ttft_ms <= max_ttft_ms and t.tpot_ms <= max_tpot_ms for t in done)
    return Summary(
        rate=workload.rate,
        completed=len(done),
        failed=len(timings) - len(done),
        duration_s=round(duration_s, 2),
        requests_per_s=round(len(done) / duration_s, 2),
        output_tokens_per_s=round(sum(timing.num_tokens for timing in done) / duration_s, 1),
        p50_ttft_ms=round(statistics.median(ttft), 1),
        p99_ttft_ms=round(percentile(ttft, 99), 1),
        p50_tpot_ms=round(statistics.median(tpot), 1),
        p99_tpot_ms=round(percentile(tpot, 99), 1),
        p50_itl_ms=round(statistics.median(itl), 1),
        p99_itl_ms=round(percentile(itl, 99), 1),
        good_share=round(num_good / len(timings), 3),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest, as numpy's."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
