"""Where requests wait until workers have room: by priority, then in fair shares among clients, then first come, first
served; bounded in tokens.

Owns the waiting requests, not the workers. `dispatch` is called whenever something changed (a request came, a worker
freed memory, joined or left: `dispatch_soon`). It plans from the head on, and stops at the first request that no worker
has room for, so that a long prompt is not overtaken for ever. A request that can only run on workers which take no new
requests, or on some of those that do (which have its adapter), steps aside, since it would keep others from workers
that it cannot use (`aside`). It keeps its turn: whoever is due first, in line or aside, is tried first, and where it
finds no room, those behind it get none of the workers that it waits for. When it may run wherever new requests go, it
is in line again, in front. No timer of ours ends the waiting for room: the client's deadline does, early enough to say
so.

Without any worker only those requests wait whose answer has begun, since their client would lose it. They wait apart
from the others, each with a timer (`patience`), which fails it unless a worker that can continue the answer is there
before: then they are aside. A worker that dies leaves thousands of them, so that nobody looks at each one in between.

Shares (`fair_shares`) are separate for each priority: what a client was served at another priority is not counted. A
client's counter is kept from when its first request enters until its last one has left.

An answer that another router has begun goes before what its client has asked since, and its bound is half as large
again: its client waits in the middle of a stream. No more than that, for a client may say so of anything.

The bound applies to the tokens that go before a request: others of a lower priority (a higher number) do not keep it
out, and another client's queue counts only as far as it is served before it. All together may be twice as much; but
those that wait aside for an adapter count for themselves, adapter by adapter, and keep nobody else out.

    wait_for_plan ──> waiting, in line or aside ──dispatch──> TakenRoom
       └─ full: Overloaded └── no worker left: NoWorker; too late to begin: Overloaded; the caller cancelled: gone
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Collection, Hashable, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from router.aside import Aside, Place
from router.fair_shares import FairShares, Share
from router.needs import NO_NEEDS, Needs
from router.queue_pace import QueuePace
from router.request_events import WorkerKey
from router.taken_room import TakenRoom
from rpc.errors import NoWorker, Overloaded

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
WORKER_WAIT_S = 30.0
"""A process that died is there again within seconds, a container within some ten, with a small model."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The part of a prompt that another answer to it has in use: a request that joins it on that worker takes no memory
    and no time for this part."""

    worker: WorkerKey
    num_blocks: int
    num_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """What planning needs to know of a request. The waiting caller makes it; what is not given then belongs to the
    queue."""

    num_tokens: int
    """To be prefilled: the prompt, and what of the answer exists already."""
    num_cached_blocks: dict[WorkerKey, int] = field(default_factory=dict)
    """Longest cached prefix on each worker, as the index said."""
    needs: Needs = NO_NEEDS
    avoid: frozenset[WorkerKey] = frozenset()
    """Workers that have failed it."""
    shared: SharedPrefix | None = None
    answer_s: float = 0.0
    """What its answer may take, from its first token on."""
    arrived_s: float = 0.0
    """At the router: whoever finds a worker busy comes back here, and has waited before."""
    has_begun: bool = False
    """Its client has something of it, or of another answer to its prompt."""
    is_resumed: bool = False
    """It has begun at another router. Its client says so: it goes before those of the same client alone."""
    is_return: bool = False
    """It waited its turn before, and was charged for its prompt: it goes to the front of its priority."""
    barred: Set[WorkerKey] = frozenset()
    """Workers that somebody before it waits for."""
    planned: asyncio.Future[TakenRoom] = field(init=False)
    share: ClientShare = field(init=False)
    """Its client's."""
    patience: asyncio.TimerHandle | None = field(default=None, init=False)
    """While there is no worker that could go on with it: when that ends it."""
    is_waiting: bool = field(default=False, init=False)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.arrived_s

    @property
    def num_own_tokens(self) -> int:
        """Of those to be prefilled, without what another answer to the prompt has in use: what the queue counts."""
        return self.num_tokens - (self.shared.num_tokens if self.shared is not None else 0)

    def num_shared_blocks(self, worker: WorkerKey) -> int:
        """Of the prompt, in use there by another answer to it."""
        return self.shared.num_blocks if self.shared is not None and self.shared.worker == worker else 0


ClientShare: TypeAlias = Share[QueuedRequest]
"""Of the requests of one client and one priority."""


class RequestQueue:
    """Requests that wait for workers."""

    def __init__(
        self,
        *,
        max_tokens: int,
        choose: Callable[[QueuedRequest], TakenRoom | None],
        has_workers: Callable[[QueuedRequest], bool],
        is_apart: Callable[[QueuedRequest], bool] = lambda _: False,
        workers_for: Callable[[QueuedRequest], Collection[WorkerKey]] = lambda _: (),
        worker_wait_s: float = WORKER_WAIT_S,
    ) -> None:
        """`choose` plans one request with the workers as they are now, and takes the room for it. `has_workers`:
        whether waiting makes sense for it. `is_apart`: whether it is not for all of the workers that new requests
        go to. `workers_for`: those that may decode it, full or not. `worker_wait_s`: for how long one whose answer
        has begun waits without them."""
        self._max_tokens = max_tokens
        self._choose = choose
        self._has_workers = has_workers
        self._is_apart = is_apart
        self._workers_for = workers_for
        self._worker_wait_s = worker_wait_s
        self.pace = QueuePace()
        self._shares: dict[int, FairShares[QueuedRequest]] = {}
        """By priority, for each at which a request has entered and not left."""
        self._priorities: list[int] = []
        """Those at which somebody waits in line, in order."""
        self._aside: Aside[QueuedRequest] = Aside()
        """By what those have in common who wait for the same workers."""
        self._patient: dict[Needs, dict[QueuedRequest, None]] = {}
        """Those without a worker, by what they ask of one."""
        self._num_patient_tokens = 0
        self._num_waiting = 0
        self.num_tokens = 0
        self._due: asyncio.Handle | None = None
        """Of `dispatch_soon`."""

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def has_line(self) -> bool:
        """Whether a request that comes now may find others before it. Requests aside do not count."""
        return bool(self._priorities)

    @property
    def num_clients(self) -> int:
        """How many clients have requests that entered and have not left, each client once for every priority."""
        return sum(shares.num_open_clients for shares in self._shares.values())

    def num_tokens_before(self, priority: int, fairness_id: str = "", *, lora_name: str = "") -> int:
        """The waiting tokens that are expected to go before a further request of this client: all tokens of more urgent
        priorities, and of its own priority what its share leaves (`FairShares.num_tokens_before`). Aside those alone
        that wait for the same adapter."""
        num_urgent = sum(self._shares[other].num_tokens for other in self._priorities if other < priority)
        shares = self._shares.get(priority)
        num_aside = self._aside.num_tokens_before(Needs(lora_name=lora_name).group, priority, fairness_id)
        return num_urgent + num_aside + (0 if shares is None else shares.num_tokens_before(fairness_id))

    def wait_s(self, priority: int, fairness_id: str, *, lora_name: str = "") -> float:
        """How long until a further request of this client would have room, as far as is known."""
        return self.pace.queued_s(self.num_tokens_before(priority, fairness_id, lora_name=lora_name))

    def enter(self, priority: int, fairness_id: str) -> ClientShare:
        """A request of the client begins: what it is served is charged to the share, until it leaves."""
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
        """Wait for workers; the caller settles the room. `fairness_id`: whose request it is. `is_admitted`: it is a
        further answer to a request that was admitted, so the bound does not apply.

        Raises `Overloaded` if a new request would exceed the bound, or still waits at `give_up_s` (of the event loop's
        clock); and `NoWorker` if there is no worker, now or while waiting: at once, or after `worker_wait_s` if its
        answer has begun, which only workers of that kind can continue. Cancelling it leaves the queue.
        """
        self._note_if_empty()
        self.pace.queued(time.monotonic())
        try:
            if not (request.is_return or is_admitted):
                self._refuse_if_full(request, priority, fairness_id)
            room = await self._wait_turn(request, self.enter(priority, fairness_id), give_up_s)
            self.pace.planned(request.num_tokens, time.monotonic(), is_last=not self.has_line)
            return room
        finally:
            self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self.has_line:
            self.pace.nobody_waits()

    async def _wait_turn(self, request: QueuedRequest, share: ClientShare, give_up_s: float | None) -> TakenRoom:
        """Leaves the `share` that was entered."""
        future: asyncio.Future[TakenRoom] = asyncio.get_running_loop().create_future()
        request.planned = future
        request.share = share
        self._wait(request)
        try:
            self.dispatch()
            async with asyncio.timeout_at(give_up_s):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # planned at the last moment
            raise Overloaded(
                "no worker had room in time: too little is left until the deadline", retry_after_s=MIN_RETRY_AFTER_S
            ) from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().end()  # planned, but the request was not there to hear of it
                self.dispatch()
            raise
        finally:
            if request.is_waiting:
                self._wait_no_more(request)
                self.dispatch()
            self.leave(share)

    def dispatch_soon(self) -> None:
        """`dispatch`, once for all that changes in this turn of the event loop. Beside five hundred workers it takes a
        millisecond, in which dozens of them may free something."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._dispatch_due)

    def _dispatch_due(self) -> None:
        self._due = None
        self.dispatch()

    def dispatch(self) -> None:
        """Plan as many requests as workers have room for."""
        self._end_patience()
        self._step_back()
        full: set[Hashable] = set()
        barred: set[WorkerKey] = set()
        is_line_full = False
        lanes = self._aside.due()
        while True:
            request, is_aside = None if is_line_full else self._first(), False
            lane = lanes.first()
            if lane is not None and (first_aside := self._aside.first_of(lane)) is not None:
                turn, aside = first_aside
                # Those aside were before it in line: of equal places theirs is first.
                if request is None or turn.place <= Place.of(request.share, is_return=request.is_return):
                    request, is_aside = aside, True
            if request is None:
                return
            group = request.needs.group
            request.barred = barred
            if group not in full and self._settle(request):
                continue
            if group not in full:
                barred |= set(self._workers_for(request))
            if is_aside:
                full.add(group)
                lanes.pop()
            elif self._is_apart(request):
                full.add(group)
                self._leave_line(request)
                self._step_aside(request)
                self._note_if_empty()
            else:
                is_line_full = True

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
        """Aside: those for whom a worker is there now."""
        for patient in list(self._patient.values()):
            if self._has_workers(next(iter(patient))):
                for request in list(patient):
                    self._leave_place(request)
                    self._step_aside(request)

    def _step_back(self) -> None:
        """Into line, in front of its priority: whoever is aside, and apart no more."""
        back = {lane for lane in self._aside.lanes if not self._is_apart(self._aside.any_of(lane))}
        if back:
            self.pace.queued(time.monotonic())
            for request in reversed(self._aside.in_turn(back)):
                self._aside.discard(request)
                self._join_line(request, in_front=True)

    def _settle(self, request: QueuedRequest) -> bool:
        """Plan it, unless it is over, or nobody can go on with it. Whether it has left its place, so that others may
        have their turn: else no worker has room for it."""
        try:
            if not request.planned.done():
                if not self._has_workers(request):
                    self._be_patient(request)
                    return True
                room = self._choose(request)
                if room is None:
                    return False
                request.planned.set_result(room)
                # What fails, or finds a worker busy after all, is not the client's to pay for again.
                if not request.is_return:
                    request.share.charge_prompt(room.num_tokens_to_prefill)
        except Exception as error:  # its own end, and not that of whoever happens to call
            request.planned.set_exception(error)
        self._wait_no_more(request)
        return True

    def _first(self) -> QueuedRequest | None:
        return self._shares[self._priorities[0]].first() if self._priorities else None

    def _be_patient(self, request: QueuedRequest) -> None:
        """Nobody can go on with it now. Raises `NoWorker` where it is not to wait for somebody."""
        if not (request.has_begun and self._worker_wait_s):
            raise _nobody_for(request)
        self._leave_place(request)
        self._note_if_empty()
        self._patient.setdefault(request.needs, {})[request] = None
        self._num_patient_tokens += request.num_own_tokens
        request.patience = asyncio.get_running_loop().call_later(self._worker_wait_s, self._give_up, request)

    def _give_up(self, request: QueuedRequest) -> None:
        if self._has_workers(request):
            self.dispatch()  # which was due
        elif not request.planned.done():
            request.planned.set_exception(_nobody_for(request))
            self._wait_no_more(request)

    def _refuse_if_full(self, request: QueuedRequest, priority: int, fairness_id: str) -> None:
        num_tokens = request.num_tokens
        # Without a worker they keep nobody from those that there are.
        num_waiting_tokens = self.num_tokens - self._num_patient_tokens - self._num_tokens_beside(request.needs.group)
        if num_waiting_tokens + num_tokens <= self._max_tokens:
            return  # whatever goes before it
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
                f"the queue holds {held} tokens of at most {bound}; retry later",
                retry_after_s=min(max(room_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S),
            )

    def _num_tokens_beside(self, group: Hashable) -> int:
        """Of those that wait aside for other adapters: whoever asks for one may ask for any number of tokens, and the
        others are not to be refused for that."""
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
        """In line, aside, or among those without a worker."""
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
