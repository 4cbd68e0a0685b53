"""Makes a request's trace spans from what its router observed; workers report no spans themselves. Pure.

llm_request ─┬─ prepare             template, tokenizer, grammar; once
             ├─ queue               until there are workers for it      ┐
             └─ attempt ─┬─ reserve      room on the decode worker      │ for each attempt at each answer
                         ├─ prefill      until the first token          │
                         ├─ kv_transfer  all of it, hidden or not       │
                         └─ decode       until the end                  ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from protos import tandem_inference_pb2 as pb
from router.request_events import Plan
from router.timings import AttemptStamps
from rpc.tracing import Span, Value

WORKER = "tandem.worker"


def request_spans(arrived_s: float, answers: Mapping[int, Sequence[AttemptStamps]]) -> list[Span]:
    """The spans of a request. `answers`: by sequence, the attempts at each answer. Leaves out attempts that have not
    ended."""
    spans: list[Span] = []
    begun_s = [attempts[0].queued_s for attempts in answers.values() if attempts]
    if begun_s:
        spans.append(Span(name="prepare", start_s=arrived_s, end_s=min(begun_s)))
    for sequence, attempts in answers.items():
        of_many: dict[str, Value] = {"tandem.sequence": sequence} if len(answers) > 1 else {}
        for number, attempt in enumerate(attempts, 1):
            spans.extend(_attempt_spans(attempt, {**of_many, "tandem.attempt": number}))
    return spans


def _attempt_spans(attempt: AttemptStamps, attributes: dict[str, Value]) -> Iterator[Span]:
    if attempt.ended_s is None:
        return
    if attempt.plan is None or attempt.planned_s is None:
        yield Span(
            name="queue", start_s=attempt.queued_s, end_s=attempt.ended_s, attributes=attributes, error=attempt.why
        )
        return
    yield Span(name="queue", start_s=attempt.queued_s, end_s=attempt.planned_s, attributes=attributes)
    moved: dict[str, Value] = {"tandem.moved_to": attempt.moved_to} if attempt.moved_to else {}
    yield Span(
        name="attempt",
        start_s=attempt.planned_s,
        end_s=attempt.ended_s,
        attributes={**attributes, **_plan_attributes(attempt.plan), "tandem.is_busy": attempt.is_busy, **moved},
        error=attempt.why,
        children=list(_steps(attempt, attempt.plan, attempt.ended_s)),
    )


def _plan_attributes(plan: Plan) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "tandem.mode": pb.Mode.Name(plan.mode),
        "tandem.decode_worker": plan.decode.worker_id,
    }
    if plan.prefill is not None:
        attributes["tandem.prefill_worker"] = plan.prefill.worker_id
    return attributes


def _steps(attempt: AttemptStamps, plan: Plan, ended_s: float) -> Iterator[Span]:
    """The steps that were begun. A step that did not end before ends with the attempt."""
    decode: dict[str, Value] = {WORKER: plan.decode.worker_id}
    if attempt.asked_s is not None:
        yield Span(name="reserve", start_s=attempt.asked_s, end_s=attempt.granted_s or ended_s, attributes=decode)
    if attempt.sent_s is not None:
        prefill: dict[str, Value] = {WORKER: (plan.prefill or plan.decode).worker_id}
        if attempt.begun_s is not None:
            prefill["tandem.waited_s"] = attempt.begun_s - attempt.sent_s
        yield Span(name="prefill", start_s=attempt.sent_s, end_s=attempt.first_token_s or ended_s, attributes=prefill)
    if attempt.transfer is not None and attempt.handed_over_s is not None:
        stats = attempt.transfer
        yield Span(
            name="kv_transfer",
            start_s=attempt.handed_over_s - stats.push_ms / 1e3,
            end_s=attempt.handed_over_s,
            attributes={
                "tandem.transport": stats.transport,
                "tandem.num_bytes": stats.num_bytes,
                "tandem.num_blocks": stats.num_blocks,
                "tandem.num_cached_blocks": stats.num_cached_blocks,
            },
        )
    if attempt.first_token_s is not None:
        yield Span(
            name="decode",
            start_s=min(ended_s, max(attempt.first_token_s, attempt.handed_over_s or 0.0)),
            end_s=ended_s,
            attributes=decode,
        )
