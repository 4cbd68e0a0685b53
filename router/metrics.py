"""The router's metrics that are counted as things happen: requests, and their latencies as clients see them. (`gauges`
has those that are read at scrape time.)

Names, meanings and histogram edges are vLLM's (vllm/v1/metrics, 0.32) where it has them, behind our prefix, so that
dashboards only need to change the prefix. Observed on the event loop: a few microseconds per token.

    Account, Lifecycle ──first_token, tokens, retried, …──┬──> histograms, counters ──┐
    Outcome ──answered, failed────────────────────────────┘                           ├──> registry
    RouterGauges: read when somebody looks ───────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from protos import tandem_inference_pb2 as pb
from rpc.errors import STATUS_CODES

FINISHED_REASONS = ("stop", "length", "abort")
"""Finish reasons of requests that were answered."""
MODES = ("disaggregated", "local", "stay")
FAILURE_REASONS = tuple(sorted({"cancelled", "internal", *(status.name.lower() for status in STATUS_CODES.values())}))
# fmt: off
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
INTER_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
# fmt: on
NUM_ANSWERS = (1, 2, 5, 10, 20)
TRANSFER_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def token_edges(max_model_len: int) -> tuple[int, ...]:
    """Histogram edges 1, 2, 5, 10 … up to the context length."""
    edges = (mantissa * 10**exponent for exponent in range(10) for mantissa in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= max_model_len) or (1,)


class RouterMetrics:
    """One per router. `registry` is what the metrics endpoint serves."""

    def __init__(self, model: str, max_model_len: int, *, good_ttft_ms: float, good_tpot_ms: float) -> None:
        """`good_…`: the latencies up to which an answer counts as good."""
        self.registry = CollectorRegistry()
        self._model = model
        self._good_ttft_ms = good_ttft_ms
        self._good_tpot_ms = good_tpot_ms
        tokens = token_edges(max_model_len)
        self._ttft = self._histogram("time_to_first_token_seconds", "Until the first token.", FIRST_TOKEN_SECONDS)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens.", INTER_TOKEN_SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between an answer's tokens.", INTER_TOKEN_SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Until a worker had room.", REQUEST_SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "Then to the first token.", REQUEST_SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "After the first token.", REQUEST_SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "Both together.", REQUEST_SECONDS)
        self._exposed = self._histogram(
            "request_transfer_time_seconds", "Of KV transfers, what computation did not hide.", TRANSFER_SECONDS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer.", tokens)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer to a request.", tokens
        )
        self._n = self._histogram("request_params_n", "Answers asked for (n).", NUM_ANSWERS)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens, if it was asked for.", tokens)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Of these, found in a prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sent to clients.")
        self._successes = self._by("request_success", "Requests answered.", "finished_reason", FINISHED_REASONS)
        self._failures = self._by(
            "request_failures", "Requests that ended with an error, or were refused.", "reason", FAILURE_REASONS
        )
        self._modes = self._by("requests_by_mode", "Requests answered, by who prefilled.", "mode", MODES)
        self._good = self._counter("requests_good", "Requests answered within the objectives.")
        self._retries = self._counter("retries", "Attempts after the first of a request.")
        self._migrations = self._counter("migrations", "Answers that went on at another worker after they had begun.")
        self._rebalances = self._counter("rebalances", "Answers that moved to a worker with less to do as they ran.")
        self._resumptions = self._counter("resumptions", "Answers that another router had begun, asked for again here.")

    # -- observations -------------------------------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        """A request's first token is on its way to the client, `seconds` after the request's arrival."""
        self._ttft.observe(seconds)

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """New tokens of one answer came, `gap_s` after the previous ones; None: they are the first."""
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            self._itl.observe(gap_s)

    def retried(self, *, has_begun: bool) -> None:
        """An attempt has failed and another follows. `has_begun`: the client has tokens already."""
        self._retries.inc()
        if has_begun:
            self._migrations.inc()

    def rebalanced(self) -> None:
        """An answer leaves its decode worker for one that has less to do."""
        self._rebalances.inc()

    def resumed(self) -> None:
        """This router accepted an answer that another router had begun and lost."""
        self._resumptions.inc()

    def asked(self, params: pb.SamplingParams) -> None:
        """A request that was accepted has ended. `params`: as the client gave them."""
        self._n.observe(params.n or 1)
        if params.HasField("max_tokens"):
            self._max_tokens.observe(params.max_tokens)

    def all_answered(self, lasts: Sequence[pb.GenerateResponse]) -> None:
        """A request has ended without an error; `lasts` are the last messages of its answers."""
        for last in lasts:
            self._answered(last)
        served = [last.usage.completion_tokens for last in lasts if last.timings.mode != pb.MODE_UNSPECIFIED]
        if served:
            self._longest.observe(max(served))

    def _answered(self, last: pb.GenerateResponse) -> None:
        usage, timings = last.usage, last.timings
        is_served = timings.mode != pb.MODE_UNSPECIFIED
        # An answer that no worker served here was complete already, and the router that sent its tokens has counted it;
        # or it was aborted.
        if is_served or last.finish_reason == pb.FINISH_REASON_ABORT:
            self._successes.labels(self._model, pb.FinishReason.Name(last.finish_reason)[14:].lower()).inc()
        if not is_served:
            return
        self._modes.labels(self._model, pb.Mode.Name(timings.mode)[5:].lower()).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._prompt.observe(usage.prompt_tokens)
        self._generated.observe(usage.completion_tokens)
        self._e2e.observe(timings.total_ms / 1000)
        self._queue.observe(timings.queue_ms / 1000)
        self._prefill.observe(timings.prefill_ms / 1000)
        decode_ms = timings.transfer_ms + timings.decode_ms
        self._decode.observe(decode_ms / 1000)
        self._inference.observe((timings.prefill_ms + decode_ms) / 1000)
        if timings.mode == pb.MODE_DISAGGREGATED:
            self._exposed.observe(timings.transfer_ms / 1000)
        if usage.completion_tokens > 1:
            self._tpot.observe(timings.time_per_output_token_ms / 1000)
        is_in_time = timings.time_to_first_token_ms <= self._good_ttft_ms
        if is_in_time and timings.time_per_output_token_ms <= self._good_tpot_ms:
            self._good.inc()

    def failed(self, reason: str) -> None:
        """A request has ended with an error, or was refused. `reason`: the error's gRPC code in lower case."""
        self._failures.labels(self._model, reason).inc()

    # -- creating metrics ---------------------------------------------------------------------------------------

    def _histogram(self, name: str, help_text: str, edges: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"tandem:{name}", help_text, ["model_name"], buckets=edges, registry=self.registry)
        return histogram.labels(self._model)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"tandem:{name}", help_text, ["model_name"], registry=self.registry).labels(self._model)

    def _by(self, name: str, help_text: str, label: str, known: Iterable[str]) -> Counter:
        """A counter by `label`, whose `known` values are 0 from the start: an alert on a series that does not exist yet
        would never fire."""
        counter = Counter(f"tandem:{name}", help_text, ["model_name", label], registry=self.registry)
        for value in known:
            counter.labels(self._model, value)
        return counter
