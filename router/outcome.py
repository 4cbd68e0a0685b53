"""How a request ended, and what is said of it then: one line in the log, and what metrics count."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import grpc

from protos import tandem_inference_pb2 as pb
from router.metrics import RouterMetrics
from rpc.errors import STATUS_CODES, TandemError, code_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """Of one request, with all its answers."""

    request_id: str
    arrived_s: float
    num_sequences: int
    lora_name: str
    error: Exception | None = None
    lasts: list[pb.GenerateResponse] = field(default_factory=list)
    """The last message of each answer that has ended."""

    @property
    def is_complete(self) -> bool:
        return len(self.lasts) == self.num_sequences

    def note(self, response: pb.GenerateResponse) -> None:
        if response.finish_reason:
            self.lasts.append(response)

    def log(self) -> None:
        facts: dict[str, object] = {"request_id": self.request_id}
        if self.lora_name:
            facts["lora_name"] = self.lora_name
        if self.error is not None:
            code = code_of(self.error) if isinstance(self.error, TandemError) else "bug"
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
            if self.num_sequences > 1:
                facts["n"] = self.num_sequences
        facts["total_ms"] = 1e3 * (time.monotonic() - self.arrived_s)
        _log.info("failed" if self.error else "done" if self.is_complete else "cancelled", extra=facts)

    def count(self, metrics: RouterMetrics) -> None:
        """Each answer for itself, as vLLM does."""
        if self.error is not None:
            metrics.failed(reason_of(self.error))
        elif self.is_complete:
            for last in self.lasts:
                metrics.answered(last)
        else:
            metrics.failed("cancelled")


def reason_of(error: Exception) -> str:
    """In metrics: the name of the error's status."""
    status = STATUS_CODES[type(error)] if isinstance(error, TandemError) else grpc.StatusCode.INTERNAL
    return str(status.name).lower()
