"""A worker's Prometheus metrics, read from the engine's counters at each scrape, so that nothing is counted twice.

Names and meanings are vLLM's (vllm/v1/metrics, 0.32) where it has them, with our prefix. The router has the metrics of
requests and their latencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.scheduling.stats import COUNTERS, SchedulerStats
from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import KVTransferStats
from worker_service.role import TransferCounters

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""vLLM's."""
TRANSFER_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""The same buckets as for the router's exposed transfer time."""
TRANSFER_BYTES = tuple(1 << exponent for exponent in range(16, 36, 2))
"""64 KiB to 16 GiB."""
LABELS = ("model_name", "worker_id", "role")


class WorkerMetrics(Collector):
    """One per process. `registry` has the metrics."""

    def __init__(
        self,
        *,
        labels: tuple[str, str, str],
        load: Callable[[], pb.WorkerLoad],
        stats: SchedulerStats,
        block_bytes: int,
        counters: Callable[[], TransferCounters],
        num_sessions: Callable[[], int],
        cache_config: Mapping[str, str],
    ) -> None:
        """`stats`: written by the stepping thread; reading numbers needs no lock. `block_bytes`: of all layers.
        `cache_config`: the KV pool's settings, by vLLM's names."""
        self._labels = labels
        self._load = load
        self._stats = stats
        self._block_bytes = block_bytes
        self._counters = counters
        self._num_sessions = num_sessions
        self._cache_config = cache_config
        self.registry = CollectorRegistry()
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in one step of the engine.", ITERATION_TOKENS
        )
        self._transfer_seconds = self._histogram(
            "kv_transfer_seconds",
            "From the first push of a prompt's KV until the decode worker has all of it.",
            TRANSFER_SECONDS,
        )
        self._commit_seconds = self._histogram(
            "kv_commit_seconds",
            "The part of tandem:kv_transfer_seconds after the prompt was computed.",
            TRANSFER_SECONDS,
        )
        self._transfer_bytes = self._histogram("kv_transfer_bytes", "Bytes of KV pushed for a prompt.", TRANSFER_BYTES)
        self._num_tokens_seen = 0
        self.registry.register(self)

    def stepped(self) -> None:
        """A step has ended: record the tokens computed since the last call as one iteration."""
        num_tokens = self._stats.num_prompt_tokens + self._stats.num_generation_tokens
        if num_tokens > self._num_tokens_seen:
            self._iteration_tokens.observe(num_tokens - self._num_tokens_seen)
            self._num_tokens_seen = num_tokens

    def handed_over(self, stats: KVTransferStats) -> None:
        """Record that another worker has taken over a prompt computed here."""
        self._transfer_seconds.observe(stats.push_ms / 1000)
        self._commit_seconds.observe(stats.commit_ms / 1000)
        self._transfer_bytes.observe(stats.num_bytes)

    def collect(self) -> Iterable[Metric]:
        load, stats, counters = self._load(), self._stats, self._counters()
        blocks = load.blocks
        num_used = blocks.num_sequence + blocks.num_grant + blocks.num_held
        yield self._gauge("num_requests_running", "Requests in the engine's batch.", load.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the engine's queue.", load.num_waiting)
        yield self._gauge("num_waiting_tokens", "Prompt tokens still to be computed here.", load.num_waiting_tokens)
        yield self._gauge(
            "kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.", num_used / max(1, blocks.num_blocks)
        )
        info = GaugeMetricFamily(
            "tandem:cache_config_info", "Settings of the KV pool, as labels.", labels=[*LABELS, *self._cache_config]
        )
        info.add_metric([*self._labels, *self._cache_config.values()], 1)
        yield info
        owned = GaugeMetricFamily("tandem:kv_blocks", "KV blocks by owner.", labels=[*LABELS, "owner"])
        for owner in ("free", "cached", "sequence", "grant", "held"):
            owned.add_metric([*self._labels, owner], getattr(blocks, f"num_{owner}"))
        yield owned
        if load.HasField("host_blocks"):
            yield from self._of_offloading(load.host_blocks)
        yield self._gauge("num_sessions", "Routers that are connected.", self._num_sessions())
        yield self._gauge("num_grants", "Open grants: blocks reserved for KV transfers.", counters.num_grants)
        yield self._gauge("is_draining", "1 while the worker drains.", load.is_draining)
        yield self._gauge("is_stalled", "1 while the engine is stuck in a step.", load.is_stalled)
        for counter in COUNTERS:
            yield self._counter(counter.name, counter.about, getattr(stats, counter.field))
        for name, help_text, value in (
            ("grants", "Grants given.", counters.num_grants_issued),
            ("expired_leases", "Grants whose lease expired.", counters.num_expired_leases),
            ("late_writes", "Blocks dropped because their grant had ended.", counters.num_late_writes),
            ("repaired_blocks", "Blocks damaged in transit and pushed again.", counters.num_repairs),
        ):
            yield self._counter(name, help_text, value)
        yield self._accepted_per_pos()

    def _accepted_per_pos(self) -> CounterMetricFamily:
        accepted = CounterMetricFamily(
            "tandem:spec_decode_num_accepted_tokens_per_pos",
            "Speculative tokens accepted, by their place among the drafts of a sequence in a step.",
            labels=[*LABELS, "position"],
        )
        for position in range(self._stats.num_positions_right):
            accepted.add_metric([*self._labels, str(position)], self._stats.num_accepted_per_pos[position])
        return accepted

    def _of_offloading(self, host_blocks: pb.HostLedger) -> Iterable[Metric]:
        usage = host_blocks.num_kept / host_blocks.num_blocks
        yield self._gauge("kv_offload_cpu_cache_usage_perc", "Fraction of host blocks in use, 0 to 1.", usage)
        moved = CounterMetricFamily(
            "tandem:kv_offload_total_bytes",
            "Bytes of KV copied between pool and host memory.",
            labels=[*LABELS, "transfer_type"],
        )
        for transfer_type, num_blocks in (
            ("GPU_to_CPU", self._stats.num_saved_blocks),
            ("CPU_to_GPU", self._stats.num_loaded_blocks),
        ):
            moved.add_metric([*self._labels, transfer_type], num_blocks * self._block_bytes)
        yield moved
        stats, num_hits = self._stats, self._stats.num_loaded_tokens
        num_not_in_pool = stats.num_prefix_queries_tokens - stats.num_prefix_hits_tokens + num_hits
        yield self._counter("external_prefix_cache_queries", "Prompt tokens looked up in host memory.", num_not_in_pool)
        yield self._counter("external_prefix_cache_hits", "Prompt tokens found in host memory.", num_hits)

    def _histogram(self, name: str, help_text: str, edges: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"tandem:{name}", help_text, LABELS, buckets=edges, registry=self.registry)
        return histogram.labels(*self._labels)

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        counter = CounterMetricFamily(f"tandem:{name}", help_text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"tandem:{name}", help_text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge
