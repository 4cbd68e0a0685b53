"""Measures one request, and passes the measurements on to the learners that later requests are planned by. Decides
nothing about the request.

    queued ──> planned ──> asked ──> granted ──> sent ──> begun ──> first token ──> second token ──> ... ──> left
      ^                                   └─ the attempt failed ──┐
      └───────────────────────────────────────────────────────────┘

    from                                          learns         for
    sent ──> first token                          Costs          which worker computes the next prompt
    asked ──> granted, first ──> second token     Costs          whether another worker computes it
    sent ──> first token                          Forecast       whether the next answer can be in time
    first token ──> each token ──> left           Forecast       the same
    every few tokens from the third on            Costs          which worker decodes the next answer
    arrived ──> first token, token ──> token      RouterMetrics  people
    (queued ──> planned: the queue's own, `QueuePace`)

`Stamps` tell the client where its request's time went; `AttemptStamps` tell traces the same about each attempt.
"""

from __future__ import annotations

import time

from router.costs import Costs
from router.forecast import Forecast
from router.metrics import RouterMetrics
from router.paces import MIN_TOKENS, MIN_TOKENS_BETWEEN_PROMPTS, Paces
from router.request_events import Plan, WorkerSaid
from router.taken_room import TakenRoom
from router.timings import AttemptStamps, Stamps
from router.worker_handle import WorkerHandle


class _Decoding:
    """Measures how fast an attempt's decode worker steps, from the second token message on: the first message includes
    the prompt's time and the second, if KV moved, the transfer's."""

    def __init__(self, worker: WorkerHandle, paces: Paces, *, is_prefill: bool) -> None:
        self._worker = worker
        self._paces = paces
        self._is_prefill = is_prefill
        self._num_messages = 0
        self._num_tokens = 0
        """Since `_began_s`, when the worker had `_num_blocks` in use."""
        self._began_s = 0.0
        self._num_blocks = 0
        self._has_prompts = False

    def emitted(self, num_tokens: int, now_s: float) -> None:
        self._num_messages += 1
        if self._num_messages < 2:
            return
        self._has_prompts = self._has_prompts or self._worker.num_queued_tokens > 0
        if self._num_messages > 2:
            self._num_tokens += num_tokens
            if self._num_tokens < (MIN_TOKENS_BETWEEN_PROMPTS if self._is_prefill else MIN_TOKENS):
                return
            if not self._worker.is_forgotten:
                self._report(now_s)
        self._num_tokens, self._began_s, self._num_blocks = 0, now_s, self._worker.load.num_used_blocks
        self._has_prompts = self._worker.num_queued_tokens > 0

    def _report(self, now_s: float) -> None:
        num_blocks = (self._num_blocks + self._worker.load.num_used_blocks) / 2
        seconds = now_s - self._began_s
        self._paces.decoded(
            self._worker.key,
            self._num_tokens,
            seconds,
            num_blocks,
            now_s,
            has_prompts=self._has_prompts,
            is_prefill=self._is_prefill,
        )


class Account:
    """The account of one request, from its arrival on. Callers report each event as it happens; the account reads the
    clock itself."""

    def __init__(self, forecast: Forecast, costs: Costs, metrics: RouterMetrics, arrived_s: float) -> None:
        self.stamps = Stamps(arrived_s)
        self.attempts: list[AttemptStamps] = []
        """The attempts so far; the last one is running."""
        self._forecast = forecast
        self._costs = costs
        self._metrics = metrics
        self._first_attempt = 0
        """Number of the attempt that gave the first token."""
        self._has_second = False
        self._is_answering = False
        self._emitted_s: float | None = None
        self._said_s = 0.0
        """When the last event of a worker came."""
        self._decoding: _Decoding | None = None
        """For the running attempt."""

    def entered(self) -> None:
        """The request begins to wait for workers; it counts as running until `left`."""
        self._forecast.num_running += 1

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits for workers."""
        return not self.attempts or self.attempts[-1].plan is None

    def queued(self, why: str = "", moved_to: str = "") -> None:
        """Another attempt begins. `why`: the reason why the previous one failed, if it did. `moved_to`: the id of the
        worker that the stream moves to, if that ended the previous one."""
        now_s = time.monotonic()
        self._end_attempt(now_s, why, moved_to)
        if self._is_answering:
            self._is_answering = False
            self._forecast.interrupted(now_s)
        self.attempts.append(AttemptStamps(now_s))

    def planned(self, room: TakenRoom) -> None:
        """The queue has found workers for the attempt."""
        self.attempts[-1].planned_s, self.attempts[-1].plan = time.monotonic(), room.plan
        self._decoding = _Decoding(room.decode, self._costs.paces, is_prefill=room.plan.is_stay)

    def room_asked(self) -> None:
        """The decode worker was asked for room."""
        self.attempts[-1].asked_s = time.monotonic()

    def prompt_sent(self) -> None:
        """The prompt was sent to the worker that computes it."""
        sent_s = self.attempts[-1].sent_s = time.monotonic()
        self.stamps.sent_s = self.stamps.sent_s or sent_s

    def note(self, said: WorkerSaid, plan: Plan, room: TakenRoom) -> None:
        """A worker of the running attempt has sent an event."""
        now_s, attempt = time.monotonic(), self.attempts[-1]
        self._said_s = said.at_s
        match said.event.WhichOneof("event"):
            case "granted":
                attempt.granted_s = now_s
            case "busy":
                self.stamps.sent_s = None  # no worker has begun: the request waits on
                attempt.is_busy = True
            case "tokens" if attempt.sent_s is not None:  # else no prompt was sent: `RequestState` rejects the tokens
                self._note_tokens(said, plan, room, attempt, now_s)
            case "handed_over":
                self.stamps.handed_over_s = self.stamps.handed_over_s or now_s
                attempt.handed_over_s, attempt.transfer = now_s, said.event.handed_over.stats

    def _note_tokens(self, said: WorkerSaid, plan: Plan, room: TakenRoom, attempt: AttemptStamps, now_s: float) -> None:
        if said.worker == (plan.prefill or plan.decode):
            if attempt.first_token_s is None:
                self._note_first_of_attempt(said, attempt, now_s)
            if self.stamps.first_token_s is None:
                self._note_first(said, room, attempt)
        elif not self._has_second:
            self._has_second = True
            if said.event.attempt == self._first_attempt:  # else it came before the first, or in another attempt
                self._note_second(room, attempt, now_s)

    def _note_first_of_attempt(self, said: WorkerSaid, attempt: AttemptStamps, now_s: float) -> None:
        assert attempt.sent_s is not None
        attempt.begun_s = min(now_s, attempt.sent_s + said.event.tokens.waited_ms / 1000)
        attempt.first_token_s = now_s
        if not self._is_answering:
            self._is_answering = True
            self._forecast.answering(now_s)

    def _note_first(self, said: WorkerSaid, room: TakenRoom, attempt: AttemptStamps) -> None:
        assert self.stamps.sent_s is not None
        assert attempt.sent_s is not None
        assert attempt.first_token_s is not None
        self._first_attempt = said.event.attempt
        now_s = attempt.first_token_s
        seconds = now_s - attempt.sent_s  # without the time of workers that failed in earlier attempts
        # Correct for the difference between the tokens that the index said are cached and those that really were.
        num_unknown = room.num_cached_tokens - said.event.tokens.num_cached_tokens
        num_tokens = max(1, room.num_tokens_to_compute + num_unknown)
        self._forecast.computed(num_tokens, seconds)
        if not room.prefiller.is_forgotten:
            self._costs.computed(said.worker, num_tokens, seconds, now_s)
        self.stamps.begun_s = min(now_s, self.stamps.sent_s + said.event.tokens.waited_ms / 1000)
        self.stamps.first_token_s = now_s

    def _note_second(self, room: TakenRoom, attempt: AttemptStamps, now_s: float) -> None:
        """The decode worker has sent its first token. The gap that any two tokens have is not the handover's cost."""
        assert self.stamps.first_token_s is not None
        gap_s = now_s - self.stamps.first_token_s - self._forecast.seconds_per_answer_token
        granting_s = 0.0
        if attempt.asked_s is not None and attempt.granted_s is not None:
            granting_s = attempt.granted_s - attempt.asked_s
        self._costs.handed_over(room.num_tokens_to_move, granting_s + max(0.0, gap_s), now_s)

    def emitted(self, num_tokens: int, *, is_resumed: bool = False) -> None:
        """Tokens are on their way to the client. `is_resumed`: another router had begun the answer."""
        now_s, before_s = time.monotonic(), self._emitted_s
        self._emitted_s = now_s
        self._forecast.emitted(num_tokens, now_s)
        if self._decoding is not None:
            self._decoding.emitted(num_tokens, self._said_s)
        if before_s is None and not is_resumed:
            self._metrics.first_token(now_s - self.stamps.arrived_s)
        self._metrics.tokens(num_tokens, None if before_s is None else now_s - before_s)

    def left(self, num_answer_tokens: int, why: str = "") -> None:
        """The request is over. `why`: the reason why it failed; empty if it did not."""
        self._forecast.num_running -= 1
        self._end_attempt(time.monotonic(), why)
        if self._is_answering:
            is_complete = self.stamps.ended_s is not None
            self._forecast.ended(num_answer_tokens, time.monotonic(), is_complete=is_complete)
            if is_complete:
                self._costs.paces.answered(num_answer_tokens)

    def _end_attempt(self, now_s: float, why: str, moved_to: str = "") -> None:
        if self.attempts:
            last = self.attempts[-1]
            last.ended_s, last.why, last.moved_to = now_s, why, moved_to
        self._decoding = None
