"""What the router learns about how fast decode workers step, and how it uses that."""

from __future__ import annotations

import asyncio
import random
import time
from typing import cast

import pytest
from lifecycle_bench import Bench, ScriptedSession, settle

from protos import tandem_worker_pb2 as pb
from router.fading import HALF_LIFE_S
from router.paces import MIN_TOKENS, Paces
from router.request_events import WorkerKey

FAST, ALSO_FAST, SLOW, NEW = (WorkerKey(name, "1") for name in ("fast", "also fast", "slow", "new"))


def step_s(num_blocks: float) -> float:
    return 0.01 + 1e-5 * num_blocks


def learned(factor: float, *, noise: float = 0.0, busy: int = 0) -> Paces:
    """`factor`: how many times as long SLOW's steps take. `busy`: how many more blocks FAST has in use."""
    paces, chance = Paces(), random.Random(1)
    for number in range(60):
        for worker in (FAST, ALSO_FAST, SLOW):
            num_blocks = chance.randrange(2000) + busy * (worker == FAST)
            seconds = 100 * step_s(num_blocks) * (factor if worker == SLOW else 1) * (1 + chance.uniform(0, noise))
            paces.decoded(worker, 100, seconds, num_blocks, float(number))
    return paces


def test_a_slow_worker_is_told_from_one_that_has_more_to_do() -> None:
    paces = learned(3.0, busy=3000)
    assert 2 < paces.slowness(SLOW, 60.0) < 4
    assert paces.slowness(FAST, 60.0) == paces.slowness(ALSO_FAST, 60.0) == 1
    assert paces.slowness(NEW, 60.0) == 1


def test_what_chance_makes_is_no_difference() -> None:
    paces = learned(1.0, noise=0.3)
    assert {paces.slowness(worker, 60.0) for worker in (FAST, ALSO_FAST, SLOW)} == {1.0}


def test_a_worker_that_has_answered_nothing_for_long_is_tried_again() -> None:
    assert learned(4.0).slowness(SLOW, 60.0 + 6 * HALF_LIFE_S) == 1.0


def test_one_that_recovers_is_soon_as_the_others() -> None:
    paces = learned(4.0)
    for number in range(40):
        for worker in (FAST, ALSO_FAST, SLOW):
            paces.decoded(worker, 100, 100 * step_s(1000), 1000, 60.0 + number)
    assert paces.slowness(SLOW, 100.0) == 1


def test_one_report_says_little_however_long_it_took() -> None:
    paces = learned(1.0)
    paces.decoded(NEW, 100, 100 * 100 * step_s(0), 0, 60.0)
    assert 1 <= paces.slowness(NEW, 60.0) < 1.5


def test_a_moment_counts_once_however_many_streams_report_it() -> None:
    """The load rises for ten seconds, during which each of its streams reports. A report for each stream that counted
    as much as the others would leave only those of the last moment, which show nothing of how the load slows it."""
    paces = Paces()
    for tenth in range(1, 101):
        num_blocks = 10 * tenth
        for _ in range(tenth):
            paces.decoded(FAST, MIN_TOKENS, MIN_TOKENS * step_s(num_blocks), num_blocks, tenth / 10)
    for num_blocks in (0, 500, 2000):
        assert paces.token_s(FAST, num_blocks) == pytest.approx(step_s(num_blocks), rel=0.1)


def test_a_report_that_comes_late_does_not_count_a_moment_twice() -> None:
    paces = learned(1.0)
    before = paces.token_s(FAST, 1000)
    for _ in range(100):
        paces.decoded(FAST, 100, 100 * 10 * step_s(1000), 1000, 50.0)
        paces.decoded(FAST, 100, 100 * 10 * step_s(1000), 1000, 59.0)
    assert paces.token_s(FAST, 1000) == before


def test_how_long_an_answer_takes_is_known_once_some_have_ended() -> None:
    paces = learned(1.0)
    assert paces.answer_s(FAST, 1000) == 0
    for num_tokens in (100, 300) * 10:
        paces.answered(num_tokens)
    assert paces.answer_s(FAST, 1000) == pytest.approx(200 * step_s(1000), rel=0.1)
    assert paces.answer_s(NEW, 1000) == 0


def test_what_prompts_take_is_not_what_streams_take() -> None:
    paces = learned(1.0)
    before = paces.token_s(FAST, 1000)
    for second in range(60, 90):
        paces.decoded(FAST, 100, 100 * 3 * step_s(1000), 1000, float(second), has_prompts=True)
    assert paces.token_s(FAST, 1000) == before
    assert paces.slowness(FAST, 90.0) > 2, "where it is compared with others, it does not matter"
    paces.decoded(NEW, 100, 100 * step_s(0), 0, 90.0, has_prompts=True)
    assert paces.token_s(NEW, 0) == 0


def test_one_that_is_gone_is_forgotten() -> None:
    paces = learned(3.0)
    paces.forget(SLOW)
    assert paces.slowness(SLOW, 60.0) == 1
    assert paces.token_s(SLOW, 1000) == 0


def test_workers_are_compared_with_the_median_one() -> None:
    paces, workers = Paces(), [WorkerKey(f"w{factor}", "1") for factor in (1, 2, 4, 8, 16)]
    for second in range(60):
        for number, worker in enumerate(workers):
            paces.decoded(worker, 100, 100 * step_s(0) * 2**number, 0, float(second))
    slowness = [paces.slowness(worker, 60.0) for worker in workers]
    assert slowness == sorted(slowness)
    assert slowness[1] < 1 == slowness[2] < slowness[3]


def test_a_report_of_no_time_makes_no_other_worker_slow() -> None:
    """After a pause of the router, messages that waited for it seem to come all at once."""
    for seconds in (0.0, 1e-5):
        paces = Paces()
        for second in range(30):
            paces.decoded(FAST, 100, 100 * step_s(1000), 1000, float(second))
        paces.decoded(NEW, MIN_TOKENS, seconds, 1000, 30.0)
        assert paces.slowness(FAST, 30.0) == 1


def test_a_pause_is_an_outlier_although_the_worker_always_had_prompts_before() -> None:
    paces = Paces()
    for second in range(30):
        paces.decoded(FAST, 100, 100 * step_s(1000), 1000, float(second), has_prompts=True)
    paces.decoded(FAST, MIN_TOKENS, 30.0, 1000, 60.0)
    assert paces.token_s(FAST, 1000) < 5 * step_s(1000)


def test_what_a_report_costs_does_not_grow_with_the_number_of_workers() -> None:
    """The workers decode seldom, so each report is compared with what other workers take."""

    def cpu_s(num_workers: int) -> float:
        paces, workers = Paces(), [WorkerKey(f"w{number}", "1") for number in range(num_workers)]
        for worker in workers:
            paces.decoded(worker, MIN_TOKENS, MIN_TOKENS * step_s(0), 0, 0.0)
        began_s = time.process_time()
        for number in range(1000):
            paces.decoded(workers[number % num_workers], MIN_TOKENS, MIN_TOKENS * step_s(0), 0, 60.0 + number // 500)
        return time.process_time() - began_s

    assert cpu_s(500) < 10 * cpu_s(5)


@pytest.mark.parametrize("at", [1, 5, 1 + MIN_TOKENS], ids=["first", "meanwhile", "last"])
async def test_a_report_tells_whether_the_worker_had_prompts(at: int) -> None:
    bench = Bench()
    messages = bench.lifecycle("r").run()
    paces = bench.pool.costs.paces
    for index in range(2 + 3 * MIN_TOKENS):
        read = asyncio.create_task(anext(messages))
        await settle()
        bench.decode.num_prefill_tokens += 100 * (index == at)
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
        await read
        bench.decode.num_prefill_tokens -= 100 * (index == at)
        if index == 1 + MIN_TOKENS:
            assert list(paces._lines) == [bench.decode.key]
            assert not paces._lines_alone
    await messages.aclose()
    assert list(paces._lines_alone) == [bench.decode.key], "later it had none"


async def test_the_next_answer_goes_to_who_steps_faster() -> None:
    bench = Bench()
    other = bench.add("other", pb.Role.ROLE_DECODE, 2048)
    for worker in (FAST, ALSO_FAST):
        bench.pool.costs.paces.decoded(worker, 100, 100 * step_s(0), 0, time.monotonic())
    asked = bench.request("r")
    await settle()
    for index in range(2 + MIN_TOKENS):
        if index == 1 + MIN_TOKENS:
            await asyncio.sleep(0.8)  # others take about 0.1 s for this
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
        await settle()
    await asked.leave()
    assert bench.pool.costs.paces.slowness(bench.decode.key, time.monotonic()) > 1.1
    next_one = bench.request("next")
    await settle()
    assert [command.WhichOneof("command") for command in cast(ScriptedSession, other.session).sent] == ["generate"]
    await next_one.leave()


async def test_a_client_that_reads_slowly_makes_no_worker_slow() -> None:
    bench = Bench()
    for worker in (FAST, ALSO_FAST):
        bench.pool.costs.paces.decoded(worker, 100, 100 * step_s(0), 0, time.monotonic())
    messages = bench.lifecycle("r").run()
    for index in range(2):
        read = asyncio.create_task(anext(messages))
        await settle()
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
        await read
    for index in range(2, 3 + MIN_TOKENS):
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
    await asyncio.sleep(0.8)  # others take about 0.1 s for this
    await anext(messages)
    await messages.aclose()
    assert bench.pool.costs.paces.slowness(bench.decode.key, time.monotonic()) <= 1


async def test_nothing_is_learned_of_a_worker_that_is_gone() -> None:
    """The client reads the worker's messages only later. What is learned then would never be forgotten, and slow
    workers are found by comparison with all that are known."""
    bench = Bench()
    bench.pool.workers._spawn = lambda closing: closing.close()  # type: ignore[method-assign]
    messages = bench.lifecycle("r").run()
    for index in range(2):
        read = asyncio.create_task(anext(messages))
        await settle()
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
        await read
    for index in range(2, 2 + MIN_TOKENS):
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
    bench.d.inboxes.clear()  # the session ends
    bench.pool.set_records([])
    assert not bench.pool.handles
    await anext(messages)
    await messages.aclose()
    assert not bench.pool.costs.paces._lines
    assert not bench.pool.costs.paces._lines_alone


def test_a_prefill_worker_is_compared_by_its_tokens_between_prompts_alone() -> None:
    paces, decode, prefill = Paces(), WorkerKey("d", "1"), WorkerKey("p", "1")
    assert paces.ratio(prefill, decode, 0) is None
    for second, num_blocks in enumerate((0, 1000) * 10):
        paces.decoded(decode, 10, 0.001 * (100 + num_blocks), num_blocks, second)
    assert paces.ratio(prefill, decode, 20) is None, "nothing is known of it"
    paces.decoded(prefill, 20, 2.4, 500, 20, is_prefill=True)
    assert paces.ratio(prefill, decode, 20) is None, "too little is known of it"
    for second in range(21, 41):
        paces.decoded(prefill, 20, 2.4, 500, second, is_prefill=True)
        paces.decoded(prefill, 2, 9.0, 500, second, is_prefill=True, has_prompts=True)
    assert paces.ratio(prefill, decode, 41) == pytest.approx(2.0, rel=0.05)
    assert paces.ratio(prefill, decode, 41 + 6 * HALF_LIFE_S) is None, "it is tried again however slow it once was"
    assert paces.slowness(decode, 50.0) == 1.0, "decode workers are compared with each other only"
    paces.forget(prefill)
    assert paces.ratio(prefill, decode, 41) is None
