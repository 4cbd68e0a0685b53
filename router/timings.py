"""Where a request's time went, computed from the moments when each step first happened."""

from __future__ import annotations

from dataclasses import dataclass

from protos import tandem_inference_pb2 as inference_pb
from router.request_events import Plan


@dataclass(slots=True)
class Stamps:
    """When each step of a request first happened, on this process' monotonic clock, in seconds."""

    arrived_s: float
    sent_s: float | None = None
    """The prompt was sent to the worker that computes it."""
    begun_s: float | None = None
    """That worker began."""
    first_token_s: float | None = None
    handed_over_s: float | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class AttemptStamps:
    """When each step of one attempt at a request happened, on the same clock. None: it has not happened."""

    queued_s: float
    """The attempt began to wait for workers."""
    planned_s: float | None = None
    plan: Plan | None = None
    asked_s: float | None = None
    """The decode worker was asked for room."""
    granted_s: float | None = None
    sent_s: float | None = None
    """The prompt was sent to the worker that computes it."""
    begun_s: float | None = None
    """That worker began."""
    first_token_s: float | None = None
    handed_over_s: float | None = None
    transfer: inference_pb.KVTransferStats | None = None
    ended_s: float | None = None
    why: str = ""
    """Why the attempt failed, if it did."""
    is_busy: bool = False
    """A worker had no room, which does not count as a failure."""
    moved_to: str = ""
    """The worker that the stream moved to, which ended the attempt, if it did."""


def timings_of(
    stamps: Stamps,
    *,
    num_tokens: int,
    num_attempts: int,
    num_moves: int,
    plan: Plan | None,
    transfer: inference_pb.KVTransferStats | None,
) -> inference_pb.Timings:
    """The timings of an ended answer of `num_tokens` tokens: four spans that sum up to the total; a step that never
    happened took no time. `plan` and `transfer` are the last attempt's."""
    assert stamps.ended_s is not None
    begun_s = stamps.begun_s or stamps.first_token_s or stamps.ended_s
    first_token_s = stamps.first_token_s or stamps.ended_s
    handed_over_s = max(stamps.handed_over_s or first_token_s, first_token_s)
    timings = inference_pb.Timings(
        queue_ms=1e3 * (begun_s - stamps.arrived_s),
        prefill_ms=1e3 * (first_token_s - begun_s),
        transfer_ms=1e3 * (handed_over_s - first_token_s),
        decode_ms=1e3 * (stamps.ended_s - handed_over_s),
        total_ms=1e3 * (stamps.ended_s - stamps.arrived_s),
        time_to_first_token_ms=1e3 * (first_token_s - stamps.arrived_s),
        attempts=num_attempts,
        moves=num_moves,
    )
    if num_tokens > 1:
        timings.time_per_output_token_ms = 1e3 * (stamps.ended_s - first_token_s) / (num_tokens - 1)
    if plan is not None:
        timings.decode_worker = plan.decode.worker_id
        timings.mode = plan.mode
        if plan.prefill is not None:
            timings.prefill_worker = plan.prefill.worker_id
        if transfer is not None:
            timings.kv_transfer.CopyFrom(transfer)
    return timings
