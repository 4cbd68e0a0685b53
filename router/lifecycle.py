"""Runs one request from its prompt's tokens to its last message. (With several answers to a request, each answer has a
life cycle of its own: `sequences`.)

`RequestState` decides and `Lifecycle` carries the decisions out: it waits in the queue, sends commands, passes the
workers' events to the state, turns tokens into text and stamps the time. `Lifecycle.run` is the request: a caller that
stops iterating it (the client is gone, its deadline passed) cancels it on every worker, in the one `finally` below.

    start ──> actions ──_perform──> messages, to the client
                 ^         ├─ EnterQueue ──> _wait_for_plan, a task of its own ──Planned──────┐
                 │         └─ Send... ──> WorkerCommands ──> sessions ──WorkerSaid, or Lost───┤
                 │                                           Abort ──Stopped──────────────────┤
                 │                                           MovingStream ──Rebalanced────────┤
                 └── RequestState.on <── _next_actions <── _events <──────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Set

from protos import tandem_inference_pb2 as inference_pb
from router.account import Account
from router.answer_messages import AnswerMessages
from router.asked_answer import AskedAnswer
from router.deadline import Deadline
from router.needs import Needs
from router.parts import RouterParts
from router.queued_request import ClientShare, QueuedRequest, SharedPrefix
from router.rebalancer import MovingStream
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
    WorkerSaid,
    WorkerStalled,
    joined,
    may_grow,
)
from router.request_state import Phase, RequestState
from router.served_kind import Kind
from router.taken_room import TakenRoom
from router.timings import timings_of
from router.validation.resumption import kind_name
from router.worker_commands import WorkerCommands

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
"""A request fails when this many attempts in a row have failed without a new token. A request that kills workers must
not reach all of them, while a long stream may lose any number of workers one after the other."""
ACCOUNT_S = 1.0
"""How long a complete answer waits for the prefill worker to say what its transfer took."""


class Lifecycle:
    """One request, or one of several answers to it. Iterate `run` once."""

    def __init__(self, parts: RouterParts, asked: AskedAnswer, *, after: Lifecycle | None = None) -> None:
        """`after`: the first answer to the same prompt, if this answer runs after that one has been prefilled."""
        self.name, self.sequence, self.lora_name = asked.name, asked.sequence, asked.lora_name
        """Its name to workers; its number among the answers to the prompt; the requested adapter, if any."""
        self._asked = asked
        self._after = after
        self._parts = parts
        self._share: ClientShare | None = None
        """The share of its client, while the request runs."""
        self._messages = AnswerMessages(asked)
        self._state = RequestState(
            MAX_ATTEMPTS,
            parts.budget,
            parts.numbers,
            wants_logprobs=asked.sampling_params.HasField("logprobs"),
            num_prompt_logprobs=asked.num_prompt_logprobs,
            token_ids=list(asked.resumption.token_ids),
            num_resumed=len(asked.resumption.token_ids),
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._commands = WorkerCommands(parts.pool, self._events.put_nowait, asked)
        self._waiting: asyncio.Task[None] | None = None
        self.room: TakenRoom | None = None
        """The room that the last attempt took."""
        self._stream: MovingStream | None = None
        """For the running attempt, if it may move."""
        self._has_moved = False
        self._error: Exception | None = None
        """The error that ended the request."""
        self._num_failures = 0
        """How many of the state's failures are logged and counted so far."""
        self._deadline = Deadline(asked, parts.forecast, parts.queue, parts.pool)
        self._cached: dict[WorkerKey, int] = {}
        """How many leading blocks of the prompt each worker has cached, according to the prefix index."""
        self._entered_s = asked.arrived_s
        """When it began to wait for workers."""
        self.account = Account(parts.forecast, parts.pool.costs, parts.metrics, asked.arrived_s)

    def stop(self, stopped: Stopped) -> None:
        """End the request from outside: Abort."""
        self._events.put_nowait(stopped)

    async def run(self) -> AsyncGenerator[inference_pb.GenerateResponse, None]:
        """Yield the messages of the answer; the last one carries usage and timings. Raises the error that ended the
        request."""
        if self._asked.resumption.finish_reason:
            yield self._last_response(self._asked.resumption.finish_reason)
            return
        if self._after is None and self._asked.deadline_s is not None:
            self._deadline.refuse_if_passed()
            if not self._state.num_resumed:  # a resuming client has part of the answer and keeps what comes in time
                await self._deadline.refuse_if_late(lambda: self._cached_blocks(self._asked.prompt_token_ids, None))
        self._entered_s = time.monotonic()
        self.account.entered()
        if self._state.num_resumed:
            self._parts.metrics.resumed()
        self._share = self._parts.queue.enter(self._asked.sampling_params.priority, self._asked.fairness_id)
        try:
            actions = self._state.start()
            while True:
                for response in self._perform(actions):
                    yield response
                if self._error is not None:
                    raise self._error
                if self._state.phase is Phase.DONE:
                    return
                actions = await self._next_actions()
        finally:
            self._wind_up(self._state.on(Stopped()))
            self._leave()

    @property
    def has_one_worker(self) -> bool:
        """Whether one worker both prefills and decodes, so that it has the KV of the whole prompt from the first token
        on."""
        return self._last_plan is not None and self._last_plan.prefill is None

    def shared_prefix(self) -> SharedPrefix | None:
        """The part of the prompt whose KV the decode worker has in use, so that other answers to the prompt can share
        it; the prefix index would report it a moment later or not at all. None if this answer has ended, or if the
        worker keeps no prefixes."""
        handle = None if self._last_plan is None else self._parts.pool.get(self._last_plan.decode)
        if handle is None or handle.record.keeps_no_prefixes or self._state.phase is Phase.DONE:
            return None
        num_blocks = (len(self._asked.prompt_token_ids) - 1) // handle.facts.block_size
        return SharedPrefix(handle.key, num_blocks, num_blocks * handle.facts.block_size)

    @property
    def _last_plan(self) -> Plan | None:
        return None if self.room is None else self.room.plan

    @property
    def _kind(self) -> Kind | None:
        """The kind of the last plan's decode worker; before the first plan, of the worker that began the resumed
        answer, if any."""
        return self._asked.resumption.kind if self.room is None else self.room.kind

    @property
    def _kind_begun_on(self) -> Kind | None:
        """The kind of the worker on which this answer, or the first answer to the prompt, has begun: workers of one
        kind must compute all of them. None: neither has begun."""
        if self._state.token_ids or self._asked.resumption.kind is not None:
            return self._kind
        return None if self._after is None else self._after._kind_begun_on

    @property
    def _planned_kind(self) -> Kind:
        assert self.room is not None, "a plan takes room"
        return self.room.kind

    # -- carrying out actions -----------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> list[inference_pb.GenerateResponse]:
        """Do `actions` in order. Returns the messages for the client; the client gets them before an error that ends
        the request (`_error`)."""
        responses: list[inference_pb.GenerateResponse] = []
        for index, action in enumerate(actions):
            match action:
                case EnterQueue():
                    self._enter_queue(action)
                case SendReserve(worker):
                    self.account.room_asked()
                    self._commands.reserve(worker, self._planned_kind, self._state.attempt, self._state.token_ids)
                case SendGenerate(worker):
                    self.account.prompt_sent()
                    self._commands.generate(worker, self._planned_kind, self._state.attempt, self._state.token_ids)
                case SendPrefill(worker, grant):
                    self.account.prompt_sent()
                    self._commands.prefill(worker, grant)
                case SendCancel() | NoteSuccess() | NoteFault():
                    self._wind_up([action])
                case Emit():
                    response, is_stopped = self._emit(action)
                    responses.append(response)
                    if is_stopped:
                        stopped = Stopped(inference_pb.FINISH_REASON_STOP)
                        self._wind_up([*actions[index + 1 :], *self._state.on(stopped)])
                        return [*responses, self._last_response(inference_pb.FINISH_REASON_STOP)]
                case End(finish_reason, None):
                    responses.append(self._last_response(finish_reason))
                case End(_, error):
                    self._error = error
        return responses

    def _wind_up(self, actions: list[Action]) -> None:
        """Do those of `actions` that conclude an attempt: cancellations, and notes on the workers. They are due even
        when the request has ended."""
        for action in actions:
            match action:
                case SendCancel(worker, attempt):
                    self._commands.cancel(worker, attempt)
                case NoteSuccess(who) if self.room is not None:
                    self._parts.pool.note_success(who, self.room)
                case NoteFault(who) if self.room is not None:
                    self._parts.pool.note_fault(who, self.room)

    def _enter_queue(self, action: EnterQueue) -> None:
        why = moved_to = ""
        if self._state.num_failures > self._num_failures:
            self._num_failures, why = self._state.num_failures, self._state.last_failure
            facts = {"request_id": self.name, "num_failures": self._num_failures, "why": why}
            _log.warning("attempt failed, retrying", extra=facts)
            self._parts.metrics.retried(has_begun=bool(self._state.token_ids))
        if action.wanted is not None:
            self._has_moved, moved_to = True, action.wanted.worker_id
            self._parts.metrics.rebalanced()
        self._end_stream()
        self.account.queued(why, moved_to)
        self._waiting = asyncio.create_task(self._wait_for_plan(action))

    async def _wait_for_plan(self, action: EnterQueue) -> None:
        token_ids = self._asked.prompt_token_ids + self._state.token_ids
        try:
            shared = None if self._after is None else self._after.shared_prefix()
            self._cached = await self._cached_blocks(token_ids, shared)
            if self.room is not None:
                self.room.end()  # not earlier: requests behind this one would take it
            request = QueuedRequest(
                num_tokens=len(token_ids),
                num_cached_blocks=self._cached,
                needs=self._needs(),
                avoid=action.avoid,
                wanted=action.wanted,
                shared=shared,
                answer_s=self._deadline.answer_s(),
                arrived_s=self._entered_s,
                has_begun=bool(self._state.token_ids) or self._after is not None,
                is_resumed=self._state.num_resumed > 0,
                is_return=action.is_return,
            )
            self.room = await self._parts.queue.wait_for_plan(
                request,
                priority=self._asked.sampling_params.priority,
                fairness_id=self._asked.fairness_id,
                is_admitted=self._after is not None,
                give_up_s=None if self._state.token_ids else self._deadline.give_up_s(),
            )
            self.account.planned(self.room)
            self._begin_stream(self.room, action.avoid)
        except Exception as error:  # any error ends the request: nothing else awaits this task
            self._events.put_nowait(Stopped(inference_pb.FINISH_REASON_ERROR, error))
        else:
            self._events.put_nowait(Planned(self.room.plan))

    def _begin_stream(self, room: TakenRoom, avoid: Set[WorkerKey]) -> None:
        """Let the attempt's stream move later, but only once, and not if it decodes beside others' prompts already."""
        if room.plan.is_stay or self._has_moved:
            return
        self._stream = MovingStream(
            self._parts.rebalancer,
            self._parts.pool,
            room.plan,
            needs=self._commands.needs(room.kind),
            avoid=avoid,
            num_prompt_tokens=len(self._asked.prompt_token_ids),
            token_ids=self._state.token_ids,
            max_tokens=self._asked.sampling_params.max_tokens,
            move_to=lambda worker: self._events.put_nowait(Rebalanced(worker)),
        )

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.end()
            self._stream = None

    async def _cached_blocks(self, token_ids: list[int], shared: SharedPrefix | None) -> dict[WorkerKey, int]:
        """How many leading blocks of `token_ids` each worker is known to have. `shared`: the prefix that another answer
        has in use."""
        if self._state.num_prompt_logprobs and not self._state.token_ids:
            return {}  # prompt logprobs require computing the whole prompt
        if self._after is None:
            kind = self._kind_begun_on or self._parts.pool.roster.kind_for(self.lora_name)
            if self.lora_name and not (kind and kind.lora_digest):
                return {}  # without a digest, nobody can say which adapter of that name the blocks belong to
            lora_digest = "" if kind is None else kind.lora_digest
            return await self._parts.prefixes.longest_match(token_ids, self._asked.cache_salt, lora_digest)
        return self._after._cached | ({} if shared is None else {shared.worker: shared.num_blocks})

    def _needs(self) -> Needs:
        return self._commands.needs(self._kind_begun_on)

    # -- taking in events ---------------------------------------------------------------------------------------

    async def _next_actions(self) -> list[Action]:
        """Wait for the next event and return its actions. If they end with tokens, join them with tokens that wait
        behind them: when the client reads slowly or this router is busy, one message carries the tokens of several
        steps."""
        actions = self._state.on(await self._next_event())
        while may_grow(actions) and (event := self._waiting_event()) is not None:
            actions = joined(actions, self._state.on(event))
        return actions

    async def _next_event(self) -> Event:
        if self._state.phase is not Phase.SETTLING:
            return await self._event_to_come()
        try:
            async with asyncio.timeout(ACCOUNT_S):
                return await self._event_to_come()
        except TimeoutError:
            return AccountOverdue()

    async def _event_to_come(self) -> Event:
        while not self._is_news(event := await self._events.get()):
            pass
        return event

    def _waiting_event(self) -> Event | None:
        while not self._events.empty():
            if self._is_news(event := self._events.get_nowait()):
                return event
        return None

    def _is_news(self, event: Event) -> bool:
        """Whether the state must act on `event`. Also notes what workers say."""
        if isinstance(event, WorkerSaid):
            self._note(event)
        if isinstance(event, Rebalanced) and not self._events.empty():
            # Its worker was sooner than its client, or this router: what it has computed would be computed again.
            if self._stream is not None:
                self._stream.stays()
            return False
        return not isinstance(event, WorkerStalled) or self._is_better_off_without(event.worker)

    def _is_better_off_without(self, worker: WorkerKey) -> bool:
        """Whether the worker is still stalled and another one can compute the request. If none can, the request waits
        for the worker to go on; the session reports the stall again with each beat."""
        return self._parts.pool.is_stalled(worker) and self._parts.pool.is_anybody_usable_for(self._needs())

    def _note(self, said: WorkerSaid) -> None:
        """Update the room taken on workers and the account. Decides nothing about the request."""
        plan, room = self._state.plan, self.room
        if plan is None or room is None or said.event.attempt != self._state.attempt:
            return  # the event belongs to an attempt that is over
        match said.event.WhichOneof("event"):
            case "granted":
                room.settle_decode()
                self._parts.queue.dispatch_soon()
            case "busy":
                self._commands.note_busy(said.worker)
            case "tokens" if said.worker == (plan.prefill or plan.decode) and not room.is_settled:
                room.settle()
                self._parts.queue.dispatch_soon()
        self.account.note(said, plan, room)

    def _leave(self) -> None:
        """The request is over: leave the queue, give back the room, close the account and detach from the sessions."""
        self.account.left(self._messages.num_tokens, "" if self._error is None else str(self._error))
        if self._share is not None:
            self._parts.queue.leave(self._share)
        if self._waiting is not None:
            self._waiting.cancel()
        self._end_stream()
        if self.room is not None:
            was_settled = self.room.is_settled
            self.room.end()
            if not was_settled:
                self._parts.queue.dispatch_soon()  # the room is free again, though no worker reports it
        self._commands.hang_up()

    # -- messages to the client ---------------------------------------------------------------------------------

    def _emit(self, emit: Emit) -> tuple[inference_pb.GenerateResponse, bool]:
        if self._share is not None:
            self._share.charge_answer(len(emit.token_ids))
        self.account.emitted(len(emit.token_ids), is_resumed=self._state.num_resumed > 0)
        if self._stream is not None and self._state.phase is Phase.DECODING:
            self._stream.emitted()
        response, is_stopped = self._messages.delta(emit)
        if emit.offset == self._state.num_resumed:
            assert self._kind is not None, "somebody has computed it"
            response.worker_kind = kind_name(self._kind)
        return response, is_stopped

    def _last_response(self, finish_reason: inference_pb.FinishReason) -> inference_pb.GenerateResponse:
        self.account.stamps.ended_s = time.monotonic()
        timings = timings_of(
            self.account.stamps,
            num_tokens=self._messages.num_tokens - self._state.num_resumed,
            num_attempts=self._state.num_failures + 1,
            num_moves=int(self._has_moved),
            plan=self._last_plan,
            transfer=self._state.transfer,
        )
        # A resumed answer may have had more than its prompt cached.
        num_cached_tokens = min(self._state.num_cached_tokens, len(self._asked.prompt_token_ids))
        return self._messages.last(finish_reason, num_cached_tokens=num_cached_tokens, timings=timings)
