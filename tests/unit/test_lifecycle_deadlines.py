"""Requests with a deadline: which are refused on arrival, and which go on while there is time. No network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lifecycle_bench import BLOCK, PROMPT, Asked, Bench, load, settle

from protos import tandem_worker_pb2 as pb
from router.deadline import MIN_ANSWER_S
from router.forecast import PROMPT_OVERHEAD_TOKENS, Forecast
from router.queued_request import QueuedRequest
from router.request_events import WorkerKey
from router.served_kind import Kind
from router.validation.resumption import Resumption
from rpc.errors import DeadlinePassed, Overloaded


def learn_slow_prompts(forecast: Forecast) -> None:
    """Make the router expect two seconds for computing PROMPT."""
    for _ in range(20):
        forecast.computed(len(PROMPT) - PROMPT_OVERHEAD_TOKENS, 2.0)


async def test_who_sends_many_is_refused_for_its_deadline_and_others_are_not() -> None:
    bench = Bench()
    bench.decode.set_load(load(0))
    now_s = asyncio.get_running_loop().time()
    asked = [Asked(bench.lifecycle(f"flood-{number}", fairness_id="a").run()) for number in range(5)]
    await settle()
    bench.queue.pace._seconds_per_token.add(1.0, len(PROMPT), 1.0)  # each prompt ahead takes a second
    refused = Asked(bench.lifecycle("more", fairness_id="a", deadline_s=now_s + 4).run())
    other = Asked(bench.lifecycle("other", fairness_id="b", deadline_s=now_s + 4).run())
    await settle()
    assert isinstance(refused.task.exception(), Overloaded)
    assert not other.task.done()
    for each in [*asked, other]:
        await each.leave()
    assert bench.queue.num_clients == 0


async def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once() -> None:
    """The router has seen that a prompt takes two seconds: the third in a row has little chance of an answer within
    six."""
    bench = Bench()
    bench.decode.set_load(load(300))  # room for all: requests wait for the prompts ahead to be computed, not for room
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    asked = []
    for name in ("first", "second", "third"):
        asked.append(bench.request(name, deadline_s=now_s + 6))
        await settle()
    error = asked[2].task.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s is not None
    assert 1 < error.retry_after_s < 4
    assert forecast.num_running == 2
    for waiting in asked[:2]:
        assert not waiting.task.done()
        await waiting.leave()
    assert forecast.num_running == 0


async def test_the_first_burst_is_refused_at_once_as_far_as_it_would_be_late() -> None:
    """Most of a burst waits in the router before it is known how fast the queue moves. Two workers compute a prompt in
    two seconds each, so within twenty seconds they do not compute forty."""
    bench = Bench(with_prefill=True)
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    for worker in (bench.decode, bench.prefill):
        worker.set_load(load(5000))
        for _ in range(20):
            bench.pool.costs.computed(worker.key, len(PROMPT), 2.0, now_s)
    asked = []
    for number in range(40):
        asked.append(bench.request(f"r{number}", deadline_s=now_s + 20))
        await settle()
    assert len(bench.queue) > 1
    is_refused = [each.task.done() and isinstance(each.task.exception(), Overloaded) for each in asked]
    assert 10 <= is_refused.index(True) <= 20
    assert all(is_refused[20:])
    for each in asked[:20]:
        await each.leave()


@pytest.mark.parametrize("token_ids", [[], [5]])
async def test_a_deadline_that_has_passed_is_called_so(token_ids: list[int]) -> None:
    passed_s = asyncio.get_running_loop().time() - 1
    asked = Asked(Bench().lifecycle("r", deadline_s=passed_s, resumption=Resumption(token_ids=token_ids)).run())
    await settle()
    assert isinstance(asked.task.exception(), DeadlinePassed)


async def test_a_stream_of_another_router_goes_on_as_long_as_there_is_time() -> None:
    bench = Bench()
    bench.tell(bench.decode, compat_digest="a kind")
    bench.decode.set_load(load(300))
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    first = bench.request("first")
    await settle()
    new = bench.request("new", deadline_s=now_s + 2)
    resumption = Resumption(token_ids=[5], kind=Kind("a kind"))
    resumed = Asked(bench.lifecycle("resumed", deadline_s=now_s + 2, resumption=resumption).run())
    await settle()
    assert isinstance(new.task.exception(), Overloaded)
    assert not resumed.task.done()
    for waiting in (first, resumed):
        await waiting.leave()


async def test_what_waits_for_room_is_given_up_before_its_deadline_unless_its_answer_has_begun() -> None:
    """If the client has part of the answer already, it still gets what can be computed in time."""
    bench = Bench()
    bench.tell(bench.decode, compat_digest="a kind")
    bench.decode.set_load(load(0))
    deadline_s = asyncio.get_running_loop().time() + MIN_ANSWER_S + 0.05
    resumption = Resumption(token_ids=[5], kind=Kind("a kind"))
    resumed = Asked(bench.lifecycle("resumed", deadline_s=deadline_s, resumption=resumption).run())
    new = bench.request("new", deadline_s=deadline_s)
    await asyncio.wait([new.task], timeout=5)
    assert isinstance(new.task.exception(), Overloaded)
    await settle()
    assert not resumed.task.done()
    await resumed.leave()


async def test_many_answers_are_thought_to_take_longer_than_one() -> None:
    bench = Bench()
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    forecast.num_running = 1
    forecast.answering(now_s - 8)
    forecast.emitted(80, now_s)  # 0.1 s a token: an answer of 8 takes about a second if it runs alone
    forecast.ended(80, now_s, is_complete=True)
    one = bench.lifecycle("one", deadline_s=now_s + 3)
    asked = Asked(one.run())
    await settle()
    assert not asked.task.done()
    many = Asked(bench.lifecycle("many", deadline_s=now_s + 3, num_answers=60).run())
    await settle()
    assert isinstance(many.task.exception(), Overloaded)
    await asked.leave()


class Cached:
    """A prefix index: the number of cached blocks at each worker."""

    def __init__(self, **num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_asked = 0

    async def longest_match(self, token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        self.num_asked += 1
        return {WorkerKey(name, "1"): num for name, num in self.num_blocks.items()}


@pytest.mark.parametrize(("num_blocks", "is_refused"), [(0, True), (20, True), (50, False)])
async def test_what_is_cached_of_a_prompt_is_not_computed(num_blocks: int, is_refused: bool) -> None:
    """A prompt takes two seconds, and one runs already. With five sixths cached, this one takes a third of a second."""
    bench = Bench(prefixes=Cached(d=num_blocks, elsewhere=60))
    bench.decode.set_load(load(300))
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    forecast.num_running = 1
    asked = bench.request("r", deadline_s=now_s + 1.5)
    await settle()
    assert isinstance(asked.task.exception() if asked.task.done() else None, Overloaded) == is_refused
    if not is_refused:
        await asked.leave()


@pytest.mark.parametrize(("num_blocks", "num_free", "is_refused"), [(59, 120, False), (58, 120, True), (60, 119, True)])
async def test_who_may_overtake_is_not_refused_for_those_before(
    num_blocks: int, num_free: int, is_refused: bool
) -> None:
    """Another prompt waits for others to be computed, which takes a minute. The next turn of a chat, which the decode
    worker has cached but for one block, need not wait for them, if there is room for both."""
    cached = Cached(d=num_blocks)
    bench = Bench(with_prefill=True, prefixes=cached)
    bench.decode.set_load(load(num_free, num_running=500))
    bench.prefill.set_load(pb.WorkerLoad(num_waiting_tokens=9000))
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    forecast.num_running = 1
    bench.queue.pace._seconds_per_token.add(60.0, len(PROMPT), 1.0)
    first = asyncio.create_task(bench.queue.wait_for_plan(QueuedRequest(num_tokens=60 * BLOCK)))
    await settle()
    turn = bench.request("turn", deadline_s=now_s + 30)
    await settle()
    assert isinstance(turn.task.exception() if turn.task.done() else None, Overloaded) == is_refused
    assert not first.done()
    assert len(bench.queue) == 1, "the turn does not wait"
    if not is_refused:
        await turn.leave()
    first.cancel()
    await settle()


async def test_a_prompt_is_thought_to_be_computed_where_that_is_soonest() -> None:
    """Running streams slow down prefill at a decode worker; waiting prompts delay it at any worker."""
    bench, num_tokens = Bench(with_prefill=True), len(PROMPT)
    cached = {bench.prefill.key: 10, bench.decode.key: 20}
    assert bench.pool.num_tokens_to_compute(num_tokens, "", cached) == num_tokens - 20 * BLOCK
    busy = load(100, num_running=100)
    bench.decode.set_load(busy)
    assert bench.pool.num_tokens_to_compute(num_tokens, "", cached) == num_tokens - 10 * BLOCK
    waiting = load(100)
    waiting.num_waiting_tokens = 500
    bench.prefill.set_load(waiting)
    assert bench.pool.num_tokens_to_compute(num_tokens, "", cached) == 500 + num_tokens - 10 * BLOCK
    bench.decode.set_load(load(100))
    assert bench.pool.num_tokens_to_compute(num_tokens) == num_tokens


async def test_nobody_asks_what_is_cached_where_it_decides_nothing() -> None:
    """A flood of requests that would all be late causes no lookup in Redis."""
    cached = Cached(d=60)
    bench = Bench(prefixes=cached)
    busy = load(300)
    busy.num_waiting_tokens = 10_000
    bench.decode.set_load(busy)
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    learn_slow_prompts(forecast)
    forecast.num_running = 1
    late = bench.request("r", deadline_s=now_s + 1.5)
    await settle()
    assert isinstance(late.task.exception(), Overloaded)
    assert cached.num_asked == 0


async def test_who_came_while_it_was_asked_what_is_cached_goes_before() -> None:
    """Behind the requests that waited when its lookup began, it would be in time. Behind those that wait when the
    lookup returns, it is late."""
    asking, told = asyncio.Event(), asyncio.Event()

    class Slow(Cached):
        async def longest_match(self, *asked: Any) -> dict[WorkerKey, int]:
            if not asking.is_set():
                asking.set()
                await told.wait()
            return await super().longest_match(*asked)

    bench = Bench(prefixes=Slow(d=59))
    bench.decode.set_load(load(0))
    forecast, now_s = bench.cluster.forecast, asyncio.get_running_loop().time()
    bench.queue.pace._seconds_per_token.add(1.0, len(PROMPT), 1.0)  # each prompt ahead takes a second
    learn_slow_prompts(forecast)
    forecast.num_running = 1
    late = bench.request("late", deadline_s=now_s + 2)
    await asking.wait()
    waiting = [bench.request(f"waiting-{number}") for number in range(5)]
    await settle()
    told.set()
    await settle()
    assert isinstance(late.task.exception() if late.task.done() else None, Overloaded)
    for each in waiting:
        await each.leave()
