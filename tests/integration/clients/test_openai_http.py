"""OpenAI's own client, unmodified, against `tandem up`: the tokens of the gRPC client, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2 as httpx
import openai
import pytest
from clusters import RunningCluster
from openai_cases import MESSAGES, TOOLS

from protos import tandem_inference_pb2 as inference_pb
from tandem.client import AsyncClient, Client


async def test_streams_add_up_to_the_whole_answer(cluster: RunningCluster, model: str) -> None:
    """Eight requests at once, chats and completions, seeded and with all kinds of sampling parameters."""
    sampling: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "max_tokens": 20, "stop": ["\n\n"], "logit_bias": {"11": -5},
    }  # fmt: skip
    further = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 5, "ignore_eos": True}
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:

        async def chat(number: int) -> tuple[str, str]:
            messages: Any = [{"role": "user", "content": f"Tell me about the number {number}."}]
            asked = {"model": model, "messages": messages, **sampling, "seed": number, "extra_body": further}
            stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            text, usage = "", None
            async for event in stream:
                usage = event.usage or usage
                text += (event.choices[0].delta.content or "") if event.choices else ""
            whole = await client.chat.completions.create(**asked)
            assert usage is not None
            assert whole.usage is not None
            assert usage.completion_tokens == whole.usage.completion_tokens
            return text, whole.choices[0].message.content or ""

        async def complete(number: int) -> tuple[str, str]:
            asked = {"model": model, "prompt": f"{number} and {number + 1} are", **sampling, "extra_body": further}
            asked["seed"] = 4 + number
            stream = await client.completions.create(**asked, stream=True)
            text = "".join([event.choices[0].text async for event in stream])
            return text, (await client.completions.create(**asked)).choices[0].text

        pairs = await asyncio.gather(*(ask(number) for ask in (chat, complete) for number in range(4)))
    assert all(streamed == whole and whole for streamed, whole in pairs)
    assert len({whole for _, whole in pairs}) == 8


def test_logprobs_are_those_of_grpc(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    """The tokens that come with the logprobs add up to the answer."""
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 5}
    with Client(cluster.address) as grpc_client:
        expected = grpc_client.generate(MESSAGES, logprobs=4, **asked)
    chat = client.chat.completions.create(model=model, messages=MESSAGES, logprobs=True, top_logprobs=4, **asked)
    whole = client.completions.create(model=model, prompt="Once upon", logprobs=2, **asked)
    [choice] = chat.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(c.logprob, [t.logprob for t in c.top_logprobs]) for c in choice.logprobs.content] == [
        (each.sampled.logprob, [top.logprob for top in each.top]) for each in expected.logprobs
    ]
    said = b"".join(bytes(each.bytes or ()) for each in choice.logprobs.content).decode()
    assert said.removesuffix("<|im_end|>") == choice.message.content == expected.text
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert "".join(told.tokens).removesuffix("<|im_end|>") == whole.choices[0].text
    assert told.text_offset is not None
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert whole.choices[0].text[offset:].startswith(token) or token == "<|im_end|>"
    stream = client.completions.create(model=model, prompt="Once upon", logprobs=2, **asked, stream=True)
    streamed = [each for event in stream if (each := event.choices[0].logprobs) is not None]
    assert [token for each in streamed for token in each.tokens or ()] == told.tokens
    assert [offset for each in streamed for offset in each.text_offset or ()] == told.text_offset
    assert [top for each in streamed for top in each.top_logprobs or ()] == told.top_logprobs


async def test_tokens_are_those_that_an_answer_counts(
    cluster: RunningCluster, client: openai.OpenAI, model: str
) -> None:
    """Tokenization over gRPC and over HTTP, of a text and of messages with tools, agrees with the usage of answers."""
    of_messages = {"messages": MESSAGES, "tools": TOOLS}
    with Client(cluster.address) as grpc_client:
        text, chat = grpc_client.tokenize("Once upon"), grpc_client.tokenize(MESSAGES, tools=TOOLS, with_tokens=True)
        answers = [
            grpc_client.generate("Once upon", max_tokens=1),
            grpc_client.generate(MESSAGES, tools=TOOLS, tool_choice="auto", max_tokens=1),
            grpc_client.generate(list(chat.token_ids), max_tokens=1),
        ]
        assert grpc_client.detokenize(text.token_ids) == "Once upon"
        assert "".join(chat.tokens).replace("Ġ", " ").startswith("<|im_start|>")
        assert not grpc_client.detokenize(chat.token_ids, skip_special_tokens=True).startswith("<|im_start|>")
    assert [answer.usage.prompt_tokens for answer in answers] == [
        len(text.token_ids), len(chat.token_ids), len(chat.token_ids),
    ]  # fmt: skip
    async with AsyncClient(cluster.address) as grpc_client:
        assert await grpc_client.tokenize("Once upon") == text
        assert await grpc_client.detokenize(text.token_ids) == "Once upon"
    url = f"http://{cluster.http_address}"
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
        told = http.post("/tokenize", json=of_messages).json()
        back = http.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert told == {
        "count": len(chat.token_ids), "max_model_len": 2048, "tokens": list(chat.token_ids), "token_strs": None,
    }  # fmt: skip
    assert MESSAGES[0]["content"] in back["prompt"]
    of_response = [{"type": "function", **tool["function"]} for tool in TOOLS]
    counted = client.responses.input_tokens.count(input=MESSAGES, tools=of_response)  # type: ignore[arg-type]
    assert counted.input_tokens == len(chat.token_ids)
    with pytest.raises(openai.BadRequestError, match="must be at most 2047 tokens"):
        client.completions.create(model=model, prompt=[5] * 2048)


def test_token_ids_and_many_prompts(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    prompts = [[504, 3575, 282], [1057, 2306]]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=8, temperature=0)
    with Client(cluster.address) as grpc_client:
        expected = [grpc_client.generate(prompt, max_tokens=8, temperature=0).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_the_models_own_end_is_no_stop_reason_unless_it_is_ignored(
    cluster: RunningCluster, client: openai.OpenAI, model: str
) -> None:
    with Client(cluster.address) as grpc_client:
        [end] = grpc_client.tokenize("<|im_end|>").token_ids
    for ignores, expected in ((False, None), (True, end)):
        further = {"stop_token_ids": [end], "ignore_eos": ignores}
        answer = client.completions.create(
            model=model, prompt="Once", max_tokens=4, logit_bias={str(end): 100}, extra_body=further
        )
        [choice] = answer.choices
        assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": expected})


def test_several_choices(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "n": 3}
    chat = client.chat.completions.create(model=model, messages=MESSAGES, **asked)
    with Client(cluster.address) as grpc_client:
        one = grpc_client.generate(MESSAGES, max_tokens=12, temperature=0.9, seed=5)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert chat.choices[2].message.content == one.text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == one.usage.prompt_tokens, "counted once"
    stream = client.completions.create(
        model=model, prompt=["Once upon", "I am"], **asked, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = [""] * 6, None
    for event in stream:
        usage = event.usage or usage
        for piece in event.choices:
            texts[piece.index] += piece.text
    whole = client.completions.create(model=model, prompt=["Once upon", "I am"], **asked)
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 6
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens == 4


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt="a", top_p=3)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=model, prompt=[5] * 3000)
    assert too_long.value.param == "prompt"
    assert "2048" in too_long.value.message or "2047" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as too_many:
        client.completions.create(model=model, prompt=["a"] * 3, n=100)
    assert too_many.value.param == "n"


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(client: openai.OpenAI, model: str) -> None:
    """Tokenizing the whole prompt would take seconds."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="The quick brown fox. " * 180_000)
    assert caught.value.param == "prompt"
    assert re.search(r"must be at most 2047 tokens .*, has \d+ in its first \d{5} characters$", caught.value.message)


def test_answers_in_the_form_that_was_asked_for(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    """Uses OpenAI's response_format and vLLM's structured_outputs; prefilled and decoded by one worker or by two."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "people": {"type": "integer", "minimum": 0, "maximum": 10**8},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    messages: list[Any] = [
        {"role": "user", "content": "Name a large city, and say how many people live there, as JSON."}
    ]
    sampling: dict[str, Any] = {"max_tokens": 80, "temperature": 0.7, "seed": 3}
    with Client(cluster.address) as grpc_client:
        expected = grpc_client.generate(messages, **sampling, structured_outputs={"json": schema})
    assert (expected.timings.mode, expected.finish_reason) == (inference_pb.MODE_DISAGGREGATED, "stop")
    value = json.loads(expected.text)
    assert list(value) == ["city", "people"]
    assert isinstance(value["people"], int)
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"model": model, "messages": messages, **sampling}
    whole = client.chat.completions.create(**asked, response_format=form)
    stream = client.chat.completions.create(**asked, response_format=form, stream=True)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(event.choices[0].delta.content or "" for event in stream) == expected.text
    for further, texts in (({"choice": ["Rome", "Paris"]}, "Rome|Paris"), ({"regex": "[0-9]{3}-[a-f]{4}"}, None)):
        answer = client.chat.completions.create(**asked, extra_body={"structured_outputs": further})
        assert re.fullmatch(texts or str(further["regex"]), answer.choices[0].message.content or "")


def test_a_form_that_cannot_be_read_is_a_bad_request(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: json: Invalid type: objekt") as wrong:
        client.chat.completions.create(model=model, messages=MESSAGES, response_format=form)
    assert wrong.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="structured_outputs: json: Invalid type: objekt"):
        client.chat.completions.create(
            model=model, messages=MESSAGES, extra_body={"structured_outputs": {"json": {"type": "objekt"}}}
        )
    with pytest.raises(openai.BadRequestError, match="min_tokens: cannot be combined with response_format, is 2"):
        client.chat.completions.create(
            model=model, messages=MESSAGES, response_format={"type": "json_object"}, extra_body={"min_tokens": 2}
        )
