"""The router's metrics that are read at scrape time: its queue, its workers, and the costs that plans are chosen by.
`metrics` has those that are counted as things happen."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import tandem_worker_pb2 as worker_pb
from registry.workers import role_name
from router.open_requests import OpenRequests
from router.parts import RouterParts

COST_TOKENS = 1024
"""Length of the prompt for which costs are shown."""


class RouterGauges(Collector):
    """Reads the router's state at scrape time."""

    def __init__(self, model: str, *, parts: RouterParts, open_requests: OpenRequests) -> None:
        self._model = model
        self._queue, self._pool, self._budget = parts.queue, parts.pool, parts.budget
        self._open_requests = open_requests

    def collect(self) -> Iterable[Metric]:
        for name, help_text, value in (
            ("router_requests", "Requests open at this router, waiting or running.", len(self._open_requests)),
            ("queue_requests", "Requests that wait for a worker.", len(self._queue)),
            ("queue_tokens", "Prompt tokens of requests that wait for a worker.", self._queue.num_tokens),
            ("retry_budget", "Retries left in the budget; a request's first is free.", self._budget.num_tokens),
            ("registry_reachable", "1 while Redis answers.", self._pool.is_registry_reachable()),
            ("ejected_workers", "Workers not used for a while after repeated failures.", len(self._pool.ejected)),
            ("pairs_apart", "Worker pairs not used together after failed transfers.", len(self._pool.apart)),
        ):
            gauge = GaugeMetricFamily(f"tandem:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        yield from self._costs()
        yield from self._lora_requests()
        workers = GaugeMetricFamily("tandem:workers", "Workers that take new work.", labels=["model_name", "role"])
        for role in (worker_pb.ROLE_PREFILL, worker_pb.ROLE_DECODE):
            workers.add_metric([self._model, role_name(role)], len(self._pool.usable(role)))
        yield workers

    def _lora_requests(self) -> Iterable[Metric]:
        """The adapters that requests ask for, if workers have any: vLLM's gauge, whose value is the time."""
        adapters = {name for record in self._pool.decode_records() for name in record.model.lora_names}
        if not adapters:
            return
        asked = [lifecycle for lifecycle in self._open_requests.lifecycles if lifecycle.lora_name]
        waiting = {lifecycle.lora_name for lifecycle in asked if lifecycle.account.is_waiting}
        running = {lifecycle.lora_name for lifecycle in asked if not lifecycle.account.is_waiting}
        gauge = GaugeMetricFamily(
            "tandem:lora_requests_info",
            "LoRA adapters that requests use; max_lora: how many are loaded.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        labels = [self._model, str(len(adapters)), ",".join(sorted(running)), ",".join(sorted(waiting))]
        gauge.add_metric(labels, time.time())
        yield gauge

    def _costs(self) -> Iterable[Metric]:
        """The costs that plans are chosen by."""
        costs, now_s = self._pool.costs, time.monotonic()
        handover = GaugeMetricFamily(
            "tandem:expected_handover_seconds",
            f"Time that moving the KV of {COST_TOKENS} tokens is expected to add to a request; 0: not measured yet.",
            labels=["model_name"],
        )
        handover.add_metric([self._model], costs.handover_s(COST_TOKENS, now_s))
        prompts = GaugeMetricFamily(
            "tandem:expected_prompt_seconds",
            f"Time that prefilling {COST_TOKENS} tokens is expected to take on an idle worker.",
            labels=["model_name", "worker"],
        )
        slowness = GaugeMetricFamily(
            "tandem:decode_slowness",
            "How many times longer a worker's steps take than the others' at the same load; reported from 1.25 on.",
            labels=["model_name", "worker"],
        )
        # Of a restarted worker, keep the newer process: the old one may still be finishing its requests.
        keys = {handle.record.worker_id: handle.key for handle in self._pool.handles}
        for worker_id, key in keys.items():
            prompts.add_metric([self._model, worker_id], costs.prompt_s(key, COST_TOKENS, now_s))
            slowness.add_metric([self._model, worker_id], costs.paces.slowness(key, now_s))
        yield from (handover, prompts, slowness)
