"""The order of requests for adapters that only some workers have, beside requests for the model itself. No network."""

from __future__ import annotations

import asyncio
import random

import pytest
from lifecycle_bench import BLOCK, PROMPT, Asked, load, settle
from test_workers_with_adapters import Several, leave, requests_at

from protos import tandem_worker_pb2 as pb
from router.queued_request import QueuedRequest
from router.validation.resumption import Resumption
from rpc.errors import NoWorker, Overloaded

SHORT = PROMPT[: 4 * BLOCK]


def some_with_it(**bench: object) -> Several:
    """Two full workers: `d` has the adapter `sql`, `e` does not."""
    several = Several("e", **bench)
    several.tell_adapters(several.decode, sql="1")
    several.fill("d", "e")
    return several


async def test_aside_clients_have_equal_shares() -> None:
    bench = some_with_it()
    flood = [bench.ask(f"a{i}", lora_name="sql", fairness_id="a", prompt_token_ids=SHORT) for i in range(6)]
    await settle()
    other = [bench.ask(f"b{i}", lora_name="sql", fairness_id="b", prompt_token_ids=SHORT) for i in range(2)]
    await settle()
    for num_blocks in range(4, 20, 4):
        bench.by_name["d"].set_load(load(num_blocks))
        bench.dispatch()
        await settle()
    assert sorted(requests_at(bench, "d")) == ["a0", "a1", "b0", "b1"]
    await leave(*flood, *other)
    assert (len(bench.queue), bench.queue.num_tokens, bench.queue.num_clients) == (0, 0, 0)


async def test_a_flood_for_an_adapter_leaves_its_workers_to_other_clients_of_the_model_too() -> None:
    bench = some_with_it()
    flood = [bench.ask(f"a{i}", lora_name="sql", fairness_id="a", prompt_token_ids=SHORT) for i in range(6)]
    await settle()
    other = bench.ask("b", fairness_id="b", prompt_token_ids=SHORT)
    await settle()
    for num_blocks in (4, 8):
        bench.by_name["d"].set_load(load(num_blocks))
        bench.dispatch()
        await settle()
    assert requests_at(bench, "d") == ["a0", "b"]
    await leave(*flood, other)


async def test_more_urgent_requests_in_line_go_before_those_aside() -> None:
    bench = some_with_it()
    batch = bench.ask("batch", lora_name="sql", priority=5, prompt_token_ids=PROMPT)
    await settle()
    urgent = bench.ask("urgent", prompt_token_ids=PROMPT)
    await settle()
    bench.by_name["d"].set_load(load(70))
    bench.dispatch()
    await settle()
    assert requests_at(bench, "d") == ["urgent"]
    await leave(batch, urgent)


async def test_who_finds_a_worker_busy_goes_before_those_aside() -> None:
    bench = some_with_it()
    bench.by_name["d"].set_load(load(60))
    returned = bench.ask("returned", fairness_id="b", prompt_token_ids=PROMPT)
    await settle()
    other = bench.ask("other", lora_name="sql", fairness_id="a", prompt_token_ids=PROMPT)
    await settle()
    bench.d.say("returned", bench.sent("d")[0].generate.attempt, busy=pb.Busy())
    await settle()
    assert (requests_at(bench, "d"), len(bench.queue)) == (["returned"], 2)
    bench.by_name["d"].set_load(load(61))
    bench.dispatch()
    await settle()
    assert requests_at(bench, "d") == ["returned", "returned"]
    await leave(returned, other)


async def test_a_long_prompt_aside_is_not_overtaken_at_its_worker() -> None:
    """Neither a request in line nor one aside for another adapter may overtake it. Otherwise it would wait for as long
    as such requests come."""
    bench = Several("e", "f")
    bench.tell_adapters(bench.decode, sql="1", poet="2")
    bench.tell_adapters(bench.by_name["f"], poet="2")
    bench.fill("d", "e", "f")
    long = bench.ask("long", lora_name="sql", prompt_token_ids=PROMPT)
    await settle()
    short = [bench.ask("poet", lora_name="poet", prompt_token_ids=SHORT), bench.ask("model", prompt_token_ids=SHORT)]
    bench.by_name["d"].set_load(load(30))
    bench.dispatch()
    await settle()
    assert requests_at(bench, "d") == []
    bench.by_name["e"].set_load(load(30))
    bench.by_name["f"].set_load(load(30))
    bench.dispatch()
    await settle()
    assert (requests_at(bench, "d"), len(bench.queue)) == ([], 1), "they have the others"
    bench.free("d")
    await settle()
    assert requests_at(bench, "d") == ["long"]
    await leave(long, *short)


async def test_who_need_not_wait_for_prompts_does_not_overtake_those_aside() -> None:
    bench = some_with_it(with_prefill=True)
    bench.prefill.set_load(pb.WorkerLoad(num_waiting_tokens=9000))
    long = bench.ask("long", lora_name="sql", priority=5, prompt_token_ids=PROMPT)
    await settle()
    bench.by_name["d"].set_load(load(30, num_running=500))
    bench.by_name["e"].set_load(load(300, num_running=500))
    first = bench.ask("first", prompt_token_ids=PROMPT)
    await settle()
    turn = QueuedRequest(num_tokens=4 * BLOCK, num_cached_blocks={bench.decode.key: 4})
    chat = asyncio.create_task(bench.queue.wait_for_plan(turn, priority=6))
    await settle()
    assert not chat.done()
    assert len(bench.queue) == 3
    chat.cancel()
    await leave(long, first)


async def test_a_stream_that_another_router_began_goes_before_what_its_client_has_aside() -> None:
    bench = some_with_it()
    new = [bench.ask(f"new {i}", lora_name="sql") for i in range(3)]
    await settle()
    resumed = bench.ask("resumed", lora_name="sql", resumption=Resumption(token_ids=[5]))
    await settle()
    bench.by_name["d"].set_load(load(1))
    bench.dispatch()
    await settle()
    assert requests_at(bench, "d") == ["resumed"]
    await leave(*new, resumed)


async def test_a_flood_for_an_adapter_is_bounded_and_keeps_nobody_else_out() -> None:
    bench = some_with_it()
    bench.queue._max_tokens = 8
    flood = [bench.ask(f"a{i}", lora_name="sql", fairness_id="a") for i in range(12)]
    await settle()
    assert [each.task.done() for each in flood] == [False] * 4 + [True] * 8, "8 tokens, two each"
    with pytest.raises(Overloaded, match="the queue is full: 8 tokens wait, of at most 8"):
        await flood[-1].task
    others = [bench.ask("b", lora_name="sql", fairness_id="b")]
    others += [bench.ask(f"m{i}", fairness_id="c") for i in range(4)]
    await settle()
    assert [each.task.done() for each in others] == [False] * 5
    await leave(*flood, *others)
    assert (len(bench.queue), bench.queue.num_tokens) == (0, 0)


async def test_a_deadline_is_held_against_the_workers_that_have_the_adapter() -> None:
    """Workers without the adapter have nothing to do. If they counted, the router would accept a request that must be
    late."""
    bench = Several("e")
    bench.tell_adapters(bench.decode, sql="1")
    busy = load(0)
    busy.num_waiting_tokens = 5000
    bench.decode.set_load(busy)
    assert bench.pool.num_tokens_to_compute(100) == 100
    assert bench.pool.num_tokens_to_compute(100, "sql") == 5100
    flood = [bench.ask(f"a{i}", lora_name="sql") for i in range(3)]
    await settle()
    assert bench.queue.num_tokens_before(0) == 0
    assert bench.queue.num_tokens_before(0, lora_name="sql") == 6
    await leave(*flood)


@pytest.mark.parametrize("seed", range(15))
async def test_whatever_adapters_workers_come_to_have_nobody_waits_for_nothing(seed: int) -> None:
    chance = random.Random(seed)
    bench = Several("e", "f", worker_wait_s=0.0)
    asked: list[Asked] = []

    def tell(name: str) -> None:
        has = {adapter: chance.choice("12") for adapter in ("sql", "poet") if chance.random() < 0.6}
        bench.tell_adapters(bench.by_name[name], **has)

    for number in range(120):
        name = chance.choice("def")
        match chance.choice(("ask", "ask", "ask", "tell", "free", "fill", "leave")):
            case "ask":
                asked.append(
                    bench.ask(
                        str(number),
                        lora_name=chance.choice(("", "sql", "poet")),
                        prompt_token_ids=chance.choice((SHORT, PROMPT)),
                        fairness_id=chance.choice("ab"),
                        priority=chance.randrange(2),
                    )
                )
            case "tell":
                tell(name)
            case "free":
                bench.by_name[name].set_load(load(chance.choice((4, 60, 100, 500))))
            case "fill":
                bench.fill(name)
            case "leave" if asked:
                await chance.choice(asked).leave()
        bench.dispatch()
        await settle()
        queue = bench.queue
        waiting = list(queue._aside) + ([first] if (first := queue._first()) is not None else [])
        for request in waiting:
            assert bench.pool.has_decode_worker_for(request)
        for lane in queue._aside.lanes:
            assert bench.pool.has_fewer_workers(queue._aside.any_of(lane))
    for handle in bench.by_name.values():
        handle.set_load(load(10**6))
    bench.dispatch()
    await settle()
    assert len(bench.queue) == 0, "each has a worker, or has heard that there is none"
    errors = [each.task.exception() for each in asked if each.task.done() and not each.task.cancelled()]
    assert all(isinstance(error, NoWorker) for error in errors)
    for each in asked:
        if not each.task.done():
            await each.leave()
    assert (bench.queue.num_tokens, bench.queue.num_clients, bench.pool.rooms) == (0, 0, set())
