"""What all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.forecast import Forecast
from router.metrics import RouterMetrics
from router.prefix_lookup import PrefixLookup
from router.queue import RequestQueue
from router.rebalancer import Rebalancer
from router.request_state import AttemptNumbers
from router.retry_budget import RetryBudget
from router.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True)
class RouterParts:
    pool: WorkerPool
    queue: RequestQueue
    prefixes: PrefixLookup
    budget: RetryBudget
    forecast: Forecast
    metrics: RouterMetrics
    rebalancer: Rebalancer
    numbers: AttemptNumbers = field(default_factory=AttemptNumbers)
    """Clients choose request ids and may use one again; attempt numbers tell such requests apart."""
