"""What one request leaves behind in the router, in whatever way it ends. No network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import grammar_cases
import grpc
import pytest
from lifecycle_bench import LENGTH, Bench, ScriptedSession, load, settle

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.generation_defaults import GenerationDefaults
from router.model_info import ModelInfo
from router.open_requests import OpenRequests
from router.request_events import WorkerKey
from router.sequences import Sequences
from router.served_kind import Kind
from router.served_model import KEPT_S, ServedModel, Texts
from router.servicer import InferenceServicer
from router.text.tokenizer import Tokenizer
from router.validation.resumption import kind_name
from rpc.errors import Draining, InvalidRequest, NoWorker, TandemError


async def test_who_leaves_while_it_waits_is_not_taken_for_hours_of_waiting() -> None:
    bench = Bench()
    bench.decode.set_load(load(0))
    asked = bench.request("r")
    await settle()
    assert len(bench.queue) == 1
    await asked.leave()
    await settle()
    assert len(bench.queue) == 0
    pace, later_s = bench.queue.pace, time.monotonic() + 7200
    pace.queued(later_s)  # the next request begins to wait
    pace.planned(10, later_s + 0.01, has_waited=True, is_last=True)
    assert pace.queued_s(10) < 1, "what later ones are refused by"


async def test_the_room_of_a_failed_attempt_is_its_requests_until_that_is_in_the_queue_again() -> None:
    """If it leaves, the request that waits behind it gets the room at once, and not before."""
    bench = Bench()
    first, behind = bench.request("first"), bench.request("behind")
    await settle()
    assert (len(bench.d.sent), len(bench.queue)) == (1, 1), "there is room for one of them"
    is_looked_up = asyncio.Event()

    async def look_up(*_: Any) -> dict[WorkerKey, int]:
        await is_looked_up.wait()
        return {}

    bench.cluster.prefixes.longest_match = look_up  # type: ignore[method-assign]
    bench.d.say("first", 1, failed=pb.Failed(code=grpc.StatusCode.UNAVAILABLE.value[0], message="x", can_retry=True))
    await settle()
    bench.dispatch()
    assert len(bench.queue) == 1
    await first.leave()
    await settle()
    assert len(bench.queue) == 0
    await behind.leave()
    assert bench.pool.rooms == set()


async def test_what_comes_late_of_a_failed_attempt_does_not_give_back_the_room_of_the_next() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    num_blocks = bench.decode.num_planned_blocks
    bench.d.say("r", 1, failed=pb.Failed(code=grpc.StatusCode.UNAVAILABLE.value[0], message="x", can_retry=True))
    await settle()
    assert bench.d.sent[-1].generate.attempt == 2
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    assert bench.decode.num_planned_blocks == num_blocks > 0
    await asked.leave()
    assert bench.decode.num_planned_blocks == 0


async def test_an_answer_leaves_no_inbox_at_the_worker_that_had_no_room_for_it() -> None:
    """That worker would have a request for ever, and would be kept after it has left the registry."""
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    other = cast(ScriptedSession, bench.add("other", pb.Role.ROLE_DECODE, 2048).session)
    bench.dispatch()
    await settle()
    other.say("r", other.sent[-1].generate.attempt, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH))
    await asked.task
    assert (bench.d.names, other.names) == (set(), set())


async def test_who_is_aborted_while_it_is_prepared_ends_as_it_begins() -> None:
    bench, requests = Bench(), OpenRequests()
    requests.enter("r", ["r"])
    assert requests.abort("r")
    sequences = Sequences([bench.lifecycle("r")], is_streaming=True)
    requests.begin("r", sequences)
    async with asyncio.timeout(5):
        messages = [message async for message in sequences.run()]
    assert [message.finish_reason for message in messages] == [inference_pb.FINISH_REASON_ABORT]
    assert (bench.d.names, bench.pool.rooms, len(bench.queue)) == (set(), set(), 0)


class Context:
    """The context of an RPC whose client gives up after `remaining_s`; None: never."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self._remaining_s = remaining_s

    async def send_initial_metadata(self, _: object) -> None: ...

    def time_remaining(self) -> float | None:
        return self._remaining_s

    def invocation_metadata(self) -> None: ...


MODEL = ModelInfo(
    served_model_name="m",
    max_model_len=2048,
    vocab_size=100,
    eos_token_ids=frozenset(),
    has_chat_template=False,
    defaults=GenerationDefaults(),
)


def servicer_of(bench: Bench) -> InferenceServicer:
    texts = Texts(MODEL, Tokenizer(grammar_cases.tokenizer()), None)
    return InferenceServicer(texts=texts, parts=bench.cluster, max_request_bytes=10_000)


async def refusal_of(servicer: InferenceServicer, model: str) -> TandemError:
    request = inference_pb.GenerateRequest(model=model, token_ids=inference_pb.TokenIds(ids=[1, 2, 3]))
    with pytest.raises(TandemError) as refused:
        await anext(aiter(servicer.Generate(request, cast(Any, Context()))))
    return refused.value


async def test_an_adapter_that_no_worker_has_told_of_yet_may_be_asked_for_again() -> None:
    """A router that has just been restarted knows no workers yet: one of them may have the adapter."""
    bench = Bench()
    bench.take_away(bench.decode)
    servicer = servicer_of(bench)
    assert isinstance(await refusal_of(servicer, "sql"), NoWorker)
    assert isinstance(await refusal_of(servicer, "m"), NoWorker)
    other = bench.add("other", pb.Role.ROLE_DECODE, 2048)
    other.record.model.vocab_size = 100
    assert isinstance(await refusal_of(servicer, "sql"), InvalidRequest)
    bench.take_away(other)
    assert isinstance(await refusal_of(servicer, "sql"), InvalidRequest), "as those that were there last have said"
    await servicer.close()


async def test_an_adapter_whose_last_worker_has_gone_may_be_asked_for_again() -> None:
    """For example while that worker is restarted."""
    bench = Bench()
    other = bench.add("other", pb.Role.ROLE_DECODE, 2048)
    for handle in (bench.decode, other):
        handle.record.model.vocab_size = 100
    bench.tell_adapters(bench.decode, sql="1")
    servicer = servicer_of(bench)
    assert isinstance(await refusal_of(servicer, "poet"), InvalidRequest)
    bench.take_away(bench.decode)
    refused = await refusal_of(servicer, "sql")
    assert isinstance(refused, NoWorker)
    assert "no decode worker with the adapter 'sql' is available" in str(refused)
    await servicer.close()


@pytest.mark.parametrize(("served", "leaving"), [({"sql": "1"}, []), ({}, [("sql", "1")])])
async def test_a_stream_with_an_adapter_is_taken_over_from_another_router(
    served: dict[str, str], leaving: list[tuple[str, str]]
) -> None:
    """The client's `worker_kind` says which adapter called `sql` began the answer. That adapter may be leaving: then
    new requests cannot ask for it."""
    bench = Bench()
    bench.decode.record.model.vocab_size = 100
    bench.tell_adapters(bench.decode, *leaving, **served)
    servicer = servicer_of(bench)
    if not served:
        assert isinstance(await refusal_of(servicer, "sql"), InvalidRequest)

    def request(kind: Kind) -> inference_pb.GenerateRequest:
        return inference_pb.GenerateRequest(
            request_id="r",
            model="sql",
            token_ids=inference_pb.TokenIds(ids=[1, 2, 3]),
            output_token_ids=[5],
            worker_kind=kind_name(kind),
            sampling_params=inference_pb.SamplingParams(temperature=0.0),
        )

    for other in (Kind("", "2"), Kind("")):
        with pytest.raises(NoWorker, match="no worker of the kind that began this answer"):
            await anext(aiter(servicer.Generate(request(other), cast(Any, Context()))))
    answer = cast(Any, servicer.Generate(request(Kind("", "1")), cast(Any, Context())))
    first = asyncio.ensure_future(anext(answer))
    await settle()
    generate = bench.d.sent[-1].generate
    assert (generate.lora_digest, list(generate.output_token_ids)) == ("1", [5])
    bench.d.say("r", generate.attempt, tokens=pb.Tokens(index=1, token_ids=[6]))
    assert (await first).worker_kind == kind_name(Kind("", "1"))
    await answer.aclose()
    await servicer.close()


async def test_an_adapter_that_has_gone_for_good_is_unknown() -> None:
    now_s = 100.0
    worker = pb.WorkerRecord(model=inference_pb.GetModelInfoResponse(vocab_size=100, max_model_len=2048))
    worker.incarnation = "first"
    workers: list[list[pb.WorkerRecord]] = []
    served = ServedModel(MODEL, lambda: workers[-1], now_s=lambda: now_s)

    def names(*of_worker: str) -> tuple[str, ...]:
        worker.model.lora_names[:] = of_worker
        workers.append([worker])
        return served.now().lora_names

    assert names("sql") == ("sql",)
    now_s += 3600
    worker = pb.WorkerRecord(model=worker.model, incarnation="second")
    assert names("poet") == ("poet", "sql"), "it was there until now"
    now_s += KEPT_S - 1
    assert served.now().lora_names == ("poet", "sql")
    now_s += 1
    assert served.now().lora_names == ("poet",)
    assert names("poet", "sql") == ("poet", "sql")
    now_s += KEPT_S
    assert served.now().lora_names == ("poet", "sql")
    assert names("sql") == ("sql",), "its worker lives, and was told to let it go"
    worker.exchanged_lora_names.append("sql")
    assert names() == ("sql",), "its worker will have another one of that name"
    worker.exchanged_lora_names.clear()
    assert names() == ()


@pytest.mark.parametrize(("is_reachable", "words"), [(True, "start one"), (False, "Redis does not answer")])
async def test_whom_nobody_can_serve_is_told_what_is_missing_and_so_is_the_log(
    caplog: pytest.LogCaptureFixture, is_reachable: bool, words: str
) -> None:
    """A router that cannot read the registry finds no worker, however many run."""
    caplog.set_level("INFO")
    bench = Bench(is_registry_reachable=lambda: is_reachable)
    bench.take_away(bench.decode)
    servicer = servicer_of(bench)
    request = inference_pb.GenerateRequest(request_id="r", token_ids=inference_pb.TokenIds(ids=[1, 2, 3]))
    with pytest.raises(NoWorker, match=f"no decode worker is available; {words}") as caught:
        await anext(cast(AsyncGenerator[Any, None], servicer.Generate(request, cast(Any, Context()))))
    facts = vars(caplog.records[-1])
    assert (facts["message"], facts["code"], facts["error"]) == ("failed", "UNAVAILABLE", caught.value.message)
    await servicer.close()


@pytest.mark.parametrize("remaining_s", [None, 60.0])
async def test_a_stream_that_is_closed_has_freed_what_it_owns(
    remaining_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is freed when its stream is closed, not when the garbage collector finds its generators: until then,
    others with its id are refused, and a draining router waits."""
    caplog.set_level("INFO")
    bench = Bench()
    bench.decode.record.model.vocab_size = 100
    servicer = servicer_of(bench)
    request = inference_pb.GenerateRequest(request_id="r", token_ids=inference_pb.TokenIds(ids=[1, 2, 3]))
    context = cast(Any, Context(remaining_s))
    answer = cast(AsyncGenerator[inference_pb.GenerateResponse, None], servicer.Generate(request, context))
    first = asyncio.ensure_future(anext(answer))
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await first
    await answer.aclose()
    assert bench.d.sent[-1].WhichOneof("command") == "cancel"
    assert (bench.d.names, bench.pool.rooms, len(servicer.open_requests)) == (set(), set(), 0)
    facts = vars(caplog.records[-1])
    assert facts["message"] == "cancelled"
    assert (facts["prompt_tokens"], facts["completion_tokens"], facts["decode_worker"]) == (3, 1, "d")
    assert (facts["attempts"], facts["mode"]) == (1, "MODE_LOCAL")
    await servicer.close()


async def test_a_router_that_drains_takes_nothing_new_and_finishes_what_it_has() -> None:
    bench = Bench()
    bench.decode.record.model.vocab_size = 100
    servicer = servicer_of(bench)
    request = inference_pb.GenerateRequest(request_id="r", token_ids=inference_pb.TokenIds(ids=[1, 2, 3]))
    answer = cast(AsyncGenerator[inference_pb.GenerateResponse, None], servicer.Generate(request, cast(Any, Context())))
    first = asyncio.ensure_future(anext(answer))
    await settle()
    draining = asyncio.create_task(servicer.drain())
    await settle()
    assert isinstance(await refusal_of(servicer, ""), Draining)
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5], finish_reason=LENGTH))
    assert list((await first).token_ids) == [5]
    assert not draining.done()
    assert [message.finish_reason async for message in answer] == [LENGTH]
    await asyncio.wait_for(draining, 5)
    await servicer.close()
