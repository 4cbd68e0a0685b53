"""The events that a request in the router receives, and the actions that it asks for: the language between
`RequestState`, which decides, and `Lifecycle`, which acts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from protos.tandem_inference_pb2 import FinishReason, Mode, TokenLogprobs
from protos.tandem_kv_transfer_pb2 import Grant
from protos.tandem_worker_pb2 import WorkerEvent, WorkerRecord

MAX_JOINED_TOKENS = 256
"""Once a message has this many tokens, no more are joined to it. Otherwise a client that has read nothing for minutes
would then stop this router for seconds, or get a message that is too large for it, with the logprobs of each token
(gRPC's clients accept 4 MB)."""


class WorkerKey(NamedTuple):
    """Identifies one process of a worker: a restarted worker has another key."""

    worker_id: str
    incarnation: str

    @classmethod
    def of(cls, record: WorkerRecord) -> WorkerKey:
        return cls(record.worker_id, record.incarnation)


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Two workers, where KV is transferred from the first to the second."""

    prefill: WorkerKey
    decode: WorkerKey


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers that serve an attempt. Without a prefill worker, the decode worker does everything."""

    decode: WorkerKey
    prefill: WorkerKey | None
    is_stay: bool = False
    """`decode` is a prefill worker that does everything."""

    @property
    def mode(self) -> Mode:
        """The plan's name for clients."""
        if self.prefill is not None:
            return Mode.MODE_DISAGGREGATED
        return Mode.MODE_STAY if self.is_stay else Mode.MODE_LOCAL

    @property
    def pair(self) -> WorkerPair | None:
        """The workers between which KV moves; None: no KV moves."""
        return None if self.prefill is None else WorkerPair(self.prefill, self.decode)


# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """The queue found workers for the next attempt."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    worker: WorkerKey
    event: WorkerEvent
    at_s: float = field(default_factory=time.monotonic, compare=False)
    """When the event came. If the client reads slowly, the request may handle it long after."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session with a worker ended: everything that it was doing for this request is gone."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerStalled:
    """A worker's engine is stalled, and another worker can continue. The stalled worker's events stay valid until the
    attempt is cancelled."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The stream should go on at this worker, which has less to do than its decode worker."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer is no longer wanted, or a stop string has completed it (`finish_reason`), or it has failed
    (`error`)."""

    finish_reason: FinishReason = FinishReason.FINISH_REASON_ABORT
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class AccountOverdue:
    """While SETTLING: the prefill worker did not report in time how long the transfer took."""


Event: TypeAlias = Planned | WorkerSaid | WorkerLost | WorkerStalled | Rebalanced | Stopped | AccountOverdue


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnterQueue:
    """Wait in the queue for a plan. `is_return`: the request has waited its turn before, and goes to the front."""

    is_return: bool
    avoid: frozenset[WorkerKey] = frozenset()
    """Workers that have failed this request."""
    wanted: WorkerKey | None = None
    """The worker that should do everything from here on, if it has room."""


@dataclass(frozen=True, slots=True)
class SendReserve:
    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class SendGenerate:
    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class SendPrefill:
    worker: WorkerKey
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendCancel:
    worker: WorkerKey
    attempt: int


@dataclass(frozen=True, slots=True)
class NoteSuccess:
    """The worker did its part of the running attempt: it computed the prompt and handed it over, or completed the
    answer. Or the pair did its part: the transfer."""

    who: WorkerKey | WorkerPair


@dataclass(frozen=True, slots=True)
class NoteFault:
    """The running attempt failed by the fault of the worker, or of the pair. The pool counts lost sessions and stalled
    engines by itself."""

    who: WorkerKey | WorkerPair


@dataclass(frozen=True, slots=True)
class Emit:
    """The next tokens of the answer, from position `offset` on."""

    offset: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """If requested, with the answer's first token: one for each token of the prompt but the first."""


@dataclass(frozen=True, slots=True)
class End:
    """The request is over: successfully if `error` is None."""

    finish_reason: FinishReason
    error: Exception | None = None


Action: TypeAlias = (
    EnterQueue | SendReserve | SendGenerate | SendPrefill | SendCancel | NoteSuccess | NoteFault | Emit | End
)


def may_grow(actions: list[Action]) -> bool:
    """Whether `actions` end with tokens to which more may be joined."""
    match actions:
        case [*_, Emit(token_ids=token_ids)]:
            return len(token_ids) < MAX_JOINED_TOKENS
    return False


def joined(actions: list[Action], more: list[Action]) -> list[Action]:
    """`actions`, then `more`. If `actions` end with tokens and `more` begin with tokens, one `Emit` carries both."""
    match actions, more:
        case [*before, Emit() as emit], [Emit() as after, *rest]:
            token_ids, logprobs = emit.token_ids + after.token_ids, [*emit.logprobs, *after.logprobs]
            return [*before, replace(emit, token_ids=token_ids, logprobs=logprobs), *rest]
    return [*actions, *more]
