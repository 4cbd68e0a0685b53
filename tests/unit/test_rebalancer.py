"""A stream moves while it runs: what its workers are told, and what becomes of it. No network."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lifecycle_bench import BLOCK, METRICS, Asked, Bench, NothingCached, load, settle

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.lifecycle import Lifecycle
from router.moves import LOOK_S
from router.outcome import Outcome
from router.policy import PolicyConfig
from router.rebalancer import Rebalancer
from router.request_events import WorkerKey
from router.request_spans import request_spans

LENGTH = inference_pb.FINISH_REASON_LENGTH
PROMPT = list(range(4 * BLOCK))


class Crowded(Bench):
    """The decode worker has so many streams that any would come sooner at the prefill worker. It computes the
    prompts."""

    def __init__(self, prefixes: Any = None) -> None:
        super().__init__(with_prefill=True, prefixes=prefixes)
        self.prefill.record.can_generate = True
        self.tell(self.prefill)
        self.prefill.set_load(load(0))  # while it has no room, the decode worker computes the prompts
        self.decode.set_load(load(100))
        paces = self.pool.costs.paces
        for second, num_blocks in enumerate((0, 100) * 10):
            paces.decoded(self.decode.key, 100, 1.0 + 0.1 * num_blocks, num_blocks, self.now_s - 20 + second)
        for _ in range(20):
            paces.answered(500)
        self.lifecycles: dict[str, Lifecycle] = {}

    async def stream(self, name: str, *, n: int = 1) -> Asked:
        """A request that has its first token."""
        lifecycle = self.lifecycles[name] = self.lifecycle(name, prompt_token_ids=PROMPT)
        lifecycle._asked.sampling_params.max_tokens = 1000
        asked = Asked(lifecycle.run())
        await settle()
        if self.d.sent[-1].WhichOneof("command") == "reserve":
            self.d.say(name, 1, granted=Grant(grant_id=1))
            await settle()
            self.p.say(name, 1, tokens=pb.Tokens(index=0, token_ids=[5]))
            self.p.say(name, 1, handed_over=pb.HandedOver())
        else:
            self.d.say(name, 1, tokens=pb.Tokens(index=0, token_ids=[5]))
        await settle()
        return asked

    async def crowd(self) -> None:
        """From now on the decode worker has 80 blocks in use, and the prefill worker none."""
        self.decode.set_load(load(20, num_running=10))
        self.prefill.set_load(load(100))
        self.now_s += 2 * LOOK_S

    async def say_token(self, name: str, attempt: int, index: int, token_id: int) -> None:
        self.now_s += 2 * LOOK_S
        self.d.say(name, attempt, tokens=pb.Tokens(index=index, token_ids=[token_id]))
        await settle()


def token_ids(asked: Asked) -> list[int]:
    return [token_id for response in asked.received for token_id in response.token_ids]


def num_moves() -> float:
    return METRICS.registry.get_sample_value("tandem:rebalances_total", {"model_name": "m"}) or 0.0


async def test_it_goes_on_where_its_tokens_come_sooner() -> None:
    bench, before = Crowded(), num_moves()
    asked = await bench.stream("r")
    assert bench.p.sent[-1].WhichOneof("command") == "prefill", "the prefill worker has computed its prompt"
    await bench.crowd()
    await bench.say_token("r", 1, 1, 6)
    assert bench.d.sent[-1].cancel.request_id == "r"
    generate = bench.p.sent[-1].generate
    assert (generate.request_id, list(generate.prompt_token_ids)) == ("r", PROMPT)
    assert list(generate.output_token_ids) == [5, 6]
    assert num_moves() == before + 1
    assert not bench.d.inboxes, "whatever it still says is not heard"
    bench.p.say("r", generate.attempt, tokens=pb.Tokens(index=2, token_ids=[7]))
    bench.p.say("r", generate.attempt, tokens=pb.Tokens(index=3, token_ids=[8], finish_reason=LENGTH))
    await asked.task
    assert token_ids(asked) == [5, 6, 7, 8]
    last = asked.received[-1]
    assert (last.timings.decode_worker, last.timings.mode) == ("p", inference_pb.MODE_STAY)
    assert (last.timings.attempts, last.timings.moves) == (1, 1), "nothing has failed"
    spans = [each for each in request_spans(0, {0: bench.lifecycles["r"].account.attempts}) if each.name == "attempt"]
    assert [each.attributes.get("tandem.moved_to") for each in spans] == ["p", None]
    assert not any(each.error for each in spans)
    assert len(bench.rebalancer) == 0
    assert not bench.pool.rooms
    assert bench.cluster.budget.num_tokens == type(bench.cluster.budget)().num_tokens, "no retry was paid for"


async def test_a_stream_that_loses_its_worker_does_not_move_from_there_any_more() -> None:
    bench = Crowded()
    asked = await bench.stream("r")
    await bench.say_token("r", 1, 1, 6)
    assert len(bench.rebalancer) == 1
    bench.lose_decode_session(num_lost=1)
    await settle()
    assert len(bench.rebalancer) == 0
    assert not bench.rebalancer._streams, "workers come and go for years"
    await asked.leave()


@pytest.mark.parametrize("keeps_no_prefixes", [False, True])
async def test_a_worker_that_keeps_no_prefixes_computes_all_of_it_again(keeps_no_prefixes: bool) -> None:
    bench = Crowded()
    bench.prefill.record.keeps_no_prefixes = keeps_no_prefixes
    await bench.stream("r")
    stream = bench.lifecycles["r"]._stream
    assert stream is not None
    assert stream.num_tokens_again(bench.prefill.key) == 1 + keeps_no_prefixes * len(PROMPT)
    assert stream.num_tokens_again(bench.decode.key) == 1 + len(PROMPT)


async def test_the_log_tells_of_moves_though_the_client_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Crowded()
    asked = await bench.stream("r")
    await bench.crowd()
    await bench.say_token("r", 1, 1, 6)
    assert bench.p.sent[-1].WhichOneof("command") == "generate"
    await asked.leave()
    sampling_params = inference_pb.SamplingParams()
    request: Any = SimpleNamespace(
        request_id="r", lora_name="", fairness_id="", sampling_params=sampling_params, open_sequences=(0,)
    )
    Outcome(request, arrived_s=0.0).log({0: bench.lifecycles["r"].account.attempts})
    facts = vars(caplog.records[-1])
    assert (facts["message"], facts["decode_worker"]) == ("cancelled", "p")
    assert (facts["attempts"], facts["moves"]) == (1, 1), "nothing has failed"


async def test_it_moves_once() -> None:
    bench = Crowded()
    asked = await bench.stream("r")
    await bench.crowd()
    await bench.say_token("r", 1, 1, 6)
    attempt = bench.p.sent[-1].generate.attempt
    # Else what this machine has just taken for both decides whether the prompt is computed there and moved.
    bench.pool.costs.handed_over(len(PROMPT), 60.0, bench.now_s)
    bench.p.say("r", attempt, busy=pb.Busy())
    await settle()
    again = bench.d.sent[-1].generate
    assert (list(again.output_token_ids), again.attempt) == ([5, 6], attempt + 1)
    bench.prefill.set_load(load(90))
    bench.prefill.set_load(load(100))  # it has freed something, and may be asked again
    for index in range(2, 5):
        await bench.say_token("r", again.attempt, index, index)
    assert bench.p.sent[-1].WhichOneof("command") == "generate"
    assert bench.p.sent[-1].generate.attempt == attempt, "nothing came after it"
    assert not asked.task.done()
    await asked.leave()


async def test_one_moves_at_a_time() -> None:
    bench = Crowded()
    streams = [await bench.stream(name) for name in ("a", "b", "c")]
    await bench.crowd()
    bench.d.say("a", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    bench.d.say("b", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    bench.d.say("c", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    await settle()
    moved = [command.generate.request_id for command in bench.p.sent if command.WhichOneof("command") == "generate"]
    assert len(moved) == 1
    other = "b" if moved == ["a"] else "a"
    await bench.say_token(other, 1, 2, 7)
    assert bench.p.sent[-1].generate.request_id == moved[0], "its prompt is not computed yet"
    for asked in streams:
        await asked.leave()
    assert len(bench.rebalancer) == 0
    assert not bench.pool.rooms


@pytest.mark.parametrize(
    "why",
    ["requests wait", "it has prompts", "it is ejected", "of another kind", "a shorter context", "only prompts", "off"],
)
async def test_it_stays(why: str) -> None:
    bench = Crowded()
    if why == "off":
        rebalancer = Rebalancer(PolicyConfig(rebalance=False), bench.pool, bench.queue, now_s=lambda: bench.now_s)
        object.__setattr__(bench.cluster, "rebalancer", rebalancer)
    asked = await bench.stream("r")
    waiting = []
    await bench.crowd()
    match why:
        case "requests wait":
            bench.decode.set_load(load(1, num_running=10))
            bench.prefill.set_load(load(10))
            waiting.append(bench.request("other"))
            await settle()
            assert len(bench.queue) == 1
            bench.prefill.set_load(load(100))
        case "it has prompts":
            busy = load(100)
            busy.num_waiting_tokens = 100
            bench.prefill.set_load(busy)
        case "it is ejected":
            for _ in range(20):
                bench.pool._faults.count(bench.prefill.key)
            assert bench.pool.is_left_out(bench.prefill.key)
        case "of another kind":
            bench.tell(bench.prefill, compat_digest="another")
        case "a shorter context":
            bench.prefill.record.model.max_model_len = 1024
            bench.tell(bench.prefill)
        case "only prompts":
            bench.tell(bench.prefill, can_generate=False)
    num_sent = len(bench.p.sent)
    await bench.say_token("r", 1, 1, 6)
    await bench.say_token("r", 1, 2, 7)
    assert len(bench.p.sent) == num_sent
    assert token_ids(asked) == [5, 6, 7]
    for each in (asked, *waiting):
        await each.leave()


@pytest.mark.parametrize(
    ("num_free", "num_running", "num_free_seqs", "moves"),
    [(100, 0, 1, True), (80, 1, None, True), (79, 1, None, False), (100, 3, 5, True), (100, 4, 4, False)],
)
async def test_no_worker_is_asked_that_would_say_busy(
    num_free: int, num_running: int, num_free_seqs: int | None, moves: bool
) -> None:
    """A prefill worker counts each stream with twice its tokens, and keeps half of its pool and of its sequences for
    prompts (`prefill_service.prefill`). A stream that it refuses is computed again for nothing, where it was."""
    bench = Crowded()
    asked = await bench.stream("r")
    await bench.crowd()
    theirs = load(num_free, num_running=num_running)
    if num_free_seqs is not None:
        theirs.num_free_seqs = num_free_seqs
    bench.prefill.set_load(theirs)
    await bench.say_token("r", 1, 1, 6)
    assert (bench.p.sent[-1].WhichOneof("command") == "generate") == moves, "its 66 tokens take 5 blocks"
    await asked.leave()


async def test_it_does_not_go_to_a_worker_that_has_failed_it() -> None:
    bench = Crowded()
    asked = Asked(bench.lifecycle("q", prompt_token_ids=PROMPT).run())
    await settle()
    bench.d.say("q", 1, granted=Grant(grant_id=2))
    await settle()
    bench.p.say("q", 1, failed=pb.Failed(code=13, message="why", can_retry=True))
    await settle()
    assert bench.d.sent[-1].generate.attempt == 2, "the decode worker computes its prompt"
    bench.d.say("q", 2, tokens=pb.Tokens(index=0, token_ids=[5]))
    await bench.crowd()
    num_sent = len(bench.p.sent)
    await bench.say_token("q", 2, 1, 6)
    assert len(bench.p.sent) == num_sent
    await asked.leave()


async def test_tokens_that_wait_for_a_slow_client_are_not_computed_again() -> None:
    """It was to move while its client read nothing. Then its worker gave more tokens: it would gain nothing by a
    move."""
    bench = Crowded()
    lifecycle = bench.lifecycle("slow", prompt_token_ids=PROMPT)
    lifecycle._asked.sampling_params.max_tokens = 1000
    slow = lifecycle.run()
    first = asyncio.ensure_future(anext(slow))
    await settle()
    bench.d.say("slow", 1, granted=Grant(grant_id=1))
    await settle()
    bench.p.say("slow", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.p.say("slow", 1, handed_over=pb.HandedOver())
    bench.d.say("slow", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    received = [*(await first).token_ids, *(await anext(slow)).token_ids]
    assert received == [5, 6]
    other = await bench.stream("longer")
    for index in range(1, 40):
        bench.d.say("longer", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
    await settle()
    await bench.crowd()
    assert len(bench.rebalancer) == 2
    await bench.say_token("longer", 1, 40, 7)
    assert len(bench.rebalancer) == 1, "the slow one is to move"
    for index in range(2, 20):
        bench.d.say("slow", 1, tokens=pb.Tokens(index=index, token_ids=[7]))
    bench.now_s -= LOOK_S  # none is sought now
    async with asyncio.timeout(1.0):  # had it moved, the other worker would have to say something first
        received += (await anext(slow)).token_ids
    assert len(received) == 20
    assert bench.p.sent[-1].WhichOneof("command") == "prefill", "nothing has moved"
    assert len(bench.rebalancer) == 2, "it may move later"
    bench.now_s += 2 * LOOK_S
    bench.d.say("slow", 1, tokens=pb.Tokens(index=20, token_ids=[7], finish_reason=LENGTH))
    received += [token_id async for response in slow for token_id in response.token_ids]
    assert len(received) == 21
    await other.leave()
    assert len(bench.rebalancer) == 0
    assert not bench.pool.rooms


async def test_it_goes_on_although_its_worker_is_the_last_and_begins_to_drain() -> None:
    """It would have ended there. Now no decode worker is left, but the one that it moves to has room."""

    class Lookup(NothingCached):
        async def longest_match(self, token_ids: list[int], *args: str) -> dict[WorkerKey, int]:
            if token_ids != PROMPT:
                bench.hear_load(bench.decode, load(20, num_running=9, is_draining=True))
            return {}

    bench = Crowded(Lookup())
    asked = await bench.stream("r")
    await bench.crowd()
    await bench.say_token("r", 1, 1, 6)
    assert list(bench.p.sent[-1].generate.output_token_ids) == [5, 6]
    await asked.leave()


@pytest.mark.parametrize("how", ["fills up", "is of another kind"])
async def test_it_goes_back_where_the_other_worker_changes_before_it_has_gone_there(how: str) -> None:
    class Lookup(NothingCached):
        async def longest_match(self, token_ids: list[int], *args: str) -> dict[WorkerKey, int]:
            if token_ids != PROMPT and how == "fills up":
                bench.hear_load(bench.prefill, load(0))
            elif token_ids != PROMPT:
                bench.tell(bench.prefill, compat_digest="another")
            return {}

    bench = Crowded(Lookup())
    asked = await bench.stream("r")
    await bench.crowd()
    await bench.say_token("r", 1, 1, 6)
    command = bench.d.sent[-1]  # who computes the prompt depends on how long it took before
    again = command.reserve if command.WhichOneof("command") == "reserve" else command.generate
    assert (again.attempt, list(again.output_token_ids)) == (2, [5, 6])
    assert [command.WhichOneof("command") for command in bench.p.sent[1:]] == ["cancel"]
    await asked.leave()


async def test_it_goes_to_one_that_has_not_just_said_busy() -> None:
    bench = Crowded()
    other = bench.add("p2", pb.Role.ROLE_PREFILL, 2048)
    other.record.can_generate = True
    bench.tell(other)
    other.set_load(load(0))
    asked = await bench.stream("r")
    await bench.crowd()
    other.set_load(load(90))
    bench.prefill.note_busy(bench.prefill.num_frees)
    await bench.say_token("r", 1, 1, 6)
    assert other.session is not None
    assert other.session.sent[-1].generate.request_id == "r"  # type: ignore[attr-defined]
    await asked.leave()


async def test_it_goes_to_one_with_room_though_many_have_none() -> None:
    """Those have no KV in use and no prompts, but hardly any room for sequences."""
    bench = Crowded()
    for number in range(10):
        other = bench.add(f"p{number}", pb.Role.ROLE_PREFILL, 2048)
        other.record.can_generate = True
        bench.tell(other)
        other.set_load(load(0))
    asked = await bench.stream("r")
    await bench.crowd()
    for handle in bench.pool.usable(pb.Role.ROLE_PREFILL):
        theirs = load(100, num_running=4)
        theirs.num_free_seqs = 4
        handle.set_load(theirs)
    bench.prefill.set_load(load(90))
    await bench.say_token("r", 1, 1, 6)
    assert bench.p.sent[-1].WhichOneof("command") == "generate"
    await asked.leave()
