"""Which workers a request may go to: those that have what it needs, are of its kind, and take new requests. No
network."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from lifecycle_bench import METRICS, Asked, Bench, ScriptedSession, load, settle

from protos import tandem_worker_pb2 as pb
from router.served_kind import Kind
from router.validation.resumption import Resumption
from rpc.errors import NoWorker


async def test_a_worker_that_says_it_drains_gets_nothing_more_though_the_registry_is_silent() -> None:
    bench = Bench()
    bench.add("other", pb.Role.ROLE_DECODE, 2048)
    bench.decode.set_load(load(100, is_draining=True))
    asked = bench.request("r")
    await settle()
    assert bench.d.sent == []
    await asked.leave()


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_worker_that_is_lost_before_the_request_hears_of_its_plan_is_no_end_of_it(is_forgotten: bool) -> None:
    """Nothing else would tell the request: it has no inbox at that worker yet."""
    bench = Bench()
    bench.decode.is_full = True
    asked = bench.request("r")
    await settle()
    bench.decode.set_load(load(50))
    bench.decode.set_load(load(100))
    bench.queue.dispatch()
    bench.lose_decode_session(num_lost=1)
    if is_forgotten:
        del bench.pool.workers.handles[bench.decode.key]
    other = cast(ScriptedSession, bench.add("other", pb.Role.ROLE_DECODE, 2048).session)
    await settle()
    assert other.sent[-1].generate.attempt == 2
    await asked.leave()


async def test_a_prefill_worker_with_a_shorter_context_is_not_used() -> None:
    bench = Bench(with_prefill=True, prefill_max_model_len=1024)
    asked = bench.request("r")
    await settle()
    assert bench.p.sent == []
    assert bench.d.sent[-1].WhichOneof("command") == "generate"
    await asked.leave()


@pytest.mark.parametrize("other", ["the same", "another"])
async def test_an_answer_that_has_begun_goes_on_with_the_same_model_or_not_at_all(other: str) -> None:
    bench = Bench()
    bench.tell(bench.decode, compat_digest="the same")
    asked = bench.request("first")
    await settle()
    bench.d.say("first", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    second = bench.add("d2", pb.Role.ROLE_DECODE, 2048)
    bench.tell(second, compat_digest=other)
    bench.lose_decode_session(num_lost=99)
    await settle()
    sent = cast(ScriptedSession, second.session).sent
    if other == "the same":
        assert [list(command.generate.output_token_ids) for command in sent] == [[5]]
        await asked.leave()
    else:
        assert not sent
        assert not asked.task.done(), "one of its kind may be there again in a moment"
        await asked.leave()


async def test_an_answer_that_has_begun_waits_for_a_worker_of_its_kind_to_be_there_again() -> None:
    bench = Bench()
    [asked] = await begun_and_lost(bench, "first")
    with pytest.raises(NoWorker, match="no decode worker is available"):
        await bench.request("another").task
    assert not asked.task.done()
    again = bench.add("d", pb.Role.ROLE_DECODE, 2048, incarnation="2")
    bench.tell(again, compat_digest="a kind")
    bench.dispatch()
    await settle()
    sent = cast(ScriptedSession, again.session).sent
    assert [list(command.generate.output_token_ids) for command in sent] == [[5]]
    await asked.leave()


async def test_a_stream_of_another_router_does_not_wait_behind_what_its_client_has_asked_since() -> None:
    bench = Bench()
    num_resumed = METRICS.registry.get_sample_value("tandem:resumptions_total", {"model_name": "m"})
    assert num_resumed is not None
    bench.tell(bench.decode, compat_digest="a kind")
    bench.decode.set_load(load(0))
    new = bench.request("new")
    await settle()
    resumption = Resumption(token_ids=[5], kind=Kind("a kind"))
    resumed = Asked(bench.lifecycle("resumed", resumption=resumption).run())
    await settle()
    for num_blocks, sent in ((100, ["resumed"]), (200, ["resumed", "new"])):
        bench.decode.set_load(load(num_blocks))
        bench.dispatch()
        await settle()
        assert [command.generate.request_id for command in bench.d.sent] == sent
    await resumed.leave()
    await new.leave()
    after = METRICS.registry.get_sample_value("tandem:resumptions_total", {"model_name": "m"})
    assert after == num_resumed + 1


@pytest.mark.parametrize("worker_wait_s", [0.0, 0.05])
async def test_it_does_not_wait_for_ever(worker_wait_s: float) -> None:
    bench = Bench(worker_wait_s=worker_wait_s)
    [asked] = await begun_and_lost(bench, "first")
    with pytest.raises(NoWorker, match="worker d was lost; no decode worker of the kind that began this answer"):
        await asked.task
    assert len(bench.queue) == 0


async def test_the_time_without_a_worker_is_no_measure_of_how_fast_answers_are() -> None:
    """Otherwise the router would refuse new requests whose deadlines it can meet."""
    bench = Bench()
    forecast = bench.cluster.forecast
    first = await begun_and_lost(bench, "0", "1")
    assert (forecast.num_answering, forecast.num_running) == (0, 2)
    session = bench.reopen_decode_session()
    bench.decode.set_load(load(300))
    bench.dispatch()
    await settle()
    again = [command.generate for command in session.sent]
    session.say(again[0].request_id, again[0].attempt, tokens=pb.Tokens(index=1, token_ids=[6]))
    await settle()
    assert (forecast.num_answering, forecast.num_running) == (1, 2)
    for asked in first:
        await asked.leave()
    assert (forecast.num_answering, forecast.num_running) == (0, 0)


async def test_once_a_worker_is_there_it_waits_for_room_however_long() -> None:
    bench = Bench(worker_wait_s=0.5)
    [asked] = await begun_and_lost(bench, "first")
    full = bench.add("d", pb.Role.ROLE_DECODE, 2048, incarnation="2")
    bench.tell(full, compat_digest="a kind")
    full.set_load(load(0))
    bench.dispatch()
    await asyncio.sleep(0.6)  # longer than it would wait if there were no worker
    assert not asked.task.done(), "a worker is there, and has no room yet"
    await asked.leave()


async def test_all_that_a_lost_worker_had_wait_and_are_in_nobodys_way() -> None:
    bench = Bench(worker_wait_s=1.0)
    first = await begun_and_lost(bench, "0", "1", "2")
    other = bench.add("other", pb.Role.ROLE_DECODE, 2048)
    bench.tell(other, compat_digest="another kind")
    bench.dispatch()
    new = bench.request("new")
    await settle()
    sent = cast(ScriptedSession, other.session).sent
    assert [command.generate.request_id for command in sent] == ["new"]
    await new.leave()
    assert len(bench.queue) == 3
    for asked in first:
        with pytest.raises(NoWorker, match="of the kind that began this answer"):
            await asked.task
    assert len(bench.queue) == 0


async def test_further_answers_wait_with_the_first_though_they_have_not_begun() -> None:
    """They must not end for lack of a worker: the end of one answer ends them all."""
    bench = Bench()
    asked = bench.requests("r", 2)
    await settle()
    bench.decode.set_load(load(30, num_running=1))
    bench.d.say("0_r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert [command.generate.request_id for command in bench.d.sent] == ["0_r", "1_r"]
    bench.lose_decode_session(num_lost=99)
    await settle()
    assert not asked.task.done()
    bench.reopen_decode_session()
    bench.decode.set_load(load(200))
    bench.dispatch()
    await settle()
    again = {command.generate.request_id: list(command.generate.output_token_ids) for command in bench.d.sent}
    assert again == {"0_r": [5], "1_r": []}
    await asked.leave()


async def begun_and_lost(bench: Bench, *names: str) -> list[Asked]:
    """Requests that have each received a token, and whose only worker is then lost."""
    bench.tell(bench.decode, compat_digest="a kind")
    bench.decode.set_load(load(300))  # room for all
    all_asked = [bench.request(name) for name in names]
    await settle()
    for name in names:
        bench.d.say(name, 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    bench.lose_decode_session(num_lost=99)
    await settle()
    return all_asked


async def test_a_request_that_has_not_begun_may_go_to_any_model() -> None:
    bench = Bench()
    bench.tell(bench.decode, compat_digest="the same")
    asked = bench.request("first")
    await settle()
    second = bench.add("d2", pb.Role.ROLE_DECODE, 2048)
    bench.tell(second, compat_digest="another")
    bench.lose_decode_session(num_lost=99)
    await settle()
    assert len(cast(ScriptedSession, second.session).sent) == 1
    await asked.leave()


async def test_a_worker_is_not_connected_before_its_session_is_open() -> None:
    """`tandem up` waits for open sessions: otherwise the first request would be planned without this worker."""
    bench = Bench()
    found = bench.add("found", pb.Role.ROLE_PREFILL, 2048)
    assert bench.pool.not_connected == []
    cast(Any, found.session).is_open = False
    assert bench.pool.not_connected == ["found"]
    found.session = None
    assert bench.pool.not_connected == ["found"]
    bench.lose_decode_session(num_lost=1)
    assert bench.pool.not_connected == ["d", "found"]


async def test_of_a_worker_that_was_started_again_the_newer_is_connected_or_not() -> None:
    bench = Bench()
    newer = bench.add("d", pb.Role.ROLE_DECODE, 2048, incarnation="2")
    newer.session = None
    bench.take_away(bench.decode)  # gone from the registry; its session is open, and its requests go on
    assert bench.pool.not_connected == ["d"]


async def test_a_worker_that_the_registry_forgets_gets_nothing_new_from_then_on() -> None:
    bench = Bench()
    other = bench.add("other", pb.Role.ROLE_DECODE, 512)
    asked = bench.request("r")
    await settle()
    assert bench.pool.usable() == [bench.decode, other]
    bench.pool.set_records([other.record])
    assert (bench.pool.usable(), bench.pool.decode_records()) == ([other], [other.record])
    bench.pool.set_records([bench.decode.record, other.record])
    assert bench.pool.usable() == [bench.decode, other]
    await asked.leave()


async def test_nothing_is_learned_of_a_worker_that_is_forgotten() -> None:
    """What is learned after that would never be forgotten. Here the first token waits for a client that reads slowly,
    while the worker dies."""
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.lose_decode_session(num_lost=1)
    bench.pool.set_records([])
    assert bench.decode.is_forgotten
    await settle()
    assert [list(message.token_ids) for message in asked.received] == [[5]]
    assert not bench.pool.costs._by_worker
    await asked.leave()


async def test_new_requests_go_to_workers_of_one_kind() -> None:
    """Other weights would give other answers. The kind is that of most decode workers, also when these change."""
    bench = Bench()
    bench.tell(bench.decode, compat_digest="a")
    other, third = bench.add("other", pb.Role.ROLE_DECODE, 512), bench.add("third", pb.Role.ROLE_DECODE, 2048)
    bench.tell(other, compat_digest="b")
    bench.tell(third, compat_digest="a")
    for handle, num_free in ((bench.decode, 5000), (third, 5000), (other, 9000)):  # `other` would be the first choice
        handle.set_load(load(num_free))
    sessions = [cast(ScriptedSession, handle.session) for handle in (bench.decode, other, third)]
    asked = [bench.request(f"r{number}") for number in range(4)]
    await settle()
    assert [len(session.sent) > 0 for session in sessions] == [True, False, True]
    assert bench.pool.of_another_kind == ["other"]
    assert {record.model.max_model_len for record in bench.pool.decode_records()} == {2048}
    bench.take_away(third)
    asked.append(bench.request("one of each kind: as before"))
    await settle()
    assert not sessions[1].sent
    bench.take_away(bench.decode)
    asked.append(bench.request("only the other kind is left"))
    await settle()
    assert len(sessions[1].sent) == 1
    assert bench.pool.of_another_kind == ["d", "third"]
    for each in asked:
        await each.leave()


async def test_of_two_kinds_with_as_many_decode_workers_the_one_with_prefill_workers_is_served() -> None:
    """Otherwise a stray decode worker that took over while another was restarted would keep prefill workers idle."""
    bench = Bench(with_prefill=True)
    stray = bench.add("stray", pb.Role.ROLE_DECODE, 2048)
    for handle, digest in ((bench.prefill, "a"), (bench.decode, "a"), (stray, "b")):
        bench.tell(handle, compat_digest=digest)
    assert bench.pool.of_another_kind == ["stray"]
    bench.lose_decode_session(num_lost=99)
    assert bench.pool.of_another_kind == ["d", "p"], "the stray is the only decode worker"
    bench.reopen_decode_session()
    assert bench.pool.of_another_kind == ["stray"]
    bench.prefill.is_leaving = True
    bench.tell(bench.prefill)
    assert bench.pool.of_another_kind == ["stray"], "as many prefill workers, too: as before"
    bench.tell(bench.add("q", pb.Role.ROLE_PREFILL, 2048), compat_digest="b")
    assert bench.pool.of_another_kind == ["d", "p"], "one that leaves does not count"
    bench.tell(bench.add("third", pb.Role.ROLE_DECODE, 2048), compat_digest="a")
    assert bench.pool.of_another_kind == ["q", "stray"], "decode workers count before prefill workers"


async def test_workers_that_would_leave_out_a_grammar_do_not_get_it() -> None:
    """Older workers do not know the `grammar` field, and would answer without the grammar."""
    bench = Bench(with_prefill=True)
    with pytest.raises(NoWorker, match="no decode worker that takes structured_outputs is available"):
        await bench.request("a", grammar="g").task
    bench.tell(bench.decode, takes_grammars=True)
    asked = bench.request("b", grammar="g")
    await settle()
    [command] = bench.d.sent
    assert command.generate.grammar == "g", "prompt and answer: the prefill worker does not know"
    assert not command.generate.sampling_params.HasField("structured_outputs")
    await asked.leave()
    bench.tell(bench.prefill, takes_grammars=True)
    asked = bench.request("c", grammar="g")
    await settle()
    assert bench.d.sent[-1].reserve.grammar == "g"
    await asked.leave()


async def test_workers_that_would_share_prefixes_with_everybody_get_no_salted_requests() -> None:
    bench = Bench(with_prefill=True)
    with pytest.raises(NoWorker, match="no decode worker that takes cache_salt is available"):
        await bench.request("a", cache_salt="s").task
    bench.tell(bench.decode, takes_cache_salts=True)
    asked = bench.request("b", cache_salt="s")
    await settle()
    [command] = bench.d.sent
    assert command.generate.cache_salt == "s", "prompt and answer: the prefill worker would share its prefix"
    await asked.leave()
    bench.tell(bench.prefill, takes_cache_salts=True)
    asked = bench.request("c", cache_salt="s")
    await settle()
    assert bench.d.sent[-1].reserve.cache_salt == "s"
    await asked.leave()


async def test_workers_that_would_sample_any_token_get_no_requests_for_some() -> None:
    bench = Bench()
    with pytest.raises(NoWorker, match="no decode worker that takes allowed_token_ids is available"):
        await Asked(bench.lifecycle("a", allowed_token_ids=[5]).run()).task
    bench.tell(bench.decode, takes_allowed_token_ids=True)
    asked = Asked(bench.lifecycle("b", allowed_token_ids=[5]).run())
    await settle()
    assert bench.d.sent[-1].generate.sampling_params.allowed_token_ids == [5]
    await asked.leave()


async def test_workers_that_would_say_bad_words_get_no_requests_without() -> None:
    bench = Bench()
    with pytest.raises(NoWorker, match="no decode worker that takes bad_words is available"):
        await Asked(bench.lifecycle("a", bad_words=[(5, 6)]).run()).task
    bench.tell(bench.decode, takes_bad_words=True)
    asked = Asked(bench.lifecycle("b", bad_words=[(5, 6)]).run())
    await settle()
    assert [list(word.token_ids) for word in bench.d.sent[-1].generate.bad_words] == [[5, 6]]
    await asked.leave()


async def test_workers_that_would_think_for_ever_get_no_requests_with_a_budget() -> None:
    bench, budget = Bench(), pb.ThinkingBudget(num_tokens=3, end_token_id=7, has_begun=True)
    with pytest.raises(NoWorker, match="no decode worker that takes thinking_token_budget is available"):
        await Asked(bench.lifecycle("a", thinking_budget=budget).run()).task
    bench.tell(bench.decode, takes_thinking_budgets=True)
    asked = Asked(bench.lifecycle("b", thinking_budget=budget).run())
    await settle()
    assert bench.d.sent[-1].generate.thinking_budget == budget
    await asked.leave()
