"""What a request in the router hears, and what it asks to be done: the words between `RequestState`, which decides, and
`Lifecycle`, which does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from protos.tandem_inference_pb2 import FinishReason, Mode, TokenLogprobs
from protos.tandem_kv_transfer_pb2 import Grant
from protos.tandem_worker_pb2 import WorkerEvent

MAX_JOINED_TOKENS = 256
"""A message grows no more once it has so many tokens: a client that reads nothing for minutes must not stop this router
for seconds then, nor get a message larger than it takes, with the logprobs of each token (gRPC's clients: 4 MB)."""


class WorkerKey(NamedTuple):
    """One process of a worker: a restarted one is another."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """Two workers, and the transfers from one to the other."""

    prefill: WorkerKey
    decode: WorkerKey


@dataclass(frozen=True, slots=True)
class Plan:
    """Who serves an attempt. Without a prefill worker the decode worker does it all."""

    decode: WorkerKey
    prefill: WorkerKey | None
    is_stay: bool = False
    """`decode` is a prefill worker, which does it all: no decode worker had room."""

    @property
    def mode(self) -> Mode:
        """What clients call it."""
        if self.prefill is not None:
            return Mode.MODE_DISAGGREGATED
        return Mode.MODE_STAY if self.is_stay else Mode.MODE_LOCAL

    @property
    def pair(self) -> WorkerPair | None:
        """Between whom KV moves; None: none does."""
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
    """When it came, which may be long before the request gets to it: where a client reads slowly."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session with a worker ended: what it was doing for us is gone."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class WorkerStalled:
    """A worker's engine stands still, and there is another that can go on. What it still says may be believed until it
    is cancelled there."""

    worker: WorkerKey


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer is not wanted any more, or is complete by a stop string (`finish_reason`), or failed (`error`)."""

    finish_reason: FinishReason = FinishReason.FINISH_REASON_ABORT
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class AccountOverdue:
    """While SETTLING: the prefill worker did not say in time what the transfer took."""


Event: TypeAlias = Planned | WorkerSaid | WorkerLost | WorkerStalled | Stopped | AccountOverdue


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnterQueue:
    """Ask for a plan. `is_return`: the request waited its turn before, and goes to the front."""

    is_return: bool
    avoid: frozenset[WorkerKey] = frozenset()
    """Workers that have failed this request."""


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
    """The worker did its part of the running attempt: the prompt is computed and handed over, the answer complete. Or
    the pair did: the transfer."""

    who: WorkerKey | WorkerPair


@dataclass(frozen=True, slots=True)
class NoteFault:
    """The running attempt failed, and that is the worker's own fault, or the pair's. Of lost sessions and stalled
    engines the pool knows by itself."""

    who: WorkerKey | WorkerPair


@dataclass(frozen=True, slots=True)
class Emit:
    """The next tokens of the answer, from position `offset` on."""

    offset: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    """One for each token, where the request asks."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One for each token of the prompt but the first, where the request asks: with the answer's first."""


@dataclass(frozen=True, slots=True)
class End:
    """The request is over, well (`error` is None) or not."""

    finish_reason: FinishReason
    error: Exception | None = None


Action: TypeAlias = (
    EnterQueue | SendReserve | SendGenerate | SendPrefill | SendCancel | NoteSuccess | NoteFault | Emit | End
)


def may_grow(actions: list[Action]) -> bool:
    """Whether they end with tokens that others may go with."""
    match actions:
        case [*_, Emit(token_ids=token_ids)]:
            return len(token_ids) < MAX_JOINED_TOKENS
    return False


def joined(actions: list[Action], more: list[Action]) -> list[Action]:
    """`actions` and then `more`; tokens with which one ends and the other begins are emitted together."""
    match actions, more:
        case [*before, Emit() as emit], [Emit() as after, *rest]:
            token_ids, logprobs = emit.token_ids + after.token_ids, [*emit.logprobs, *after.logprobs]
            return [*before, replace(emit, token_ids=token_ids, logprobs=logprobs), *rest]
    return [*actions, *more]
