"""The router's queue: first come, first served, bounded in tokens, and no request waits while there is room for it."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from lifecycle_bench import BLOCK, Bench, load

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.queue import RequestQueue
from router.queued_request import QueuedRequest
from router.request_events import Plan, WorkerKey
from router.served_kind import Kind
from router.taken_room import TakenRoom
from router.worker_handle import WorkerHandle
from rpc.errors import NoWorker, Overloaded


class Room:
    """A worker with room for some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.longest = math.inf
        """Longer prompts wait until those before them are computed."""
        self.num_waiting_tokens = 0
        self.is_there = True
        self.order: list[int] = []
        model = inference_pb.GetModelInfoResponse(block_size=1)
        self.worker = WorkerHandle(pb.WorkerRecord(worker_id="d", incarnation="1", model=model), channel=None)
        self.queue = RequestQueue(max_tokens=100, choose=self.choose, has_workers=lambda _: self.is_there)

    def choose(self, request: QueuedRequest, num_waiting_tokens: int) -> TakenRoom | None:
        self.num_waiting_tokens = num_waiting_tokens
        is_too_long = request.num_tokens > self.longest
        request.waits_for_prompts = is_too_long and request.num_tokens <= self.num_tokens
        if request.num_tokens > self.num_tokens or is_too_long:
            return None
        self.num_tokens -= request.num_tokens
        self.order.append(request.num_tokens)
        return TakenRoom(self.worker, None, request.num_tokens, kind=Kind("a kind"))

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.queue.dispatch()

    async def wait(
        self,
        num_tokens: int,
        fairness_id: str = "",
        *,
        is_return: bool = False,
        is_resumed: bool = False,
        is_admitted: bool = False,
        give_up_s: float | None = None,
        priority: int = 0,
    ) -> TakenRoom:
        return await self.queue.wait_for_plan(
            QueuedRequest(num_tokens=num_tokens, is_return=is_return, is_resumed=is_resumed),
            priority=priority,
            fairness_id=fairness_id,
            is_admitted=is_admitted,
            give_up_s=give_up_s,
        )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_came_first_goes_first_even_if_others_would_fit() -> None:
    room = Room(10)
    large = asyncio.create_task(room.wait(50))
    await settle()
    small = asyncio.create_task(room.wait(5))
    await settle()
    assert not small.done()
    room.add(45)
    await asyncio.gather(large, small)
    assert room.order == [50, 5]
    assert (len(room.queue), room.queue.num_tokens) == (0, 0)


async def test_a_router_that_is_slow_itself_does_not_take_that_for_a_moving_queue() -> None:
    """Otherwise it would know, before anybody has waited, how fast the queue moves: as fast as it plans."""
    room = Room(100)
    choose = room.choose

    def slowly(request: QueuedRequest, num_waiting_tokens: int) -> TakenRoom | None:
        time.sleep(0.02)
        return choose(request, num_waiting_tokens)

    room.queue._choose = slowly
    await room.wait(60)
    assert not room.queue.pace.is_known
    waiting = asyncio.create_task(room.wait(60))
    await settle()
    room.add(60)
    await waiting
    assert room.queue.pace.is_known


async def test_who_need_not_wait_for_prompts_overtakes_those_that_do() -> None:
    room = Room(100)
    room.longest = 20
    tasks = [asyncio.create_task(room.wait(num_tokens)) for num_tokens in (50, 30)]
    await settle()
    assert room.num_waiting_tokens == 50, "of the others"
    assert (await room.wait(15)).num_tokens == 15
    assert not any(task.done() for task in tasks)
    room.num_tokens = 40  # the first one waits for room now, so that nobody may take what comes free
    room.queue.dispatch()
    tasks.append(asyncio.create_task(room.wait(10)))
    await settle()
    assert not tasks[-1].done()
    room.longest = math.inf
    room.add(100)
    await asyncio.gather(*tasks)
    assert room.order == [15, 50, 30, 10]
    assert (len(room.queue), room.queue.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("num_free", "num_free_seqs", "may_pass"),
    [(119, 2, False), (120, 2, True), (500, 1, False), (500, 2, True)],
)
async def test_who_overtakes_leaves_room_for_those_before(num_free: int, num_free_seqs: int, may_pass: bool) -> None:
    """The first request waits for the prefill worker's prompts. The next turn of a chat, which the decode worker has
    cached, need not. If such turns took the room that the first one needs, it could wait for as long as they come."""
    bench = Bench(with_prefill=True)
    told = load(num_free, num_running=500)
    told.num_free_seqs = num_free_seqs
    bench.decode.set_load(told)
    bench.prefill.set_load(pb.WorkerLoad(num_waiting_tokens=9000))
    first = asyncio.create_task(bench.queue.wait_for_plan(QueuedRequest(num_tokens=60 * BLOCK)))
    await settle()
    turn = QueuedRequest(num_tokens=60 * BLOCK, num_cached_blocks={bench.decode.key: 60})
    chat = asyncio.create_task(bench.queue.wait_for_plan(turn))
    await settle()
    assert (first.done(), chat.done()) == (False, may_pass)
    assert bench.queue.pace.queued_s(1000) == 0, "that it passed tells nothing about how long others wait"
    bench.prefill.set_load(pb.WorkerLoad())
    bench.queue.dispatch()
    await settle()
    assert (await first).plan.prefill == bench.prefill.key
    chat.cancel()
    await settle()
    assert (len(bench.queue), bench.queue.num_tokens) == (0, 0)


async def test_who_waited_before_goes_to_the_front() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(5)), asyncio.create_task(room.wait(6))]
    await settle()
    tasks.append(asyncio.create_task(room.wait(7, is_return=True)))
    await settle()
    room.add(100)
    await asyncio.gather(*tasks)
    assert room.order == [7, 5, 6]


async def test_the_lower_number_goes_first_and_who_waited_before_only_among_its_like() -> None:
    room = Room(0)
    tasks = []
    for num_tokens, priority, is_return in (
        (1, 0, False), (2, 5, False), (3, -1, False), (4, 0, False), (5, 5, True), (6, 0, True), (7, -1, False),
    ):  # fmt: skip
        tasks.append(asyncio.create_task(room.wait(num_tokens, is_return=is_return, priority=priority)))
        await settle()
    assert [room.queue.num_tokens_before(priority) for priority in (-2, -1, 0, 5)] == [0, 10, 21, 28]
    room.add(100)
    await asyncio.gather(*tasks)
    assert room.order == [3, 7, 6, 1, 4, 5, 2]


async def test_clients_of_one_priority_are_served_equally_much_each_in_turn() -> None:
    room = Room(0)
    flood = [asyncio.create_task(room.wait(10 + number, "a")) for number in range(4)]
    await settle()
    others = [asyncio.create_task(room.wait(20 + number, "b")) for number in range(2)]
    others += [asyncio.create_task(room.wait(30, "c", priority=-1)), asyncio.create_task(room.wait(31, "c"))]
    await settle()
    assert (len(room.queue), room.queue.num_clients) == (8, 4), "a client is another one at another priority"
    room.add(1000)
    await asyncio.gather(*flood, *others)
    assert room.order == [30, 10, 20, 31, 11, 20 + 1, 12, 13]
    assert (len(room.queue), room.queue.num_tokens, room.queue.num_clients) == (0, 0, 0)
    assert not room.queue._shares, "no priority is kept that nobody uses"


async def test_who_waited_before_goes_first_whoever_it_is_and_pays_once() -> None:
    room = Room(0)
    share = room.queue.enter(0, "a")
    share.charge_answer(50)
    waiting = asyncio.create_task(room.wait(5, "b"))
    returning = asyncio.create_task(room.wait(7, "a", is_return=True))
    await settle()
    room.add(100)
    await asyncio.gather(waiting, returning)
    assert room.order == [7, 5]
    assert share.counter == 100
    room.queue.leave(share)
    assert room.queue.num_clients == 0


async def test_what_another_router_began_goes_before_what_its_client_asked_since_and_before_nobody_else() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(number, "a")) for number in (1, 2)]
    await settle()
    tasks += [asyncio.create_task(room.wait(number, "b")) for number in (10, 11)]
    await settle()
    for number, client in ((3, "a"), (12, "b"), (4, "a")):
        tasks.append(asyncio.create_task(room.wait(number, client, is_resumed=True)))
        await settle()
    tasks.append(asyncio.create_task(room.wait(5, "a")))
    await settle()
    room.add(1000)
    await asyncio.gather(*tasks)
    assert [number for number in room.order if number < 10] == [3, 4, 1, 2, 5]
    assert [number for number in room.order if number >= 10] == [12, 10, 11]
    assert room.order[:2] == [3, 12], "each client has its turns as without"
    assert (len(room.queue), room.queue.num_tokens, room.queue.num_clients) == (0, 0, 0)


async def test_a_full_queue_keeps_out_nobody_who_was_let_in_before() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(100))]
    await settle()
    for let_in in (room.wait(150, is_return=True), room.wait(160, is_admitted=True)):
        tasks.append(asyncio.create_task(let_in))
    await settle()
    assert not any(task.done() for task in tasks)
    room.add(410)
    await asyncio.gather(*tasks)
    assert room.order == [150, 100, 160]


async def test_a_queue_full_of_new_requests_does_not_keep_out_what_another_router_began() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(50)) for _ in range(2)]
    await settle()
    with pytest.raises(Overloaded, match="100 tokens wait, of at most 100"):
        await room.wait(1)
    tasks.append(asyncio.create_task(room.wait(50, is_resumed=True)))
    await settle()
    assert not tasks[-1].done()
    with pytest.raises(Overloaded, match="150 tokens wait, of at most 150") as full:
        await room.wait(1, is_resumed=True)
    assert full.value.retry_after_s
    other = asyncio.create_task(room.wait(50, "b"))  # a client whose requests all say so keeps no other out
    await settle()
    assert not other.done()
    for task in (*tasks, other):
        task.cancel()
    await asyncio.wait([*tasks, other])
    assert (len(room.queue), room.queue.num_tokens, room.queue.num_clients) == (0, 0, 0)


async def test_nobody_overtakes_the_first_but_who_was_served_less_becomes_it() -> None:
    room = Room(20)
    share = room.queue.enter(0, "a")
    flood = [asyncio.create_task(room.wait(num_tokens, "a")) for num_tokens in (50, 6)]
    await settle()
    waiting = asyncio.create_task(room.wait(7, "b"))
    await settle()
    assert room.order == [], "both had as much, and a came first"
    share.charge_answer(1)
    room.queue.dispatch()
    await waiting
    assert room.order == [7]
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)
    room.queue.leave(share)
    assert (len(room.queue), room.queue.num_tokens, room.queue.num_clients) == (0, 0, 0)


async def test_a_client_that_fills_the_queue_keeps_no_other_out() -> None:
    """The bound is for what goes before a request: its own client's line, and of each other line the first request and
    then as many tokens as its own line has."""
    room = Room(0)
    tasks = []

    async def let_in(*clients: str) -> None:
        for client in clients:
            tasks.append(asyncio.create_task(room.wait(20, client)))
            await settle()
            assert not tasks[-1].done()

    await let_in(*"aaaaa")
    assert [room.queue.num_tokens_before(0, client) for client in "ab"] == [100, 20]
    with pytest.raises(Overloaded, match="100 tokens wait, of at most 100"):
        await room.wait(20, "a")
    await let_in(*"bb")
    assert [room.queue.num_tokens_before(0, client) for client in "abc"] == [140, 100, 40]
    with pytest.raises(Overloaded, match="100 tokens wait, of at most 100"):
        await room.wait(20, "b")
    await let_in(*"cde")
    assert room.queue.num_tokens == 200
    with pytest.raises(Overloaded, match="100 tokens wait, of at most 100"):
        await room.wait(1, "f")  # five others go before it
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (len(room.queue), room.queue.num_tokens, room.queue.num_clients) == (0, 0, 0)


async def test_a_queue_full_of_those_behind_it_keeps_nobody_out_until_it_is_twice_full() -> None:
    room = Room(0)
    tasks = [asyncio.create_task(room.wait(90, priority=1))]
    await settle()
    with pytest.raises(Overloaded, match="90 tokens wait, of at most 100"):
        await room.wait(11, priority=1)
    tasks += [asyncio.create_task(room.wait(90, priority=0)), asyncio.create_task(room.wait(20, priority=-1))]
    await settle()
    assert room.queue.num_tokens == 200
    for priority, held, bound in ((0, 110, 100), (-1, 200, 200)):
        with pytest.raises(Overloaded, match=f"{held} tokens wait, of at most {bound}"):
            await room.wait(1, priority=priority)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (len(room.queue), room.queue.num_tokens) == (0, 0)


async def test_a_full_queue_refuses_with_a_time() -> None:
    room = Room(0)
    task = asyncio.create_task(room.wait(500))  # one request may always wait, whatever its size
    await settle()
    with pytest.raises(Overloaded) as caught:
        await room.wait(1)
    assert caught.value.retry_after_s is not None
    returning = asyncio.create_task(room.wait(7, is_return=True))  # a return: the queue accepted it before
    await settle()
    assert not returning.done()
    for waiting in (task, returning):
        waiting.cancel()
    await asyncio.wait([task, returning])
    task = asyncio.create_task(room.wait(90))
    await settle()
    fits = asyncio.create_task(room.wait(10))
    await settle()
    assert not fits.done()
    with pytest.raises(Overloaded):
        await room.wait(1)
    for waiting in (task, fits):
        waiting.cancel()


async def test_without_workers_nobody_waits() -> None:
    room = Room(0)
    task = asyncio.create_task(room.wait(5))
    await settle()
    room.is_there = False
    room.queue.dispatch()
    with pytest.raises(NoWorker):
        await task
    with pytest.raises(NoWorker):
        await room.wait(5)
    assert room.queue.num_tokens == 0


async def test_leaving_lets_the_next_one_through() -> None:
    room = Room(10)
    large = asyncio.create_task(room.wait(50))
    small = asyncio.create_task(room.wait(5))
    await settle()
    large.cancel()
    assert (await small).plan == Plan(WorkerKey("d", "1"), None)
    assert room.queue.num_tokens == 0


async def test_a_plan_that_nobody_hears_of_is_given_back() -> None:
    room = Room(0)
    task = asyncio.create_task(room.wait(5))
    await settle()
    room.add(5)  # plans the request
    assert room.worker.num_planned_blocks == 5
    task.cancel()  # before the request hears of it
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.worker.num_planned_blocks == 0


async def test_who_could_not_be_in_time_any_more_is_told_so() -> None:
    room = Room(10)
    loop = asyncio.get_running_loop()
    late = asyncio.create_task(room.wait(50, give_up_s=loop.time() + 0.05))
    behind = asyncio.create_task(room.wait(5))
    with pytest.raises(Overloaded) as caught:
        await late
    assert caught.value.retry_after_s is not None
    await behind
    assert room.order == [5]
    assert (len(room.queue), room.queue.num_tokens) == (0, 0)


async def test_a_plan_of_the_last_moment_is_taken() -> None:
    room = Room(0)
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    loop.call_at(now_s + 0.02, room.add, 5)
    late = asyncio.create_task(room.wait(5, give_up_s=now_s + 0.05))
    await settle()
    loop.call_soon(time.sleep, 0.1)  # so that the plan and the time to give up come in one turn of the loop
    result = await late
    assert room.worker.num_planned_blocks == 5
    result.settle()


async def test_what_goes_wrong_in_planning_ends_the_request_that_is_planned() -> None:
    room = Room(0)
    first, second = asyncio.create_task(room.wait(5)), asyncio.create_task(room.wait(6))
    await settle()

    def choose(request: QueuedRequest, num_waiting_tokens: int) -> TakenRoom | None:
        if request.num_tokens == 5:
            raise TypeError("a bug")
        return TakenRoom(room.worker, None, request.num_tokens, kind=Kind("a kind"))

    room.queue._choose = choose
    room.queue.dispatch()  # must not raise: a session calls it, and must go on
    with pytest.raises(TypeError, match="a bug"):
        await first
    await second


async def test_who_finds_the_queue_full_hears_when_there_may_be_room() -> None:
    """A queue of 100 tokens has 60 too many for this request. The client is told the time that 60 take, at least a
    second and at most a minute."""
    room = Room(0)
    waiting = asyncio.create_task(room.wait(100))
    await settle()
    for seconds_per_token, retry_after_s in ((0.0, 1.0), (0.1, 6.0), (10.0, 60.0)):
        room.queue.pace._seconds_per_token.add(seconds_per_token, 1, 0.0)
        with pytest.raises(Overloaded) as caught:
            await room.wait(60)
        assert caught.value.retry_after_s == pytest.approx(retry_after_s)
    waiting.cancel()
    await asyncio.wait([waiting])
