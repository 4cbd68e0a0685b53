"""What is measured of one request, and what the router learns from it. Decides nothing about the request.

sent ──> placed ──> first token ──> second token ──> ... ──> left
         (Stamps: where its time went)      └─ forecast, costs, metrics: what later requests may expect
"""

from __future__ import annotations

import time

from router.costs import Costs
from router.forecast import Forecast
from router.metrics import RouterMetrics
from router.request_events import Plan, WorkerSaid
from router.timings import Stamps
from router.worker_handle import TakenRoom


class Account:
    """Of one request, from its arrival on. Told what happens when it happens; looks at the clock by itself."""

    def __init__(self, forecast: Forecast, costs: Costs, metrics: RouterMetrics, arrived_s: float) -> None:
        self.stamps = Stamps(arrived_s)
        self._forecast = forecast
        self._costs = costs
        self._metrics = metrics
        self._sent_s = 0.0
        """When the running attempt's prompt was sent."""
        self._asked_s = 0.0
        """When room was asked for last."""
        self._granted_s = 0.0
        """How long that took."""
        self._first_attempt = 0
        """The attempt that gave the first token."""
        self._has_second = False
        self._emitted_s: float | None = None

    def room_asked(self) -> None:
        """A decode worker was asked for room."""
        self._asked_s = time.monotonic()

    def prompt_sent(self) -> None:
        """The worker that computes the prompt was told."""
        self._sent_s = time.monotonic()
        self.stamps.sent_s = self.stamps.sent_s or self._sent_s

    def note(self, said: WorkerSaid, plan: Plan, room: TakenRoom) -> None:
        """What a worker of the running attempt says."""
        now_s = time.monotonic()
        match said.event.WhichOneof("event"):
            case "granted":
                self._granted_s = now_s - self._asked_s
            case "busy":
                self.stamps.sent_s = None  # nobody has begun: the request waits on
            case "tokens" if said.worker == (plan.prefill or plan.decode):
                if self.stamps.first_token_s is None:
                    self._note_first(said, room, now_s)
            case "tokens" if not self._has_second:
                self._has_second = True
                if said.event.attempt == self._first_attempt:  # else it overtook the first, or is of another attempt
                    self._note_second(room, now_s)
            case "handed_over":
                self.stamps.handed_over_s = self.stamps.handed_over_s or now_s

    def _note_first(self, said: WorkerSaid, room: TakenRoom, now_s: float) -> None:
        assert self.stamps.sent_s is not None
        self._first_attempt = said.event.attempt
        seconds = now_s - self._sent_s  # what a worker took that failed before is not held against this one
        # What was thought to be cached there, and was not, has been computed, too.
        num_tokens = room.num_tokens_to_compute + max(0, room.num_cached_tokens - said.event.tokens.num_cached_tokens)
        self._forecast.computed(num_tokens, seconds)
        self._costs.computed(said.worker, num_tokens, seconds, now_s)
        self._forecast.answering(now_s)
        self.stamps.placed_s = min(now_s, self.stamps.sent_s + said.event.tokens.waited_ms / 1000)
        self.stamps.first_token_s = now_s

    def _note_second(self, room: TakenRoom, now_s: float) -> None:
        """The decode worker goes on. A gap as there is between any two tokens is not the handover's."""
        assert self.stamps.first_token_s is not None
        gap_s = now_s - self.stamps.first_token_s - self._forecast.seconds_per_answer_token
        self._costs.handed_over(room.num_tokens_to_move, self._granted_s + max(0.0, gap_s), now_s)

    def emitted(self, num_tokens: int, *, is_resumed: bool = False) -> None:
        """Tokens are on their way to the client. `is_resumed`: the first that follow those of another router."""
        now_s, before_s = time.monotonic(), self._emitted_s
        self._emitted_s = now_s
        self._forecast.emitted(num_tokens, now_s)
        if before_s is None and not is_resumed:
            self._metrics.first_token(now_s - self.stamps.arrived_s)
        self._metrics.tokens(num_tokens, None if before_s is None else now_s - before_s)

    def left(self, num_answer_tokens: int) -> None:
        """The request is over, well or not."""
        if self.stamps.first_token_s is not None:
            is_complete = self.stamps.ended_s is not None
            self._forecast.ended(num_answer_tokens, time.monotonic(), is_complete=is_complete)
