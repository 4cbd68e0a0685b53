"""Answers that have begun and have lost the only worker of their kind: what they cost other requests while they wait,
and that each of them ends. Workers come, go, fill up and free room at random. No network."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.needs import Needs
from router.queue import RequestQueue
from router.queued_request import QueuedRequest
from router.served_kind import Kind
from router.taken_room import TakenRoom
from router.worker_handle import WorkerHandle
from rpc.errors import NoWorker, Overloaded

KINDS = ("old", "new", "third")


class Workers:
    """One worker of each kind, present or not, with room for some requests. New requests go to the first that is
    present."""

    def __init__(self, *, worker_wait_s: float, max_tokens: int = 10**6) -> None:
        self.room: dict[str, int] = {}
        self.num_asked = 0
        model = inference_pb.GetModelInfoResponse(block_size=1)
        self._handle = WorkerHandle(pb.WorkerRecord(worker_id="d", incarnation="1", model=model), channel=None)
        self.queue = RequestQueue(
            max_tokens=max_tokens,
            choose=self._choose,
            has_workers=self._has_workers,
            has_fewer_workers=lambda request: self.kind_of(request) != self._served,
            worker_wait_s=worker_wait_s,
        )

    @property
    def _served(self) -> str:
        return next(iter(self.room), "")

    def kind_of(self, request: QueuedRequest) -> str:
        return self._served if request.needs.kind is None else request.needs.kind.compat_digest

    def _has_workers(self, request: QueuedRequest) -> bool:
        self.num_asked += 1
        return self.kind_of(request) in self.room

    def _choose(self, request: QueuedRequest, num_waiting_tokens: int) -> TakenRoom | None:
        kind = self.kind_of(request)
        if not self.room[kind]:
            return None
        self.room[kind] -= 1
        return TakenRoom(self._handle, None, request.num_tokens, kind=Kind(kind))

    def wait(
        self, kind: str, *, priority: int = 0, is_return: bool = False, num_tokens: int = 1
    ) -> asyncio.Task[TakenRoom]:
        needs = Needs(kind=Kind(kind) if kind else None)
        request = QueuedRequest(num_tokens=num_tokens, needs=needs, has_begun=bool(kind), is_return=is_return)
        return asyncio.create_task(self.queue.wait_for_plan(request, priority=priority))


async def test_those_without_a_worker_are_not_looked_at_one_by_one() -> None:
    """A worker that dies leaves thousands of such requests. If the queue tried each whenever one comes or gives up, the
    tokens of other requests would wait for seconds."""
    workers = Workers(worker_wait_s=0.1)
    waiting = [workers.wait("old", is_return=True) for _ in range(200)]
    await asyncio.sleep(0)
    assert (len(workers.queue), workers.queue.has_line) == (200, False)
    for task in waiting:
        with pytest.raises(NoWorker):
            await task
    assert workers.num_asked < 10 * len(waiting)
    assert (len(workers.queue), workers.queue.num_tokens, workers.queue.num_clients) == (0, 0, 0)


async def test_who_loses_the_next_worker_too_waits_for_another_as_long_as_before() -> None:
    workers = Workers(worker_wait_s=1.0)
    moved = workers.wait("old", is_return=True)
    await asyncio.sleep(0.3)
    workers.room["old"] = 0
    workers.queue.dispatch()
    del workers.room["old"]
    lost_s = asyncio.get_running_loop().time()
    workers.queue.dispatch()
    with pytest.raises(NoWorker):
        await moved
    assert asyncio.get_running_loop().time() - lost_s >= 1.0


async def test_who_gives_up_as_a_worker_joins_goes_there() -> None:
    """The queue hears of workers in the next turn of the event loop, and the time may be up in this one."""
    workers = Workers(worker_wait_s=0.1)
    moved = workers.wait("old", is_return=True)
    await asyncio.sleep(0)
    workers.room["old"] = 1
    assert (await moved).kind == Kind("old")
    assert (len(workers.queue), workers.queue.num_tokens, workers.room["old"]) == (0, 0, 0)


async def test_those_without_a_worker_do_not_fill_the_queue_of_others() -> None:
    workers = Workers(worker_wait_s=30.0, max_tokens=10)
    workers.room["new"] = 2
    moved = workers.wait("old", num_tokens=100, is_return=True)
    await asyncio.sleep(0)
    await workers.wait("")
    await workers.wait("", num_tokens=50)  # a single request may have any length
    workers.room["old"] = 1
    workers.queue.dispatch()
    await moved
    assert (workers.queue.num_tokens, workers.queue._num_patient_tokens) == (0, 0)


async def test_those_whose_workers_are_full_keep_others_out_only_where_all_together_would_be_too_many() -> None:
    workers = Workers(worker_wait_s=30.0, max_tokens=10)
    workers.room = {"new": 1, "old": 0}
    moved = [workers.wait("old", num_tokens=10) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="20 tokens wait, of at most 20"):
        await workers.wait("")
    workers.room["old"] = 1
    workers.queue.dispatch()
    await moved[0]
    await workers.wait("", num_tokens=10)
    moved[1].cancel()


@pytest.mark.parametrize("room", [{}, {"new": 0, "old": 0}])
async def test_the_time_without_a_worker_or_aside_is_no_measure_of_the_line(room: dict[str, int]) -> None:
    """Otherwise the router would refuse new requests whose deadlines it can meet."""
    workers = Workers(worker_wait_s=30.0)
    workers.room = dict(room)
    moved = [workers.wait("old", is_return=True) for _ in range(2)]
    await asyncio.sleep(0.2)  # at this pace a thousand tokens would take 200 s
    workers.room["old"] = 2
    workers.queue.dispatch()
    await asyncio.gather(*moved)
    assert workers.queue.pace.queued_s(1000) < 100


async def test_who_has_a_worker_again_goes_before_those_that_come() -> None:
    workers = Workers(worker_wait_s=30.0)
    batch = workers.wait("old", priority=5, is_return=True)
    moved = [workers.wait("old") for _ in range(3)]
    await asyncio.sleep(0)
    workers.room["old"] = 0
    new = workers.wait("")
    await asyncio.sleep(0)
    order = [*moved, new, batch]
    for num_planned in range(1, 6):
        workers.room["old"] = 1
        workers.queue.dispatch()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in order] == [True] * num_planned + [False] * (5 - num_planned)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_becomes_of_workers_each_request_ends_and_nobody_waits_for_nothing(seed: int) -> None:
    chance = random.Random(seed)
    workers = Workers(worker_wait_s=0.01)
    queue, ends = workers.queue, Counter[str]()
    tasks: list[asyncio.Task[TakenRoom]] = []
    for _ in range(300):
        kind = chance.choice(KINDS)
        match chance.choice(("wait", "wait", "wait", "join", "leave", "free", "cancel", "time")):
            case "wait":
                begun = chance.choice((*KINDS, ""))
                tasks.append(workers.wait(begun, priority=chance.randrange(2), is_return=bool(begun)))
            case "join":
                workers.room.setdefault(kind, chance.randrange(3))
            case "leave":
                workers.room.pop(kind, None)
            case "free" if kind in workers.room:
                workers.room[kind] += 1
            case "cancel" if tasks:
                chance.choice(tasks).cancel()
            case "time":
                await asyncio.sleep(0.003)
        queue.dispatch_soon()
        for _ in range(3):
            await asyncio.sleep(0)
        # A request that waits without a worker has a timer. A request without a timer waits for room, and there is
        # none.
        for needs, patient in queue._patient.items():
            assert needs.kind is not None
            assert needs.kind.compat_digest not in workers.room
            assert all(request.patience is not None for request in patient)
        for request in queue._aside:
            assert request.patience is None
            assert not workers.room.get(workers.kind_of(request), 0)
        if (first := queue._first()) is not None:
            assert workers.room[workers.kind_of(first)] == 0
    for kind in KINDS:
        workers.room[kind] = len(tasks)
    queue.dispatch()
    for task in tasks:
        try:
            await task
        except (NoWorker, asyncio.CancelledError) as error:
            ends[type(error).__name__] += 1
        else:
            ends["planned"] += 1
    assert (len(queue), queue.num_tokens, queue.num_clients, queue._patient, [*queue._aside]) == (0, 0, 0, {}, [])
    assert ends["planned"]
