"""`tandem.AsyncLLM`: gives the answers of an `LLM` to the tasks of an event loop, as they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from async_llms import LONG, SEEDED, ask, is_at_rest, running, write_settings

from engine.engine_args import EngineArgs
from tandem import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from tandem import RequestOutputKind as Kind
from tandem.offline_answer import CompletionOutput

Request = tuple[Any, SamplingParams, LoRARequest | None]
FORM = StructuredOutputsParams(regex="[a-e]{3,20}(red|12)")
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
    return write_settings(tmp_path)


@pytest.fixture
def llm(settings: dict[str, Any]) -> Iterator[AsyncLLM]:
    with running(settings) as llm:
        yield llm


def tokens_in(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def said(answer: CompletionOutput) -> tuple[object, ...]:
    """All of an answer except logprob values, whose last digits may depend on the batch."""
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
    assert await llm.engine.call(is_at_rest)


async def test_outputs_are_of_the_kind_that_is_asked_for(llm: AsyncLLM) -> None:
    params = replace(SEEDED, n=2, logprobs=1, prompt_logprobs=0)
    whole = (await ask(llm, "abc", params))[-1]
    only = await ask(llm, "abc", replace(params, output_kind=Kind.FINAL_ONLY))
    assert [said(answer) for output in only for answer in output.outputs] == [*map(said, whole.outputs)]
    assert len(only) == 1
    deltas = await ask(llm, "abc", replace(params, output_kind=Kind.DELTA))
    assert len(deltas) > 3
    (of_prompt,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert len(of_prompt) == len(whole.prompt_token_ids)
    for answer in whole.outputs:
        own = [part for delta in deltas for part in delta.outputs if part.index == answer.index]
        assert "".join(part.text for part in own) == answer.text
        assert [token_id for part in own for token_id in part.token_ids] == answer.token_ids
        assert [list(each) for part in own for each in part.logprobs or []] == said(answer)[-1]
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["length"]


async def test_an_id_is_one_requests(llm: AsyncLLM) -> None:
    first = llm.generate("abc", LONG, "same")
    await anext(first)
    with pytest.raises(ValueError, match="request_id: 'same' is in use by a running request"):
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
