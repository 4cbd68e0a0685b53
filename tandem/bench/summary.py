"""The results of a run as numbers. Pure: outcomes in, a `Summary` out. The names are those of vLLM's load client where
it has the same number, so that results can be compared."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.bench.outcome import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")
GOOD_SHARE = 0.99
"""The share of requests at a rate that must be good for the rate to count as goodput."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, interpolated linearly between the two nearest values, as in numpy."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def parse_goodput(text: str) -> dict[str, float]:
    """ "ttft:1000 tpot:50" -> {"ttft": 1000.0, "tpot": 50.0}, in milliseconds. Raises `ValueError`."""
    objectives: dict[str, float] = {}
    for part in text.split():
        match = re.fullmatch(r"(\w+):(\d+(?:\.\d+)?)", part)
        if match is None or match[1] not in OBJECTIVES:
            raise ValueError(f"{part!r} is not an objective: {', '.join(f'{name}:MS' for name in OBJECTIVES)}")
        objectives[match[1]] = float(match[2])
    return objectives


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The distribution of a metric's values, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The summary of one run. A number is None if it is unknown: no answers, no objectives, or a server that does not
    report cached tokens."""

    request_rate: float
    num_prompts: int
    completed: int
    refused: int
    failed: int
    errors: dict[str, int]
    """Refusals and failures by status."""
    duration: float
    """Seconds from the start to the end of the last request."""
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    total_input_tokens: int
    total_output_tokens: int
    prefix_hit_rate: float | None
    request_goodput: float | None
    """Good answers per second."""
    good_share: float | None
    """Share of good answers among all requests, refused and failed ones included."""
    max_send_lag_ms: float
    """How late this client sent a request at most. If this is long, the client was measured, and not the server."""
    spreads: dict[str, Spread] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A flat dict for JSON and CSV: p99_ttft_ms and so on; an infinite rate is "inf"."""
        flat = {name: _rounded(value) for name, value in vars(self).items() if name != "spreads"}
        if self.request_rate == float("inf"):
            flat["request_rate"] = "inf"
        for metric, spread in self.spreads.items():
            for name in ("mean", "median", "std"):
                flat[f"{name}_{metric}_ms"] = _rounded(getattr(spread, name))
            for percent, value in spread.percentiles.items():
                flat[f"p{percent:g}_{metric}_ms"] = _rounded(value)
        return flat


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Whether the request was answered within every objective."""
    return outcome.is_answered and all(
        getattr(outcome, f"{name}_ms") <= bound_ms for name, bound_ms in objectives.items()
    )


def summarise(
    request_rate: float,
    outcomes: Sequence[Outcome],
    *,
    objectives: Mapping[str, float],
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
) -> Summary:
    """The summary of all `outcomes` of one run. Latencies are those of answered requests."""
    done = [outcome for outcome in outcomes if outcome.is_answered]
    duration_s = max((outcome.ended_s for outcome in outcomes), default=0.0) or 1e-9
    num_input = sum(outcome.usage.prompt_tokens for outcome in done if outcome.usage)
    num_output = sum(outcome.num_tokens for outcome in done)
    num_good = sum(is_good(outcome, objectives) for outcome in outcomes)
    return Summary(
        request_rate=request_rate,
        num_prompts=len(outcomes),
        completed=len(done),
        refused=sum(outcome.is_refused for outcome in outcomes),
        failed=sum(bool(outcome.code) and not outcome.is_refused for outcome in outcomes),
        errors=dict(Counter(outcome.code for outcome in outcomes if outcome.code).most_common()),
        duration=duration_s,
        request_throughput=len(done) / duration_s,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        prefix_hit_rate=prefix_hit_rate(done),
        request_goodput=num_good / duration_s if objectives else None,
        good_share=num_good / len(outcomes) if objectives and outcomes else None,
        max_send_lag_ms=max((1e3 * (outcome.sent_s - outcome.due_s) for outcome in outcomes), default=0.0),
        spreads={metric: spread_of(values, percentiles) for metric in metrics if (values := values_of(metric, done))},
    )


def prefix_hit_rate(done: Sequence[Outcome]) -> float | None:
    """Cached prompt tokens of all prompt tokens; None where no server said how many were cached."""
    usages = [outcome.usage for outcome in done if outcome.usage]
    if not usages or all(usage.cached_tokens is None for usage in usages):
        return None
    return sum(usage.cached_tokens or 0 for usage in usages) / max(1, sum(usage.prompt_tokens for usage in usages))


def values_of(metric: str, done: Sequence[Outcome]) -> list[float]:
    """The values of a metric in milliseconds. An answer of one token has no TPOT."""
    if metric == "itl":
        return [gap_ms for outcome in done for gap_ms in outcome.itl_ms]
    return [getattr(outcome, f"{metric}_ms") for outcome in done if metric != "tpot" or outcome.num_tokens > 1]


def spread_of(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    ordered = sorted(values)
    return Spread(
        mean=statistics.fmean(ordered),
        median=percentile(ordered, 50),
        std=statistics.pstdev(ordered),
        percentiles={percent: percentile(ordered, percent) for percent in percentiles},
    )


def max_good_rate(summaries: Sequence[Summary]) -> float | None:
    """A curve's goodput: the highest finite rate at which 99 % were good, in all runs at that rate together; 0 if none
    was.

    None without objectives, or if no finite rate was tried.
    """
    tried = [summary for summary in summaries if summary.request_rate != float("inf")]
    if all(summary.good_share is None for summary in tried):
        return None
    num_asked, num_good = Counter[float](), Counter[float]()
    for summary in tried:
        num_asked[summary.request_rate] += summary.num_prompts
        num_good[summary.request_rate] += round((summary.good_share or 0) * summary.num_prompts)
    return max((rate for rate, num in num_asked.items() if num and num_good[rate] >= GOOD_SHARE * num), default=0.0)


def gaps_over_time(outcomes: Sequence[Outcome], num_buckets: int = 60) -> list[tuple[float, float, float]]:
    """(seconds since the start, p50, p99) of the gaps between messages, by when they ended. Without empty stretches."""
    gaps = [
        (at_s, gap_ms)
        for outcome in outcomes
        for at_s, gap_ms in zip(outcome.arrived_s[1:], outcome.itl_ms, strict=True)
    ]
    if not gaps:
        return []
    width_s = max(at_s for at_s, _ in gaps) / num_buckets or 1.0
    buckets: dict[int, list[float]] = {}
    for at_s, gap_ms in gaps:
        buckets.setdefault(min(int(at_s / width_s), num_buckets - 1), []).append(gap_ms)
    return [
        ((index + 0.5) * width_s, percentile(values, 50), percentile(values, 99))
        for index, values in sorted(buckets.items())
    ]
