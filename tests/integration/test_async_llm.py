"""`tandem.AsyncLLM`: an `LLM`'s answers for the tasks of an event loop, and how requests, engine and loop end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clusters import wait_until
from grammar_cases import EOS, tokenizer
from lora_folders import CONFIG, write_adapter, write_model

from engine.config import EngineArgs
from engine.llm_engine import EngineLoad, LLMEngine
from tandem import LLM, AsyncLLM, EngineDeadError, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from tandem import RequestOutputKind as Kind
from tandem.offline_answer import CompletionOutput

Request = tuple[Any, SamplingParams, LoRARequest | None]
SEEDED = SamplingParams(seed=7, max_tokens=24, ignore_eos=True)
FORM = StructuredOutputsParams(regex="[a-e]{3,20}(red|12)")
LONG = SamplingParams(seed=3, max_tokens=3000, ignore_eos=True)
REQUESTS: list[Request] = [
    ("a red one", SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1), None),
    ([7, 8, 9, 10, 11], replace(SEEDED, n=3, logprobs=2), None),
    ({"prompt": "true green", "cache_salt": "mine"}, replace(SEEDED, bad_words=["a"], repetition_penalty=1.2), None),
    ({"prompt_token_ids": list(range(20, 60))}, SEEDED, LoRARequest("sql")),
    ("a red one", replace(SEEDED, n=2, ignore_eos=False, structured_outputs=FORM), None),
    ("ab", replace(SEEDED, min_tokens=3, ignore_eos=False), None),
]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    write_model(tmp_path, {**CONFIG, "eos_token_id": EOS, "max_position_embeddings": 4096, "initializer_range": 0.3})
    write_adapter(tmp_path / "sql")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return {
        "model": tmp_path, "load_format": "dummy", "device": "cpu", "attention_backend": "torch", "dtype": "float32",
        "num_threads": 1, "num_kv_blocks": 800, "max_num_seqs": 8, "lora_modules": {"sql": str(tmp_path / "sql")},
    }  # fmt: skip


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.fixture
def llm(settings: dict[str, Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**settings)
    yield llm
    llm.shutdown()
    assert not engine_threads()


async def ask(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, adapter: LoRARequest | None = None, *, name: str = "r"
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name, lora_request=adapter)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - of what the loop does next
            await asyncio.sleep(0)


def is_at_rest(load: EngineLoad) -> bool:
    blocks = load.blocks
    return load.num_running == load.num_waiting == 0 and blocks.num_free + blocks.num_cached == blocks.num_blocks


async def at_rest_before_another_step(llm: AsyncLLM, leave: Callable[[], Awaitable[object]]) -> bool:
    """Whether all blocks are free once `leave` is done, though the engine, which stands meanwhile, computes nothing."""
    may_go_on = threading.Event()
    llm.engine.post(lambda _: may_go_on.wait(20))
    leaving = asyncio.ensure_future(leave())
    try:
        await until(lambda: not llm._requests._requests)
        asking = asyncio.ensure_future(llm.engine.call(LLMEngine.load))
        await asyncio.sleep(0)
    finally:
        may_go_on.set()
    await leaving
    return is_at_rest(await asking)


def tokens_in(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def said(answer: CompletionOutput) -> tuple[object, ...]:
    """All but how likely it was, of which batches may change the last digits."""
    tokens = [list(each) for each in answer.logprobs or []]
    return answer.index, answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason, tokens


async def test_answers_are_an_llms_and_outputs_grow(llm: AsyncLLM, settings: dict[str, Any]) -> None:
    offline = LLM(**settings)
    (plain,) = offline.generate("abc", SEEDED, use_tqdm=False)
    requests = [*REQUESTS, ("abc", replace(SEEDED, stop=[plain.outputs[0].text[5:7]]), None)]
    prompts, params, adapters = zip(*requests, strict=True)
    expected = offline.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    seen = await asyncio.gather(*(ask(llm, *request, name=f"r{i}") for i, request in enumerate(requests)))
    for i, (outputs, whole) in enumerate(zip(seen, expected, strict=True)):
        last = outputs[-1]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [*map(said, last.outputs)] == [*map(said, whole.outputs)]
        assert (last.prompt, last.prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
        assert (last.request_id, last.lora_request) == (f"r{i}", whole.lora_request)
        assert [*map(bool, last.prompt_logprobs or [])] == [*map(bool, whole.prompt_logprobs or [])]
        for before, after in pairwise(outputs):
            assert tokens_in(before) < tokens_in(after)
            for answer, longer in zip(before.outputs, after.outputs, strict=True):
                assert longer.text.startswith(answer.text)
                assert longer.token_ids[: len(answer.token_ids)] == answer.token_ids
    assert seen[6][-1].outputs[0].finish_reason == "stop"
    assert len(seen[1]) > 3, "they were told as they came"
    assert is_at_rest(await llm.engine.call(LLMEngine.load))


async def test_outputs_are_of_the_kind_that_is_asked_for(llm: AsyncLLM) -> None:
    params = replace(SEEDED, n=2, logprobs=1)
    whole = (await ask(llm, "abc", params))[-1]
    only = await ask(llm, "abc", replace(params, output_kind=Kind.FINAL_ONLY))
    assert [said(answer) for output in only for answer in output.outputs] == [*map(said, whole.outputs)]
    assert len(only) == 1
    deltas = await ask(llm, "abc", replace(params, output_kind=Kind.DELTA))
    assert len(deltas) > 3
    for answer in whole.outputs:
        own = [part for delta in deltas for part in delta.outputs if part.index == answer.index]
        assert "".join(part.text for part in own) == answer.text
        assert [token_id for part in own for token_id in part.token_ids] == answer.token_ids
        assert [list(each) for part in own for each in part.logprobs or []] == said(answer)[-1]
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize("way", ["break", "cancel", "abort"])
async def test_who_leaves_frees_the_blocks_before_another_step(llm: AsyncLLM, way: str) -> None:
    may_leave, seen = asyncio.Event(), list[RequestOutput]()

    async def read() -> None:
        async for output in llm.generate("abc", replace(LONG, n=2), "r"):
            seen.append(output)
            if way == "break":
                await may_leave.wait()
                break

    async def leave() -> None:
        may_leave.set()
        if way == "cancel":
            reading.cancel()
        if way == "abort":
            await llm.abort("r")
        await asyncio.wait([reading])

    reading = asyncio.create_task(read())
    await until(lambda: seen)
    assert await at_rest_before_another_step(llm, leave)
    assert reading.cancelled() == (way == "cancel")
    if way == "abort":
        assert seen[-1].finished
        assert [answer.finish_reason for answer in seen[-1].outputs] == ["abort", "abort"]
    assert await ask(llm, "abc", SEEDED), "its id is free"


async def test_several_are_aborted_and_others_stay(llm: AsyncLLM) -> None:
    asked = {"a": LONG, "b": replace(LONG, n=2), "c": SEEDED}
    reading = [asyncio.create_task(ask(llm, "abc", params, name=name)) for name, params in asked.items()]
    await until(lambda: len(llm._requests._requests) == 3)
    await llm.abort(["a", "b", "unknown"])  # while their prompts are being read
    async with asyncio.timeout(20):
        ended, also, whole = [(await task)[-1].outputs[0] for task in reading]
    assert (ended.finish_reason, also.finish_reason, whole.finish_reason) == ("abort", "abort", "length")
    assert llm.engine.stats.num_generation_tokens == len(whole.token_ids) == 24
    assert is_at_rest(await llm.engine.call(LLMEngine.load))


async def test_an_id_is_one_requests(llm: AsyncLLM) -> None:
    first = llm.generate("abc", LONG, "same")
    await anext(first)
    with pytest.raises(ValueError, match="request_id: 'same' is in use by a request that is under way"):
        await anext(llm.generate("abc", LONG, "same"))
    assert not (await anext(first)).finished, "the first one goes on"
    engines_name = set(llm._requests._answers)
    await first.aclose()
    async for output in llm.generate("abc", SEEDED, "same"):
        assert engines_name.isdisjoint(llm._requests._answers), "what is still said of the first is not the second's"
        if output.finished:
            assert await ask(llm, "abc", SEEDED, name="same"), "one that has ended holds no id"


@pytest.mark.parametrize(
    ("prompt", "params", "name", "complaint"),
    [
        ([5, 10**6], SEEDED, "r", r"prompt: prompt_token_ids must be in \[0, 307\), is 1000000 at 1"),
        (["abc", "abc"], SEEDED, "r", "prompt: prompt_token_ids must be whole numbers, is 'abc' at 0"),
        ([], SEEDED, "r", "prompt: prompt_token_ids must not be empty"),
        ("abc", 3, "r", "sampling_params must be SamplingParams"),
        ("abc", SamplingParams(stop_token_ids=[999]), "r", r"prompt: stop_token_ids must be in \[0, 307\)"),
        ("abc", SEEDED, 3, "request_id: must be a text, is 3"),
        ("abc", SEEDED, "", "request_id: must not be empty"),
    ],
)
async def test_what_cannot_be_served_is_named(
    llm: AsyncLLM, prompt: Any, params: Any, name: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        await anext(llm.generate(prompt, params, name))
    assert await ask(llm, "abc", SEEDED), "nothing of it stays"


async def test_all_hear_of_an_engine_that_fails(llm: AsyncLLM) -> None:
    reading = [asyncio.create_task(ask(llm, "abc", LONG, name=name)) for name in "ab"]
    await until(lambda: llm.engine.stats.num_generation_tokens > 5)
    await llm.check_health()
    llm.engine.post(lambda _: 1 // 0)
    async with asyncio.timeout(20):
        errors = await asyncio.gather(*reading, ask(llm, "abc", LONG), return_exceptions=True)
    assert {type(error) for error in errors} == {EngineDeadError}
    why = "the engine has failed: ZeroDivisionError: integer division or modulo by zero"
    assert str(errors[0]) == str(errors[1]) == str(llm.dead_error) == why
    assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
    for use in (llm.check_health(), ask(llm, "abc", LONG)):
        with pytest.raises(EngineDeadError, match="the engine has failed: ZeroDivisionError"):
            await use
    await llm.abort("a")


@pytest.mark.parametrize("way", ["here", "another thread", "async with"])
async def test_shutdown_ends_what_is_under_way(llm: AsyncLLM, way: str) -> None:
    async with llm:
        reading = [asyncio.create_task(ask(llm, "abc", LONG, name="a"))]
        await until(lambda: llm.engine.stats.num_generation_tokens > 5)
        reading.append(asyncio.create_task(ask(llm, "abc", LONG, name="b")))
        await asyncio.sleep(0)  # its prompt is being read
        if way == "here":
            llm.shutdown()
        elif way == "another thread":
            await asyncio.to_thread(llm.shutdown)
    assert not engine_threads()
    async with asyncio.timeout(20):
        errors = await asyncio.gather(*reading, ask(llm, "abc", LONG), return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(EngineDeadError, "this AsyncLLM was shut down")] * 3
    with pytest.raises(EngineDeadError):
        await llm.reset_prefix_cache()
    assert llm.errored


def test_it_belongs_to_the_loop_of_its_first_use(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    """And is made where none runs. What the engine says once that loop is gone fails nothing."""
    may_go_on = threading.Event()

    async def begin() -> None:
        await anext(llm.generate("abc", LONG, "r"))
        llm.engine.post(lambda _: may_go_on.wait(20))  # and then it has news

    asyncio.run(begin())
    may_go_on.set()
    wait_until(lambda: llm.engine.progress is None, 20, "it has nothing to do")
    for use in (ask(llm, "abc", SEEDED), llm.abort("r"), llm.reset_prefix_cache(), llm.__aenter__()):
        with pytest.raises(RuntimeError, match="this AsyncLLM was first used on another event loop"):
            asyncio.run(use)  # type: ignore[arg-type]
    llm.shutdown()
    assert not caplog.records


def test_who_lets_go_of_it_ends_its_thread(settings: dict[str, Any]) -> None:
    llm = AsyncLLM(**settings)
    assert asyncio.run(ask(llm, "abc", SEEDED))
    assert engine_threads()
    del llm
    gc.collect()
    assert not engine_threads()


async def test_it_is_made_from_engine_args_and_asked_beside_requests(settings: dict[str, Any]) -> None:
    args = EngineArgs(**settings | {"model": str(settings["model"]), "lora_modules": f"sql={settings['model']}/sql"})
    async with AsyncLLM.from_engine_args(args) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        cached = [(await ask(llm, list(range(40)), SEEDED))[-1].num_cached_tokens for _ in range(2)]
        assert await llm.reset_prefix_cache()
        cached.append((await ask(llm, list(range(40)), SEEDED))[-1].num_cached_tokens)
        assert cached == [0, 32, 0]
    with pytest.raises(TypeError, match="AsyncLLM has no zzz"):
        AsyncLLM(**settings, zzz=1)
    with pytest.raises(ValueError, match="num_kv_blocks"):
        AsyncLLM(**settings | {"num_kv_blocks": -1})
