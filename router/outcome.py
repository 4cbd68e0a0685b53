"""How a request ended, and how this is reported: one line in the log, metrics, and the attributes of its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import grpc

from protos import tandem_inference_pb2 as pb
from router.metrics import RouterMetrics
from router.timings import AttemptStamps
from router.validation.request import ValidatedRequest
from rpc.errors import STATUS_CODES, TandemError
from rpc.tracing import Value

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """The outcome of one request, with all its answers."""

    request: ValidatedRequest
    arrived_s: float
    error: Exception | None = None
    lasts: list[pb.GenerateResponse] = field(default_factory=list)
    """The last message of each answer that has ended."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Tokens of all answers that were sent to the client."""

    @property
    def is_complete(self) -> bool:
        return len(self.lasts) == self._num_answers

    @property
    def _num_answers(self) -> int:
        """How many answers were to be made: those that the client did not have completely."""
        return len(self.request.open_sequences)

    @property
    def word(self) -> str:
        return "failed" if self.error else "done" if self.is_complete else "cancelled"

    def note(self, response: pb.GenerateResponse) -> None:
        self.num_prompt_tokens = response.prompt_tokens or self.num_prompt_tokens
        self.num_tokens += len(response.token_ids)
        if response.finish_reason:
            self.lasts.append(response)

    def log(self, attempts: Mapping[int, Sequence[AttemptStamps]]) -> None:
        """`attempts`: by the answer's number, the attempts at it."""
        request = self.request
        facts: dict[str, object] = {"request_id": request.request_id}
        if request.lora_name:
            facts["lora_name"] = request.lora_name
        if request.sampling_params.priority:
            facts["priority"] = request.sampling_params.priority
        if request.fairness_id:  # may be a person's name: the hash allows comparing and searching, not reading it
            facts["fairness_id_hash"] = blake2b(request.fairness_id.encode(), digest_size=8).hexdigest()
        if self.error is not None:
            code = STATUS_CODES[type(self.error)].name if isinstance(self.error, TandemError) else "bug"
            facts |= {"code": code, "error": str(self.error)}
        elif self.is_complete:
            first = min(self.lasts, key=lambda last: last.sequence)
            reasons = sorted({pb.FinishReason.Name(last.finish_reason) for last in self.lasts})
            facts |= {
                "finish_reason": ",".join(reasons),
                "prompt_tokens": first.usage.prompt_tokens,
                "cached_tokens": first.usage.cached_tokens,
                "completion_tokens": sum(last.usage.completion_tokens for last in self.lasts),
                "mode": pb.Mode.Name(first.timings.mode),
                "prefill_worker": first.timings.prefill_worker or "-",
                "decode_worker": first.timings.decode_worker,
                "ttft_ms": first.timings.time_to_first_token_ms,
                "attempts": sum(last.timings.attempts for last in self.lasts),
            }
            if num_moves := sum(last.timings.moves for last in self.lasts):
                facts["moves"] = num_moves
            if self._num_answers > 1:
                facts["n"] = self._num_answers
        if not self.is_complete or self.error is not None:
            facts |= self._as_far_as_it_came(attempts)
        facts["total_ms"] = 1e3 * (time.monotonic() - self.arrived_s)
        _log.info(self.word, extra=facts)

    def _as_far_as_it_came(self, attempts: Mapping[int, Sequence[AttemptStamps]]) -> dict[str, object]:
        every = [each for of_one in attempts.values() for each in of_one]
        plans = [each.plan for each in every if each.plan is not None]
        if not plans:
            return {"attempts": 0}
        num_moves = sum(bool(each.moved_to) for each in every)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "mode": pb.Mode.Name(plans[-1].mode),
            "prefill_worker": plans[-1].prefill.worker_id if plans[-1].prefill is not None else "-",
            "decode_worker": plans[-1].decode.worker_id,
            "attempts": max(1, len(plans) - num_moves),  # a stream that moves is no failure
            **({"moves": num_moves} if num_moves else {}),
        }

    def trace_attributes(self, model: str) -> dict[str, Value]:
        """Attributes of the request's span, by vLLM's names where it has them. Times are in seconds."""
        attributes: dict[str, Value] = {
            "gen_ai.request.id": self.request.request_id,
            "gen_ai.response.model": self.request.lora_name or model,
            "gen_ai.request.n": self._num_answers,
            "tandem.outcome": self.word,
        }
        params = self.request.sampling_params
        for name in ("max_tokens", "temperature", "top_p"):
            if params.HasField(name):
                attributes[f"gen_ai.request.{name}"] = getattr(params, name)
        if num_resumed := sum(len(begun.token_ids) for begun in self.request.begun.values()):
            attributes["tandem.resumed_tokens"] = num_resumed
        if self.error is not None:
            attributes["error.type"] = reason_of(self.error)
        if self.is_complete:
            attributes |= _answer_attributes(self.lasts)
        return attributes

    def count(self, metrics: RouterMetrics) -> None:
        """Count each answer separately, as vLLM does."""
        metrics.asked(self.request.sampling_params)
        if self.error is not None:
            metrics.failed(reason_of(self.error))
        elif self.is_complete:
            metrics.all_answered(self.lasts)
        else:
            metrics.failed("cancelled")


def reason_of(error: Exception) -> str:
    """The `reason` in metrics: the name of the error's gRPC status, in lower case."""
    status = STATUS_CODES[type(error)] if isinstance(error, TandemError) else grpc.StatusCode.INTERNAL
    return str(status.name).lower()


def _answer_attributes(lasts: list[pb.GenerateResponse]) -> dict[str, Value]:
    first = min(lasts, key=lambda last: last.sequence)
    timings = first.timings
    prefill_s, decode_s = timings.prefill_ms / 1e3, (timings.transfer_ms + timings.decode_ms) / 1e3
    return {
        "gen_ai.usage.prompt_tokens": first.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(last.usage.completion_tokens for last in lasts),
        "tandem.cached_tokens": first.usage.cached_tokens,
        "tandem.finish_reason": ",".join(sorted({pb.FinishReason.Name(last.finish_reason) for last in lasts})),
        "tandem.attempts": sum(last.timings.attempts for last in lasts),
        "gen_ai.latency.time_in_queue": timings.queue_ms / 1e3,
        "gen_ai.latency.time_to_first_token": timings.time_to_first_token_ms / 1e3,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        "gen_ai.latency.e2e": timings.total_ms / 1e3,
    }
