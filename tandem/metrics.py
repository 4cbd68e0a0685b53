"""What the engine of an `LLM` has counted since it began, as vLLM's `LLM.get_metrics` tells it.

    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            print(metric.name, metric.value)

Names are those of a worker's Prometheus metrics (worker_service/metrics.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.stats import COUNTERS, SchedulerStats


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    """With the prefix `tandem:`."""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True, kw_only=True)
class Vector(Metric):
    values: list[int]
    """Counters in an order: of guesses, by their place among those of a sequence in a step."""


def metrics_of(stats: SchedulerStats, model_name: str) -> list[Metric]:
    labels = {"model_name": model_name}
    counters = [
        Counter(name=f"tandem:{each.name}", labels=labels, value=getattr(stats, each.field)) for each in COUNTERS
    ]
    per_pos = Vector(
        name="tandem:spec_decode_num_accepted_tokens_per_pos",
        labels=labels,
        values=stats.num_accepted_per_pos[: stats.num_positions_right],
    )
    return [*counters, per_pos]
