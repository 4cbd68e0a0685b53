"""One request in the router: which room it takes, what it measures, and when it lets the next request through. No
network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from lifecycle_bench import BLOCK, LENGTH, METRICS, PROMPT, Asked, Bench, load, settle

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.request_events import WorkerKey
from router.request_state import AttemptNumbers
from router.served_kind import Kind
from router.servicer import _until_deadline
from router.validation.resumption import Resumption
from rpc.errors import DeadlinePassed, InvalidRequest, NoWorker


async def test_who_leaves_before_the_worker_answered_lets_the_next_one_through() -> None:
    bench = Bench()
    first = bench.request("first")
    await settle()
    second = bench.request("second")
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["first"]
    await first.leave()  # the worker may never have begun it: its load does not change, and it says nothing
    await settle()
    assert bench.d.sent[-1].generate.request_id == "second"
    await second.leave()
    assert bench.decode.num_planned_blocks == 0


async def test_who_leaves_before_it_heard_of_its_plan_lets_the_next_one_through() -> None:
    bench = Bench()
    bench.decode.is_full = True
    first, second = bench.request("first"), bench.request("second")
    await settle()
    bench.decode.set_load(load(50))
    bench.decode.set_load(load(100))
    bench.dispatch()  # plans the first request
    await first.leave()
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["second"]
    await second.leave()


async def test_an_answer_lets_the_next_one_through() -> None:
    bench = Bench(with_prefill=True)
    first, second = bench.request("first"), bench.request("second")
    await settle()
    assert [command.reserve.request_id for command in bench.d.sent] == ["first"]
    bench.decode.set_load(load(100, num_running=20))  # the first prompt was all cached: it took no blocks
    bench.d.say("first", 1, granted=Grant(grant_id=1))
    await settle()
    assert [command.reserve.request_id for command in bench.d.sent] == ["first", "second"]
    assert bench.prefill.num_prefill_tokens == 2 * len(PROMPT)
    await first.leave()
    await second.leave()
    assert (bench.decode.num_planned_blocks, bench.prefill.num_prefill_tokens) == (0, 0)


async def test_a_first_token_lets_the_next_one_through() -> None:
    bench = Bench()
    first, second = bench.request("first"), bench.request("second")
    await settle()
    bench.decode.set_load(load(100, num_running=20))
    bench.d.say("first", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["first", "second"]
    await first.leave()
    await second.leave()


async def test_further_answers_wait_their_turn_and_take_no_memory_where_the_prompt_is() -> None:
    """The others count the first one's prompt as cached even if no index says so, but only once it is at the decode
    worker. An error of one answer ends them all."""
    bench = Bench(with_prefill=True)
    asked = bench.requests("r", 3)
    await settle()
    later = bench.request("later")
    bench.decode.set_load(load(30, num_running=1))
    bench.d.say("0_r", 1, granted=Grant(grant_id=1))
    await settle()
    bench.p.say("0_r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.p.say("0_r", 1, handed_over=pb.HandedOver())
    await settle()
    assert len(bench.queue) == 1, "only the later one: the first token does not say that the decode worker has the KV"
    bench.d.say("0_r", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    await settle()
    cached = [request.num_cached_blocks for request in bench.queue._shares[0].enter("").waiting]
    assert cached == [{}, {bench.decode.key: 59}, {bench.decode.key: 59}]
    assert bench.queue.num_tokens == len(PROMPT) + 2 * BLOCK, "what they share is not counted"
    await later.leave()  # there is no room for its prompt
    await settle()
    assert [command.WhichOneof("command") for command in bench.d.sent] == ["reserve", "generate", "generate"]
    assert bench.decode.num_planned_blocks == 2
    other = bench.d.sent[-1].generate
    assert other.request_id in ("1_r", "2_r")
    bench.d.say(other.request_id, other.attempt, failed=pb.Failed(code=3, message="wrong", can_retry=False))
    await asyncio.wait([asked.task])
    assert isinstance(asked.task.exception(), InvalidRequest)
    assert {command.cancel.request_id for command in bench.d.sent if command.HasField("cancel")} >= {"0_r"}
    assert (bench.decode.num_planned_blocks, bench.prefill.num_prefill_tokens, len(bench.queue)) == (0, 0, 0)


async def test_further_answers_begin_with_the_first_token_of_who_prefills_and_answers() -> None:
    """The second token may arrive much later (`--stream-interval`), so they do not wait for it."""
    bench = Bench()
    asked = bench.requests("r", 2)
    await settle()
    bench.decode.set_load(load(30, num_running=1))
    bench.d.say("0_r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["0_r", "1_r"]
    await asked.leave()


async def test_the_priority_that_a_request_gives_is_its_place_in_the_queue() -> None:
    bench = Bench()
    bench.decode.set_load(load(0))
    asked = []
    for name, priority in (("later", 0), ("last", 2), ("first", -2)):
        lifecycle = bench.lifecycle(name)
        lifecycle._asked.sampling_params.priority = priority
        asked.append(Asked(lifecycle.run()))
        await settle()
    assert bench.queue._priorities == [-2, 0, 2]
    bench.decode.set_load(load(60))
    bench.dispatch()
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["first"]
    assert not bench.d.sent[0].generate.sampling_params.HasField("priority"), "turns are the router's business"
    for each in asked:
        await each.leave()


async def test_a_client_is_charged_for_what_is_computed_and_for_each_token_of_the_answer() -> None:
    """And workers are not told which client sent the request."""
    bench = Bench(with_prefill=True)
    share = bench.queue.enter(0, "whose it is")
    asked = Asked(bench.lifecycle("r", fairness_id="whose it is").run())
    await settle()
    assert share.counter == len(PROMPT)
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    bench.decode.set_load(load(100, num_running=1))
    bench.decode.set_load(load(100))  # the worker has freed blocks
    bench.dispatch()
    await settle()
    bench.d.say("r", 2, granted=Grant(grant_id=1))
    await settle()
    bench.p.say("r", 2, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert (share.counter, share.num_open) == (len(PROMPT) + 2, 2), "for its prompt once, though it was planned twice"
    bench.p.say("r", 2, handed_over=pb.HandedOver())
    bench.d.say("r", 2, tokens=pb.Tokens(index=1, token_ids=[6, 7, 8]))
    await settle()
    assert share.counter == len(PROMPT) + 2 * 4
    assert not any(b"whose" in command.SerializeToString() for command in bench.d.sent + bench.p.sent)
    await asked.leave()
    assert share.num_open == 1
    bench.queue.leave(share)
    assert bench.queue.num_clients == 0


async def test_a_worker_is_asked_for_as_many_sequences_as_it_takes_and_others_wait_in_fair_order() -> None:
    """If the router planned more there, the worker would refuse them, and they would then go before all later
    requests."""
    bench = Bench()
    told = load(600)

    async def planned(num_free_seqs: int) -> list[str]:
        told.num_free_seqs = num_free_seqs
        bench.decode.set_load(told)
        bench.dispatch()
        await settle()
        return [command.generate.request_id for command in bench.d.sent]

    assert await planned(1) == []
    asked = [Asked(bench.lifecycle(name, fairness_id=name[0]).run()) for name in ("a-0", "a-1", "a-2", "b")]
    await settle()
    assert await planned(1) == ["a-0"], "it is counted before the worker tells"
    bench.d.say("a-0", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    assert await planned(0) == ["a-0"]
    assert await planned(1) == ["a-0", "b"]
    assert await planned(2) == ["a-0", "b", "a-1"]
    for each in asked:
        await each.leave()
    assert bench.decode.num_planned_seqs == 0


async def test_a_prompt_that_is_cached_costs_its_client_what_is_left_of_it() -> None:
    bench = Bench()

    async def longest_match(token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        return {bench.decode.key: 50}

    bench.cluster.prefixes.longest_match = longest_match  # type: ignore[method-assign]
    share = bench.queue.enter(0, "a")
    asked = Asked(bench.lifecycle("r", fairness_id="a").run())
    await settle()
    assert share.counter == 10 * BLOCK
    await asked.leave()


async def test_a_refusal_that_was_overtaken_by_the_last_freeing_is_asked_again() -> None:
    bench = Bench()
    bench.decode.set_load(load(70, num_running=1))
    asked = bench.request("r")
    await settle()
    bench.decode.set_load(load(100))  # arrives with the refusal or before it; nothing more will be freed
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    assert [command.generate.attempt for command in bench.d.sent] == [1, 2]
    await asked.leave()


async def test_a_prefill_worker_that_refused_to_keep_a_request_in_a_burst_is_not_asked_again() -> None:
    """It frees something with each prompt that it has computed for another worker, which makes no room to decode."""
    bench = Bench(with_prefill=True)
    bench.tell(bench.prefill, can_generate=True)

    def told(num_free: int, **fields: int) -> pb.WorkerLoad:
        blocks = pb.BlockLedger(num_blocks=1000, num_free=num_free, num_sequence=1000 - num_free)
        return pb.WorkerLoad(blocks=blocks, **fields)

    bench.hear_load(bench.decode, told(500, num_running=20))
    bench.hear_load(bench.prefill, told(900, num_waiting_tokens=2000))
    asked = bench.request("r")
    await settle()
    assert [command.generate.attempt for command in bench.p.sent] == [1]
    bench.hear_load(bench.prefill, told(910, num_waiting_tokens=2000))
    bench.p.say("r", 1, busy=pb.Busy())
    await settle()
    assert len(bench.p.sent) == 1
    assert [command.WhichOneof("command") for command in bench.d.sent] == ["reserve"]
    await asked.leave()


async def test_a_refusal_is_not_asked_again_before_something_was_freed() -> None:
    bench = Bench()
    bench.decode.set_load(load(70, num_running=2))
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, busy=pb.Busy())
    for num_free, num_running in ((70, 2), (69, 2), (68, 3)):
        bench.decode.set_load(load(num_free, num_running=num_running))
        bench.dispatch()
        await settle()
        assert len(bench.d.sent) == 1
    bench.decode.set_load(load(67, num_running=2))
    bench.dispatch()
    await settle()
    assert len(bench.d.sent) == 2
    await asked.leave()


async def test_a_refusal_is_asked_again_after_a_while_though_nothing_was_seen_to_be_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load never shows what another router's request took and gave back within one step."""
    monkeypatch.setattr("router.worker_handle.ASK_AGAIN_S", 0.02)
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    bench.hear_load(bench.decode, load(100))
    assert len(bench.d.sent) == 1
    await asyncio.sleep(0.03)
    bench.hear_load(bench.decode, load(100))
    await settle()
    assert len(bench.d.sent) == 2
    await asked.leave()


async def test_the_time_after_a_refusal_is_waiting_and_no_attempt_has_failed() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    await asyncio.sleep(0.1)
    bench.decode.set_load(load(99))
    bench.decode.set_load(load(100))
    bench.dispatch()
    await settle()
    bench.d.say("r", 2, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH))
    await asked.task
    timings = asked.received[-1].timings
    assert timings.attempts == 1
    assert timings.queue_ms > 90
    total_ms = timings.queue_ms + timings.prefill_ms + timings.transfer_ms + timings.decode_ms
    assert total_ms == pytest.approx(timings.total_ms)


async def test_tokens_that_overtake_the_first_one_do_not_stop_its_clock() -> None:
    bench = Bench(with_prefill=True)
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, granted=Grant(grant_id=1))
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=1, token_ids=[6], finish_reason=LENGTH))
    await settle()
    assert bench.prefill.num_prefill_tokens == len(PROMPT)
    await asyncio.sleep(0.05)
    bench.p.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.p.say("r", 1, handed_over=pb.HandedOver())
    await asked.task
    assert [list(response.token_ids) for response in asked.received] == [[5], [6], []]
    assert asked.received[-1].timings.time_to_first_token_ms > 45


async def test_after_the_only_prefill_worker_failed_the_decode_worker_does_it_all() -> None:
    bench = Bench(with_prefill=True)
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, granted=Grant(grant_id=1))
    await settle()
    bench.p.say("r", 1, failed=pb.Failed(code=14, message="leaving", can_retry=True))
    await settle()
    assert bench.d.sent[-1].generate.attempt == 2
    await asked.leave()


async def test_what_a_worker_took_that_failed_is_not_held_against_the_next() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    await asyncio.sleep(0.3)
    bench.d.say("r", 1, failed=pb.Failed(code=14, message="broken", can_retry=True))
    await settle()
    bench.d.say("r", bench.d.sent[-1].generate.attempt, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH))
    await asked.task
    assert asked.received[-1].timings.time_to_first_token_ms >= 300
    assert bench.pool.costs.prompt_s(bench.decode.key, len(PROMPT), asyncio.get_running_loop().time()) < 0.3


@pytest.mark.parametrize("num_cached", [0, 59 * BLOCK])
async def test_what_was_not_in_the_cache_after_all_has_been_computed(num_cached: int) -> None:
    """Otherwise the router would take a whole prompt's time for that of a few tokens, and the worker for a slow one."""
    bench = Bench()
    bench.cluster.prefixes.longest_match = all_cached(bench)  # type: ignore[method-assign]
    asked = bench.request("r")
    await settle()
    await asyncio.sleep(0.05)
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH, num_cached_tokens=num_cached))
    await asked.task
    expected_s = bench.pool.costs.prompt_s(bench.decode.key, len(PROMPT), bench.now_s)
    assert (expected_s < 0.5) == (num_cached == 0)


async def test_what_was_in_the_cache_and_nobody_knew_has_not_been_computed() -> None:
    """Without Redis the router does not know what is cached. It must not take the time of a few tokens for a whole
    prompt's."""
    bench = Bench()
    asked = bench.request("r")
    await settle()
    await asyncio.sleep(0.05)
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH, num_cached_tokens=59 * BLOCK))
    await asked.task
    assert bench.pool.costs.prompt_s(bench.decode.key, len(PROMPT), bench.now_s) > 0.5


def all_cached(bench: Bench) -> Any:
    async def longest_match(token_ids: list[int], cache_salt: str, lora_digest: str = "") -> dict[WorkerKey, int]:
        return {bench.decode.key: 59}

    return longest_match


async def test_a_lost_session_of_the_only_decode_worker_is_waited_for() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.lose_decode_session(num_lost=1)
    await settle()
    assert not asked.task.done()
    session = bench.reopen_decode_session()
    bench.dispatch()
    await settle()
    assert session.sent[-1].generate.attempt == 2
    await asked.leave()


async def test_a_decode_worker_that_stays_away_is_not_waited_for() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.lose_decode_session(num_lost=5)
    with pytest.raises(NoWorker, match=r"worker d was lost; no decode worker is available") as caught:
        await asked.task
    assert caught.value.retry_after_s is not None


async def test_the_log_says_why_an_attempt_failed(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, failed=pb.Failed(code=8, message="out of cups", can_retry=True))
    await settle()
    (record,) = [record for record in caplog.records if record.message.startswith("attempt failed")]
    told = record.__dict__
    assert (told["request_id"], told["num_failures"], told["why"]) == ("r", 1, "worker d: out of cups")
    await asked.leave()


async def test_streams_that_move_and_streams_that_come_from_another_router_are_counted() -> None:
    """A resumed stream adds no time to first token: its client had that token before."""

    def counted() -> list[float]:
        names = ("retries_total", "migrations_total", "resumptions_total", "time_to_first_token_seconds_count")
        return [METRICS.registry.get_sample_value(f"tandem:{name}", {"model_name": "m"}) or 0 for name in names]

    bench = Bench()
    bench.tell(bench.decode, compat_digest="a kind")
    before = counted()
    resumption = Resumption(token_ids=[5], kind=Kind("a kind"))
    answers = [bench.lifecycle("r"), bench.lifecycle("resumed", prompt_token_ids=[1], resumption=resumption)]
    new, resumed = (Asked(answer.run()) for answer in answers)
    await settle()
    failed = pb.Failed(code=14, message="broken", can_retry=True)
    bench.d.say("r", 1, failed=failed)
    await settle()
    bench.d.say("r", 2, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.d.say("r", 2, failed=failed)
    bench.d.say("resumed", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    await settle()
    assert [after - count for after, count in zip(counted(), before, strict=True)] == [2, 1, 1, 1]
    await new.leave()
    await resumed.leave()


async def test_what_runs_is_counted_until_its_end() -> None:
    bench = Bench()
    forecast = bench.cluster.forecast
    asked = bench.request("first", deadline_s=asyncio.get_running_loop().time() + 60)
    await settle()
    assert (forecast.num_running, forecast.num_answering) == (1, 0)
    bench.d.say("first", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert (forecast.num_running, forecast.num_answering) == (1, 1)
    bench.d.say("first", 1, tokens=pb.Tokens(index=1, token_ids=[6], finish_reason=LENGTH))
    await asked.task
    assert (forecast.num_running, forecast.num_answering) == (0, 0)
    assert forecast.answer_s(0, 100) > 0


async def test_an_id_that_comes_again_hears_nothing_of_the_request_that_had_it() -> None:
    """The first token of the first request is still on its way when its client leaves and sends another one with the
    same id."""
    bench, numbers = Bench(), AttemptNumbers()
    first = bench.request("same", numbers=numbers)
    await settle()
    late = bench.d.sent[-1].generate.attempt
    await first.leave()
    second = bench.request("same", numbers=numbers)
    await settle()
    bench.d.say("same", late, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH))
    await settle()
    assert not second.task.done()
    assert not second.received
    own = bench.d.sent[-1].generate.attempt
    bench.d.say("same", own, tokens=pb.Tokens(index=0, token_ids=[6], finish_reason=LENGTH))
    await second.task
    assert list(second.received[0].token_ids) == [6]


async def test_a_deadline_that_passes_ends_the_answer_and_closes_it() -> None:
    """The router keeps the deadline itself: the client's clock and gRPC's server may be late."""
    is_closed = asyncio.Event()

    async def answer() -> AsyncGenerator[inference_pb.GenerateResponse, None]:
        try:
            yield inference_pb.GenerateResponse(token_ids=[1])
            await asyncio.Event().wait()
        finally:
            is_closed.set()

    responses = _until_deadline(answer(), 0.05)
    assert list((await anext(responses)).token_ids) == [1]
    with pytest.raises(DeadlinePassed):
        await anext(responses)
    assert is_closed.is_set()


async def test_tokens_of_a_prompt_that_was_not_sent_cost_an_attempt_and_no_more() -> None:
    bench = Bench(with_prefill=True)
    asked = bench.request("r")
    await settle()
    bench.p.attach("r", bench.d.inboxes["r"])
    bench.p.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert not asked.task.done(), asked.task.exception()
    await asked.leave()
