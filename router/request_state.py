"""The life cycle of one request as a pure state machine: events in, actions out. No I/O, no clock, no gRPC.

    QUEUED ──Planned, disaggregated──> RESERVING ──Granted──> PREFILLING ──HandedOver──> DECODING ──last token──> DONE
      │ ^                                  │                      │  └─last token> SETTLING ─┼─HandedOver, or overdue──┘
      │ └──Busy, Failed, lost or stalled───┴──────────────────────┴──────────────────────────┤ (a new attempt)
      │ └──Rebalanced────────────────────────────────────────────────────────────────────────┤ (likewise, once)
      └──Planned, local────────────────────────────────────────────────────────> DECODING ───┘
    Stopped (client gone, abort, stop string, deadline), no attempts left, or no budget: from anywhere ──> DONE

What keeps the promises:
- Tokens reach the client only through `Emit`, whose positions are contiguous: tokens of the decode worker that come
  early wait for the first token, which comes from the prefill worker; a repeated token or a gap ends the attempt.
- Every attempt has a number. Events of older attempts are ignored.
- A failed attempt is cancelled on each of its workers; the next one starts after the tokens already emitted.
- All requests of a router share one budget for retries beyond their first (`retry_budget`).
- DONE is reached once, with exactly one `End`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from protos.tandem_inference_pb2 import FinishReason, KVTransferStats
from protos.tandem_worker_pb2 import Failed, Tokens, WorkerEvent
from router.request_events import (
    AccountOverdue,
    Action,
    Emit,
    End,
    EnterQueue,
    Event,
    NoteFault,
    NoteSuccess,
    Plan,
    Planned,
    Rebalanced,
    SendCancel,
    SendGenerate,
    SendPrefill,
    SendReserve,
    Stopped,
    WorkerKey,
    WorkerLost,
    WorkerPair,
    WorkerSaid,
    WorkerStalled,
)
from router.retry_budget import RetryBudget
from rpc.errors import (
    CorruptKV,
    Incompatible,
    InternalError,
    InvalidRequest,
    LeaseGone,
    NoWorker,
    Overloaded,
    TandemError,
    Unreachable,
    error_of_code,
)

BETWEEN_WORKERS = (Unreachable, LeaseGone, Incompatible, CorruptKV)
"""Errors that a healthy worker may report: its peer in a transfer is gone, has freed the memory or is of another kind,
or the network damages what is sent; or the worker itself is leaving (UNAVAILABLE, too). The router cannot tell which
of the two is to blame, so it blames the pair and neither worker. If a peer has died, its session is lost, which counts
against it."""
RETRY_AFTER_S = 1.0
"""When to retry, for a client whose request the budget does not allow another attempt, or that the worker finds
incompatible, such as one for an adapter that the worker no longer has."""

_ANSWERED = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)


class Phase(Enum):
    QUEUED = auto()
    RESERVING = auto()
    PREFILLING = auto()
    DECODING = auto()
    SETTLING = auto()
    """All tokens are emitted; only the prefill worker's report on the transfer is outstanding."""
    DONE = auto()


@dataclass(slots=True)
class AttemptNumbers:
    """Issues the attempt numbers of one router, each once, so that late events of an earlier request are not taken for
    those of a later request with the same id."""

    last: int = 0

    def next(self) -> int:
        self.last += 1
        return self.last


@dataclass(slots=True)
class RequestState:
    """One request. Call `start` once, then `on` for every event, in order; do the returned actions in order."""

    max_attempts: int
    """The request fails after this many attempts in a row that brought the client no token."""
    budget: RetryBudget
    """Shared by all requests of the router."""
    numbers: AttemptNumbers = field(default_factory=AttemptNumbers)
    """Shared by all requests of the router."""
    wants_logprobs: bool = False
    """Whether each token must come with its logprobs."""
    num_prompt_logprobs: int = 0
    """How many prompt logprobs must come with the answer's first token."""
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    """Number of the running attempt; 0 before the first."""
    num_failures: int = 0
    """Failed attempts, in all."""
    last_failure: str = ""
    """Why the last of them failed."""
    num_futile: int = 0
    """Failed attempts since a token last reached the client, including the attempt that brought it."""
    plan: Plan | None = None
    token_ids: list[int] = field(default_factory=list)
    """The tokens that the client has: emitted here, or earlier by another router."""
    num_resumed: int = 0
    """How many of `token_ids` another router emitted before this request."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were cached, as the first worker that prefilled it said."""
    transfer: KVTransferStats | None = None
    """The last attempt's."""
    _first_index: int = 0
    """Index of the running attempt's first token."""
    _early: list[Tokens] = field(default_factory=list)
    """Tokens of the decode worker that came before the prefill worker's first token."""
    _finish_reason: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED
    """Set while SETTLING."""
    _avoid: frozenset[WorkerKey] = frozenset()
    _has_left_stalled: bool = False
    """Whether the request has left a stalled worker and no token has reached the client since."""

    def start(self) -> list[Action]:
        return [EnterQueue(is_return=False)]

    def on(self, event: Event) -> list[Action]:
        """Take in one event. Returns the actions to do now: none once DONE, and none for stale events."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case Planned(plan):
                return self._begin(plan)
            case WorkerSaid(worker, said):
                return self._on_worker(worker, said)
            case WorkerLost(worker):
                return self._on_lost(worker, "was lost")
            case WorkerStalled(worker):
                return self._on_stalled(worker)
            case Rebalanced(worker):
                return self._on_rebalanced(worker)
            case Stopped(finish_reason, error):
                return self._end(finish_reason, self._with_last_failure(error))
            case AccountOverdue():
                return self._end(self._finish_reason) if self.phase is Phase.SETTLING else []

    # -- attempts -----------------------------------------------------------------------------------------------

    def _begin(self, plan: Plan) -> list[Action]:
        assert self.phase is Phase.QUEUED, f"planned while {self.phase.name}"
        self.attempt = self.numbers.next()
        self.plan = plan
        self._first_index = len(self.token_ids)
        self._early = []
        self.transfer = None
        if plan.prefill is None:
            self.phase = Phase.DECODING
            return [SendGenerate(plan.decode)]
        self.phase = Phase.RESERVING
        return [SendReserve(plan.decode)]

    def _retry(self, error: TandemError, avoid: WorkerKey, *, at_fault: WorkerKey | WorkerPair | None) -> list[Action]:
        """Give up this attempt and, if limits allow, start another one."""
        self.num_failures += 1
        self.num_futile = 1 if len(self.token_ids) > self._first_index else self.num_futile + 1
        self.last_failure = error.message
        self._avoid |= {avoid}
        notes: list[Action] = [NoteFault(at_fault)] if at_fault is not None else []
        if self.num_futile >= self.max_attempts:
            return [*notes, *self._end(FinishReason.FINISH_REASON_ERROR, error)]
        if not self.budget.take(self.num_futile):
            refusal = NoWorker(
                f"{error.message}; not retried, since too many requests are being retried", retry_after_s=RETRY_AFTER_S
            )
            return [*notes, *self._end(FinishReason.FINISH_REASON_ERROR, refusal)]
        cancels = self._cancel_attempt()
        self.phase = Phase.QUEUED
        return [*notes, *cancels, EnterQueue(is_return=True, avoid=self._avoid)]

    def _with_last_failure(self, error: Exception | None) -> Exception | None:
        """If no worker is left to try, or none had room in time, add to `error` why the last attempt failed."""
        if isinstance(error, NoWorker | Overloaded) and self.last_failure:
            return type(error)(f"{self.last_failure}; {error.message}", retry_after_s=error.retry_after_s)
        return error

    def _cancel_attempt(self) -> list[Action]:
        """Cancel the attempt on its workers. This is harmless if it has ended there: a worker ignores it."""
        if self.plan is None:
            return []
        workers = [w for w in (self.plan.decode, self.plan.prefill) if w is not None]
        self.plan = None
        return [SendCancel(worker, self.attempt) for worker in workers]

    def _end(self, finish_reason: FinishReason, error: Exception | None = None) -> list[Action]:
        """The only way to DONE. Cancels what workers may still do for this request."""
        notes: list[Action] = []
        if error is None and finish_reason in _ANSWERED:
            self.budget.note_answer()
            if self.plan is not None and self.phase in (Phase.DECODING, Phase.SETTLING):
                notes = [NoteSuccess(self.plan.decode)]
        self.phase = Phase.DONE
        return [*notes, *self._cancel_attempt(), End(finish_reason, error)]

    # -- workers' events ----------------------------------------------------------------------------------------

    def _on_lost(self, worker: WorkerKey, how: str) -> list[Action]:
        if self.plan is None or worker not in (self.plan.decode, self.plan.prefill):
            return []
        if self.phase is Phase.SETTLING:
            return self._end(self._finish_reason)
        if worker == self.plan.prefill and self.phase is Phase.DECODING:
            return []  # the prefill worker has done its part
        return self._retry(NoWorker(f"worker {worker.worker_id} {how}"), avoid=worker, at_fault=None)

    def _on_stalled(self, worker: WorkerKey) -> list[Action]:
        """Leave a stalled worker for another one, but only once: if the next one stalls too, this request itself may be
        what takes so long."""
        if self._has_left_stalled:
            return []
        actions = self._on_lost(worker, "is stalled in a step")
        self._has_left_stalled = self.phase is Phase.QUEUED and bool(actions)
        return actions

    def _on_rebalanced(self, worker: WorkerKey) -> list[Action]:
        """Leave the decode worker for one with less to do: no failure of anybody."""
        has_begun = len(self.token_ids) > self._first_index
        if self.plan is None or self.phase is not Phase.DECODING or not has_begun or worker == self.plan.decode:
            return []
        cancels = self._cancel_attempt()
        self.phase = Phase.QUEUED
        self.num_futile = 0  # this attempt has brought tokens, and has not failed
        return [*cancels, EnterQueue(is_return=True, avoid=self._avoid, wanted=worker)]

    def _on_worker(self, worker: WorkerKey, said: WorkerEvent) -> list[Action]:
        plan = self.plan
        if plan is None or said.attempt != self.attempt or worker not in (plan.decode, plan.prefill):
            return []
        is_decode = worker == plan.decode
        if self.phase is Phase.SETTLING:
            return [*self._note_transfer(worker, said), *self._end(self._finish_reason)]
        match said.WhichOneof("event"):
            case "granted" if is_decode and plan.prefill is not None and self.phase is Phase.RESERVING:
                self.phase = Phase.PREFILLING
                return [SendPrefill(plan.prefill, said.granted)]
            case "busy" if is_decode and self._may_be_busy(plan):
                return self._on_busy()
            case "tokens" if self.phase in (Phase.PREFILLING, Phase.DECODING):
                return self._on_tokens(worker, said.tokens, plan)
            case "handed_over" if not is_decode and self.phase is Phase.PREFILLING:
                self.phase = Phase.DECODING
                return self._note_transfer(worker, said)
            case "failed":
                return self._on_failed(worker, said.failed, plan)
            case other:
                return self._on_nonsense(worker, f"said {other} to a request that is {self.phase.name}")

    def _may_be_busy(self, plan: Plan) -> bool:
        """Whether the decode worker may still answer Busy: it has not begun."""
        has_begun = len(self.token_ids) > self._first_index
        return self.phase is Phase.RESERVING or (plan.prefill is None and not has_begun)

    def _on_busy(self) -> list[Action]:
        """The worker has no memory now. It has started nothing, so nothing needs to be cancelled, and this is no
        failure."""
        self.plan = None
        self.phase = Phase.QUEUED
        return [EnterQueue(is_return=True, avoid=self._avoid)]

    def _on_tokens(self, worker: WorkerKey, tokens: Tokens, plan: Plan) -> list[Action]:
        next_index = len(self.token_ids)
        is_decode = worker == plan.decode
        if is_decode and plan.prefill is not None and next_index == self._first_index:
            self._early.append(tokens)  # the first token comes from the prefill worker, over another session
            return []
        if tokens.index != next_index:
            return self._on_nonsense(worker, f"sent token {tokens.index} instead of {next_index}")
        if len(tokens.logprobs) != (len(tokens.token_ids) if self.wants_logprobs else 0):
            return self._on_nonsense(worker, f"sent {len(tokens.logprobs)} logprobs for {len(tokens.token_ids)} tokens")
        num_due = 0 if next_index else self.num_prompt_logprobs
        if len(tokens.prompt_logprobs) != num_due:
            what = f"sent {len(tokens.prompt_logprobs)} logprobs of the prompt instead of {num_due}"
            return self._on_nonsense(worker, what)
        if next_index == self.num_resumed:
            self.num_cached_tokens = tokens.num_cached_tokens
        self.token_ids.extend(tokens.token_ids)
        self._has_left_stalled = False
        actions: list[Action] = [Emit(next_index, list(tokens.token_ids), tokens.logprobs, tokens.prompt_logprobs)]
        if tokens.finish_reason:
            return actions + self._on_last_token(tokens.finish_reason, is_transfer_open=is_decode)
        early, self._early = self._early, []
        for later in early:
            if self.plan is plan and self.phase is not Phase.SETTLING:  # else the attempt or the answer has ended
                actions += self._on_tokens(plan.decode, later, plan)
        return actions

    def _on_last_token(self, finish_reason: FinishReason, *, is_transfer_open: bool) -> list[Action]:
        """The answer is complete. If the prefill worker has not reported the end of the transfer yet, it is about
        to."""
        if is_transfer_open and self.phase is Phase.PREFILLING:
            self._finish_reason = finish_reason
            self.phase = Phase.SETTLING
            return []
        notes: list[Action] = []
        if not is_transfer_open and self.plan is not None and self.plan.prefill is not None:
            notes = [NoteSuccess(self.plan.prefill)]
        return [*notes, *self._end(finish_reason)]

    def _note_transfer(self, worker: WorkerKey, said: WorkerEvent) -> list[Action]:
        pair = self._pair_of(worker)
        if pair is None or not said.HasField("handed_over"):
            return []
        self.transfer = said.handed_over.stats
        return [NoteSuccess(worker), NoteSuccess(pair)]

    def _on_failed(self, worker: WorkerKey, failed: Failed, plan: Plan) -> list[Action]:
        error = error_of_code(failed.code, f"worker {worker.worker_id}: {failed.message}")
        if failed.can_retry:
            at_fault = self._pair_of(worker) if isinstance(error, BETWEEN_WORKERS) else worker
            if isinstance(error, InvalidRequest):  # one worker's call to the other was invalid, not the client's
                error, at_fault = InternalError(error.message), plan.pair  # whichever of the two reports it
            elif isinstance(error, Incompatible):  # with this request: another worker, or a later try, may do
                error = NoWorker(error.message, retry_after_s=RETRY_AFTER_S)
            return self._retry(error, avoid=worker, at_fault=at_fault)
        return self._end(FinishReason.FINISH_REASON_ERROR, error)

    def _pair_of(self, sender: WorkerKey) -> WorkerPair | None:
        """The plan's pair if `sender` is its prefill worker, which alone knows how the transfer went; else None."""
        pair = None if self.plan is None else self.plan.pair
        return pair if pair is not None and pair.prefill == sender else None

    def _on_nonsense(self, worker: WorkerKey, what: str) -> list[Action]:
        """A worker has broken the protocol: give up the attempt and blame the worker."""
        return self._retry(NoWorker(f"worker {worker.worker_id} {what}"), avoid=worker, at_fault=worker)
