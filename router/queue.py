"""The queue in which requests wait until workers have room: ordered by priority, then in fair shares among clients,
then first come, first served; bounded in tokens.

The queue owns the waiting requests, not the workers. `dispatch` runs whenever something changed (a request arrived, a
worker freed memory, joined or left: `dispatch_soon`). It plans requests from the head of the line and stops at the
first one that no worker has room for, so that a long prompt is not overtaken forever. One that waits only because too
many prompts are before it may be overtaken by requests that need not wait for these, such as a chat's next turn that a
decode worker has cached, and that leave it the room that it will need.

Some requests cannot use every worker that takes new requests: their answer began on workers of another kind, or only
some workers have their adapter. When such a request finds no room it steps aside (`aside`), because it would block
others from workers that it cannot use. It keeps its turn: `dispatch` always tries the request that is due first, in
line or aside, and if that one finds no room, the requests behind it do not get the workers that it waits for. Once the
request can use every worker that takes new requests, it returns to the front of the line. The queue has no timeout for
waiting for room; the client's deadline ends the wait, early enough to tell the client.

When no worker can serve a request, it waits only if its answer has begun, since its client would lose that answer. Such
requests wait apart from the others, each with a timer (`patience`) that fails it, unless a worker that can continue the
answer joins first: then the request moves aside. A worker that dies leaves thousands of such requests, so nothing
examines them one by one in the meantime.

Shares (`fair_shares`) are separate for each priority: what a client was served at another priority does not count. The
queue keeps a client's counter from when the client's first request enters until its last one has left.

A request that resumes an answer of another router goes before the later requests of the same client, and its bound is
half as large again, because its client is waiting in the middle of a stream. It gets no more than that, since a client
can claim this of any request.

The bound applies to the tokens that go before a request: requests of a lower priority (a higher number) do not keep it
out, and another client's requests count only as far as they are served before it. All requests together may hold twice
the bound. Requests that wait aside for an adapter count only against requests for the same adapter.

    wait_for_plan ──> waiting, in line or aside ──dispatch──> TakenRoom
       └─ full: Overloaded └── no worker left: NoWorker; too late to begin: Overloaded; the caller cancelled: gone
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Collection, Hashable

from router.aside import Aside, Place
from router.fair_shares import FairShares
from router.needs import Needs
from router.queue_pace import QueuePace
from router.queued_request import ClientShare, QueuedRequest
from router.request_events import WorkerKey
from router.taken_room import TakenRoom
from rpc.errors import NoWorker, Overloaded

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
WORKER_WAIT_S = 30.0
"""With a small model, a restarted process is back within seconds, a restarted container within about ten."""


class RequestQueue:
    """Requests that wait for workers."""

    def __init__(
        self,
        *,
        max_tokens: int,
        choose: Callable[[QueuedRequest, int], TakenRoom | None],
        has_workers: Callable[[QueuedRequest], bool],
        has_fewer_workers: Callable[[QueuedRequest], bool] = lambda _: False,
        workers_for: Callable[[QueuedRequest], Collection[WorkerKey]] = lambda _: (),
        worker_wait_s: float = WORKER_WAIT_S,
    ) -> None:
        """
        max_tokens: the bound.
        choose: plans one request on the workers as they are now and takes the room for it, given how many tokens of
            other requests wait; None: no worker has room, or (`waits_for_prompts`) too many prompts are before it.
        has_workers: whether some worker can serve the request, now or in a moment, so that waiting makes sense.
        has_fewer_workers: whether the request cannot use all of the workers that new requests go to.
        workers_for: the workers that may decode the request, full or not.
        worker_wait_s: how long a request whose answer has begun waits while no worker can serve it.
        """
        self._max_tokens = max_tokens
        self._choose = choose
        self._has_workers = has_workers
        self._has_fewer_workers = has_fewer_workers
        self._workers_for = workers_for
        self._worker_wait_s = worker_wait_s
        self.pace = QueuePace()
        self._shares: dict[int, FairShares[QueuedRequest]] = {}
        """By priority: each priority at which a request has entered and not left."""
        self._priorities: list[int] = []
        """The priorities at which requests wait in line, sorted."""
        self._aside: Aside[QueuedRequest] = Aside()
        """One lane for each `Needs.group`: the requests of a lane wait for the same workers."""
        self._patient: dict[Needs, dict[QueuedRequest, None]] = {}
        """Requests that no worker can serve now, by their needs."""
        self._num_patient_tokens = 0
        self._num_waiting = 0
        self.num_tokens = 0
        self._due: asyncio.Handle | None = None
        """The scheduled call of `dispatch_soon`."""

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def has_line(self) -> bool:
        """Whether requests wait in line. Requests aside do not count."""
        return bool(self._priorities)

    @property
    def num_clients(self) -> int:
        """Clients with requests that have entered and not left; a client counts once for each priority."""
        return sum(shares.num_open_clients for shares in self._shares.values())

    @property
    def may_be_overtaken(self) -> QueuedRequest | None:
        """The head of the line, if it waits only for prompts, so that a request that need not wait for these may be
        planned before it. Nobody overtakes requests aside: they wait for some of the workers that all use."""
        first = self._first()
        return first if first is not None and first.waits_for_prompts and not self._aside else None

    def num_tokens_before(self, priority: int, fairness_id: str = "", *, lora_name: str = "") -> int:
        """The waiting tokens that are expected to go before a further request of this client: all tokens of more urgent
        priorities, and those of its own priority that its share puts before it (`FairShares.num_tokens_before`). Of the
        requests aside, only those that wait for the same adapter count."""
        num_urgent = sum(self._shares[other].num_tokens for other in self._priorities if other < priority)
        shares = self._shares.get(priority)
        num_aside = self._aside.num_tokens_before(Needs(lora_name=lora_name).group, priority, fairness_id)
        return num_urgent + num_aside + (0 if shares is None else shares.num_tokens_before(fairness_id))

    def enter(self, priority: int, fairness_id: str) -> ClientShare:
        """A request of the client begins. Until it leaves, the caller charges what it is served to the returned
        share."""
        shares = self._shares.get(priority)
        if shares is None:
            shares = self._shares[priority] = FairShares(priority)
        return shares.enter(fairness_id)

    def leave(self, share: ClientShare) -> None:
        """The request that entered has ended."""
        shares = share.owner
        shares.leave(share)
        if not shares.num_open_clients:
            del self._shares[shares.priority]

    async def wait_for_plan(
        self,
        request: QueuedRequest,
        *,
        priority: int = 0,
        fairness_id: str = "",
        is_admitted: bool = False,
        give_up_s: float | None = None,
    ) -> TakenRoom:
        """Wait for workers; the caller settles the returned room. `fairness_id`: the client. `is_admitted`: this is a
        further answer to a request that was admitted, so the bound does not apply.

        Raises `Overloaded` if a new request would exceed the bound, or if the request still waits at `give_up_s` (on
        the event loop's clock). Raises `NoWorker` if no worker can serve the request, now or later during the wait: at
        once, or after `worker_wait_s` if its answer has begun, which only workers of the same kind can continue.
        Cancelling the call takes the request out of the queue.
        """
        self._note_if_empty()
        self.pace.queued(time.monotonic())
        try:
            if not (request.is_return or is_admitted):
                self._refuse_if_full(request, priority, fairness_id)
            room = await self._wait_turn(request, self.enter(priority, fairness_id), give_up_s)
            if request.overtakes is None:  # else it tells nothing about how long others wait
                now_s, has_waited = time.monotonic(), request.has_waited
                self.pace.planned(request.num_tokens, now_s, has_waited=has_waited, is_last=not self.has_line)
            return room
        finally:
            self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self.has_line:
            self.pace.nobody_waits()

    async def _wait_turn(self, request: QueuedRequest, share: ClientShare, give_up_s: float | None) -> TakenRoom:
        """Wait until the request is planned. Leaves `share` in any case."""
        future: asyncio.Future[TakenRoom] = asyncio.get_running_loop().create_future()
        request.planned = future
        request.share = share
        self._wait(request)
        try:
            self.dispatch()
            self._let_overtake(request)
            request.has_waited = not future.done()
            async with asyncio.timeout_at(give_up_s):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # planned just before the timeout
            raise Overloaded(
                "no worker had room in time to answer before the deadline", retry_after_s=MIN_RETRY_AFTER_S
            ) from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().end()  # planned, but the cancelled caller will not take the room
                self.dispatch()
            raise
        finally:
            if request.is_waiting:
                self._wait_no_more(request)
                self.dispatch()
            self.leave(share)

    def dispatch_soon(self) -> None:
        """Schedule one `dispatch` for everything that changes in this turn of the event loop. With five hundred workers
        a dispatch takes a millisecond, in which dozens of them may free something."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._dispatch_due)

    def _dispatch_due(self) -> None:
        self._due = None
        self.dispatch()

    def dispatch(self) -> None:
        """Plan requests until the workers are full."""
        self._end_patience()
        self._step_back()
        full: set[Hashable] = set()  # groups for which no worker has room
        barred: set[WorkerKey] = set()  # what they wait for, which nobody behind them may take
        is_line_full = False
        lanes = self._aside.due()
        while True:
            request, is_aside = self._next_in_turn(None if is_line_full else self._first(), lanes.first())
            if request is None:
                return
            group = request.needs.group
            if group not in full:
                request.barred = barred
                if self._settle(request):
                    continue
                barred |= set(self._workers_for(request))
            if is_aside:
                full.add(group)
                lanes.pop()
            elif self._has_fewer_workers(request):
                full.add(group)
                self._leave_line(request)
                self._step_aside(request)
                self._note_if_empty()
            else:
                is_line_full = True

    def _next_in_turn(self, first: QueuedRequest | None, lane: Hashable | None) -> tuple[QueuedRequest | None, bool]:
        """Which goes next: `first`, which is in line, or the first request of the `lane` aside; and whether it is the
        latter."""
        first_aside = None if lane is None else self._aside.first_of(lane)
        if first_aside is None:
            return first, False
        turn, aside = first_aside
        # Requests aside were before it in the line, so of two equal places theirs comes first.
        if first is None or turn.place <= Place.of(first.share, is_return=first.is_return):
            return aside, True
        return first, False

    def _let_overtake(self, request: QueuedRequest) -> None:
        """Plan a request that just arrived, if the head of the line waits only for prompts, this one need not, and a
        worker has room for both."""
        first = self.may_be_overtaken
        is_in_line = request.is_waiting and request.patience is None
        if is_in_line and first is not None and first is not request:
            request.barred, request.overtakes = frozenset(), first
            self._settle(request)
            if request.is_waiting:
                request.overtakes = None

    def _step_aside(self, request: QueuedRequest) -> None:
        self._aside.push(
            request.needs.group,
            request.share,
            request,
            request.num_own_tokens,
            is_return=request.is_return,
            is_ahead=request.is_resumed,
        )

    def _end_patience(self) -> None:
        """Move aside the patient requests that a worker can serve now."""
        for patient in list(self._patient.values()):
            if self._has_workers(next(iter(patient))):
                for request in list(patient):
                    self._leave_place(request)
                    self._step_aside(request)

    def _step_back(self) -> None:
        """Move requests aside that can use all workers again to the front of the line, each at its priority."""
        back = {lane for lane in self._aside.lanes if not self._has_fewer_workers(self._aside.any_of(lane))}
        if back:
            self.pace.queued(time.monotonic())
            for request in reversed(self._aside.in_turn(back)):
                self._aside.discard(request)
                self._join_line(request, in_front=True)

    def _settle(self, request: QueuedRequest) -> bool:
        """Plan the request, unless it is already over or no worker can serve it. Returns whether it has left its place,
        so that the next request has its turn; False: no worker has room for it."""
        try:
            if not request.planned.done():
                if not self._has_workers(request):
                    self._be_patient(request)
                    return True
                room = self._choose(request, self.num_tokens - self._num_patient_tokens - request.num_own_tokens)
                if room is None:
                    return False
                request.planned.set_result(room)
                # The client does not pay again for an attempt that failed or found its worker busy.
                if not request.is_return:
                    request.share.charge_prompt(room.num_tokens_to_prefill)
        except Exception as error:  # ends this request, not the caller of `dispatch`
            request.planned.set_exception(error)
        self._wait_no_more(request)
        return True

    def _first(self) -> QueuedRequest | None:
        return self._shares[self._priorities[0]].first() if self._priorities else None

    def _be_patient(self, request: QueuedRequest) -> None:
        """No worker can serve the request now: let it wait for one. Raises `NoWorker` if it may not wait."""
        if not (request.has_begun and self._worker_wait_s):
            raise _nobody_for(request)
        self._leave_place(request)
        self._note_if_empty()
        self._patient.setdefault(request.needs, {})[request] = None
        self._num_patient_tokens += request.num_own_tokens
        request.patience = asyncio.get_running_loop().call_later(self._worker_wait_s, self._give_up, request)

    def _give_up(self, request: QueuedRequest) -> None:
        if self._has_workers(request):
            self.dispatch()  # a dispatch was due anyway
        elif not request.planned.done():
            request.planned.set_exception(_nobody_for(request))
            self._wait_no_more(request)

    def _refuse_if_full(self, request: QueuedRequest, priority: int, fairness_id: str) -> None:
        num_tokens = request.num_tokens
        # Requests that no worker can serve compete with nobody for the workers that exist.
        num_waiting_tokens = self.num_tokens - self._num_patient_tokens - self._num_tokens_beside(request.needs.group)
        if num_waiting_tokens + num_tokens <= self._max_tokens:
            return  # it fits, even if all of these tokens go before it
        num_before = self.num_tokens_before(priority, fairness_id, lora_name=request.needs.lora_name)
        may_be_before = self._max_tokens
        if request.is_resumed:
            may_be_before += self._max_tokens // 2
        is_full = num_before and num_before + num_tokens > may_be_before
        if is_full or (num_waiting_tokens and num_waiting_tokens + num_tokens > 2 * self._max_tokens):
            held = num_before if is_full else num_waiting_tokens
            bound = may_be_before if is_full else 2 * self._max_tokens
            room_s = self.pace.queued_s(held + num_tokens - bound)
            raise Overloaded(
                f"the queue is full: {held} tokens wait, of at most {bound}; retry later",
                retry_after_s=min(max(room_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
            )

    def _num_tokens_beside(self, group: Hashable) -> int:
        """Tokens that wait aside for other adapters. They are left out, since many tokens that wait for one adapter
        must not get requests for others refused."""
        lanes = (lane for lane in self._aside.lanes if lane != group and self._aside.any_of(lane).needs.kind is None)
        return sum(map(self._aside.num_tokens, lanes))

    def _wait(self, request: QueuedRequest) -> None:
        self._join_line(request, in_front=request.is_return)
        request.is_waiting = True
        self._num_waiting += 1
        self.num_tokens += request.num_own_tokens

    def _wait_no_more(self, request: QueuedRequest) -> None:
        self._leave_place(request)
        request.is_waiting = False
        self._num_waiting -= 1
        self.num_tokens -= request.num_own_tokens

    def _leave_place(self, request: QueuedRequest) -> None:
        """Take the request out of the line, the lane aside, or the patient requests, wherever it waits."""
        if request.patience is not None:
            request.patience.cancel()
            request.patience = None
            patient = self._patient[request.needs]
            del patient[request]
            self._num_patient_tokens -= request.num_own_tokens
            if not patient:
                del self._patient[request.needs]
        elif request in self._aside:
            self._aside.discard(request)
        else:
            self._leave_line(request)

    def _join_line(self, request: QueuedRequest, *, in_front: bool) -> None:
        shares = request.share.owner
        if not shares.num_waiting:
            insort(self._priorities, shares.priority)
        shares.push(request.share, request, request.num_own_tokens, is_return=in_front, is_ahead=request.is_resumed)

    def _leave_line(self, request: QueuedRequest) -> None:
        shares = request.share.owner
        shares.remove(request.share, request)
        if not shares.num_waiting:
            self._priorities.remove(shares.priority)


def _nobody_for(request: QueuedRequest) -> NoWorker:
    return NoWorker(f"no decode worker{request.needs} is available", retry_after_s=2.0)
