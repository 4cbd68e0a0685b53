"""OpenAI's own client, unmodified, against `tandem up`: the real model, the tokens of the gRPC client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pydantic
import pytest
from clusters import RunningCluster, run_cluster, wait_until

from protos import tandem_inference_pb2 as inference_pb
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.tokenizer import Tokenizer
from tandem.client import AsyncClient, Client

TEMPLATE = Path(__file__).parents[2] / "examples" / "templates" / "chatml_tools.jinja"
THINKING = "{{ {true: '<think>\n', false: '<think>\n\n</think>\n\n'}[enable_thinking] if enable_thinking is defined }}"
SMALL = (
    "--num-threads", "1", "--kv-cache-gib", "0.2", "--max-model-len", "2048", "--http-port", "0",
    "--reasoning-parser", "deepseek_r1",
)  # fmt: skip
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("openai")
    (folder / "template").write_text(TEMPLATE.read_text().rstrip("\n") + THINKING)
    with run_cluster(folder / "log", *SMALL, "--chat-template", str(folder / "template")) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_chat_is_the_same_as_over_grpc(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, temperature=0)
    with Client(cluster.address) as grpc_client:
        expected = grpc_client.generate(MESSAGES, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == expected.text
    assert "Paris" in expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens


async def test_streams_add_up_to_the_whole_answer(cluster: RunningCluster, model: str) -> None:
    """Eight at once, chats and completions, seeded and with everything that a request may carry."""
    sampling: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "max_tokens": 20, "stop": ["\n\n"], "logit_bias": {"11": -5},
    }  # fmt: skip
    further = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 5, "ignore_eos": True}
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:

        async def chat(number: int) -> tuple[str, str]:
            messages: Any = [{"role": "user", "content": f"Tell me about the number {number}."}]
            asked = {"model": model, "messages": messages, **sampling, "extra_body": further}
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
            stream = await client.completions.create(**asked, stream=True)
            text = "".join([event.choices[0].text async for event in stream])
            return text, (await client.completions.create(**asked)).choices[0].text

        pairs = await asyncio.gather(*(ask(number) for ask in (chat, complete) for number in range(4)))
    assert all(streamed == whole and whole for streamed, whole in pairs)
    assert len({whole for _, whole in pairs}) == 8


def test_logprobs_are_those_of_grpc(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    """Their tokens, too: together they are the answer."""
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


async def test_tokens_are_those_that_an_answer_counts(cluster: RunningCluster, client: openai.OpenAI) -> None:
    """Said over gRPC and over HTTP, of a text and of messages with tools."""
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
        client.completions.create(model="smollm2-135m-instruct", prompt=[5] * 2048)


def test_texts_are_scored_as_evaluations_do(client: openai.OpenAI, model: str) -> None:
    """Of each continuation of a context: its probability, and whether it is what the model itself would have said. By
    `echo`, as lm-evaluation-harness asks; what is cached of the context is computed again."""
    context, texts = "The capital of France is", [" Paris", " Rome", " the city of lights"]
    asked: dict[str, Any] = {"model": model, "logprobs": 1, "echo": True, "temperature": 0}
    whole = client.completions.create(prompt=[context + text for text in texts], max_tokens=1, **asked)
    sums, is_greedy = [], []
    for choice, text in zip(whole.choices, texts, strict=True):
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.text_offset is not None
        begin = told.text_offset.index(len(context))
        assert "".join(told.tokens[begin:-1]) == text
        assert choice.text.startswith(context + text)
        assert told.token_logprobs[0] is None
        sums.append(sum(told.token_logprobs[begin:-1]))
        tops = zip(told.tokens[begin:-1], told.top_logprobs[begin:-1], strict=True)
        is_greedy.append(all(top[token] == max(top.values()) for token, top in tops))
    assert is_greedy == [True, False, False]
    assert sums[0] == max(sums)
    said = client.completions.create(model=model, prompt=context, max_tokens=1, logprobs=1, temperature=0)
    assert said.choices[0].logprobs is not None
    assert said.choices[0].logprobs.token_logprobs == [pytest.approx(sums[0], abs=0)], "to the bit"
    alone = client.completions.create(prompt=context + texts[0], max_tokens=0, **asked)
    assert alone.choices[0].text == context + texts[0]
    assert alone.choices[0].logprobs is not None
    [first, *_] = whole.choices
    assert first.logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs == (first.logprobs.token_logprobs or [])[:-1]
    streamed = list(client.completions.create(prompt=context, max_tokens=4, stream=True, **asked))
    assert streamed[0].choices[0].text.startswith(context)


def test_token_ids_and_many_prompts(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    prompts = [[504, 3575, 282], [1057, 2306]]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=8, temperature=0)
    with Client(cluster.address) as grpc_client:
        expected = [grpc_client.generate(prompt, max_tokens=8, temperature=0).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]


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


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_frees_every_worker(cluster: RunningCluster, model: str, is_stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none") as client:
        body: Any = {
            "model": model,
            "prompt": "Once upon a time",
            "max_tokens": 1900,
            "extra_body": {"ignore_eos": True},
        }
        if is_stream:
            stream = await client.completions.create(**body, stream=True)
            await anext(aiter(stream))
            await stream.close()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.5):
                    await client.completions.create(**body)
    # Long before the 1,900 tokens would be there.
    await asyncio.to_thread(
        wait_until, lambda: all(w.record.load.num_running == 0 for w in cluster.workers()), 5, "nothing runs"
    )
    await asyncio.to_thread(cluster.wait_until_at_rest)


@pytest.mark.slow  # over HTTP of a call, below; of several answers, over gRPC: test_migration.py
def test_a_killed_router_is_no_end_of_several_answers(
    cluster: RunningCluster, client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {
        "model": model, "messages": MESSAGES, "max_tokens": 60, "temperature": 0.8, "seed": 9, "n": 3,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    expected = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    texts = [""] * 3
    for number, event in enumerate(client.chat.completions.create(**asked, stream=True)):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
        if number == 40:
            children = psutil.Process(cluster.pid).children()
            next(child for child in children if "router" in child.cmdline()).kill()
    assert texts == expected
    cluster.wait_until_at_rest()


def test_the_gateway_comes_back_where_it_was(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    def gateway() -> psutil.Process | None:
        children = psutil.Process(cluster.pid).children()
        return next((child for child in children if "gateway" in child.cmdline()), None)

    first = gateway()
    assert first is not None
    first.kill()

    def is_back() -> bool:
        with suppress(openai.APIConnectionError):
            return client.models.list().data[0].id == model
        return False

    wait_until(is_back, 20, "another gateway at the same port")


def test_answers_in_the_form_that_was_asked_for(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    """OpenAI's response_format, vLLM's structured_outputs; prefilled by one worker and decoded by another, or not."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "people": {"type": "integer", "maximum": 10**8}},
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
    with pytest.raises(openai.BadRequestError, match="min_tokens: cannot be had with response_format, is 2"):
        client.chat.completions.create(
            model=model, messages=MESSAGES, response_format={"type": "json_object"}, extra_body={"min_tokens": 2}
        )


# -- tools ------------------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The {name} of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": units}},
        "required": ["city", "unit"], "additionalProperties": False}}}
    for name, units in (("weather", ["celsius", "fahrenheit"]), ("population", ["people", "thousands"]))
]  # fmt: skip
ASKING: list[Any] = [{"role": "user", "content": "How many people live in Oslo?"}]


def added_up(events: Any) -> tuple[list[dict[str, str]], str, str | None]:
    """Of a stream's first choice: its calls, its content, and why it ended."""
    calls: list[dict[str, str]] = []
    content, finish_reason = "", None
    for event in events:
        choice = event.choices[0]
        content += choice.delta.content or ""
        finish_reason = choice.finish_reason or finish_reason
        for piece in choice.delta.tool_calls or []:
            if piece.id:
                assert piece.index == len(calls)
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments
    return calls, content, finish_reason


def plain(calls: Any) -> list[dict[str, str]]:
    return [{"id": call.id, "name": call.function.name, "arguments": call.function.arguments} for call in calls]


def test_tools_are_called_as_their_schemas_say(client: openai.OpenAI, model: str, model_folder: Path) -> None:
    """Then it is told what came of it."""
    asked: dict[str, Any] = {"model": model, "messages": ASKING, "tools": TOOLS, "temperature": 0.9, "seed": 4}
    required = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.create(**required).choices[0]
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    units = {"weather": ["celsius", "fahrenheit"], "population": ["people", "thousands"]}
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in units[call.function.name]
    assert added_up(client.chat.completions.create(**required, stream=True)) == (
        plain(whole.message.tool_calls), "", "tool_calls",
    )  # fmt: skip
    result = {"role": "tool", "tool_call_id": call.id, "content": "709,000 people"}
    asked["messages"] = [*ASKING, whole.message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**asked, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    said = [
        ChatMessage(role="user", content=ASKING[0]["content"]),
        ChatMessage(role="assistant", content="", tool_calls=(
            {"type": "function", "function": {"name": call.function.name, "arguments": arguments}},)),
        ChatMessage(role="tool", content="709,000 people"),
    ]  # fmt: skip
    prompt = ChatTemplate.from_file(TEMPLATE, model_folder).render(said, TOOLS)
    assert "709,000 people" in prompt
    assert answer.usage is not None
    num_tokens = len(Tokenizer.from_folder(model_folder).encode(prompt, add_special_tokens=False))
    assert answer.usage.prompt_tokens == num_tokens


def test_one_tool_by_name_and_none(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASKING, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    named = {"type": "function", "function": {"name": "weather"}}
    both = client.chat.completions.create(**asked, tool_choice=named, n=2).choices
    for choice in both:
        assert choice.message.tool_calls is not None
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        assert choice.finish_reason == "stop"
    assert both[0].message.tool_calls[0].id != both[1].message.tool_calls[0].id
    assert client.chat.completions.create(**asked, tool_choice="none").choices[0].message.tool_calls is None


def test_a_schema_that_cannot_be_kept_to_is_a_bad_request(client: openai.OpenAI, model: str) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}}
    with pytest.raises(openai.BadRequestError, match="cannot be held to: failed to compile JSON schema") as caught:
        client.chat.completions.create(model=model, messages=ASKING, tools=[TOOLS[0], wrong], tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"


def test_a_killed_router_is_no_end_of_a_call(cluster: RunningCluster, client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model, "messages": ASKING, "tools": TOOLS, "tool_choice": "required", "temperature": 0.8, "seed": 9,
        "max_tokens": 100,
    }  # fmt: skip
    expected = added_up(client.chat.completions.create(**asked, stream=True))
    assert sum(len(call["arguments"]) for call in expected[0]) > 60, "several calls, or one that goes on and on"

    def killing() -> Iterator[Any]:
        for number, event in enumerate(client.chat.completions.create(**asked, stream=True)):
            yield event
            if number == 8:
                children = psutil.Process(cluster.pid).children()
                next(child for child in children if "router" in child.cmdline()).kill()

    assert added_up(killing()) == expected
    cluster.wait_until_at_rest()


def test_calls_over_grpc_streamed_whole_and_several(cluster: RunningCluster) -> None:
    asked: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0.9,
    }
    with Client(cluster.address) as client:
        both = client.generate_n(ASKING, 2, seed=5, **asked)
        apart = [client.generate(ASKING, seed=5 + index, **asked) for index in range(2)]
    assert [answer.tool_calls for answer in both] == [answer.tool_calls for answer in apart]
    assert all(len(answer.tool_calls) == 1 and not answer.text for answer in both)
    assert both[0].tool_calls[0].id != both[1].tool_calls[0].id
    assert both[0].to_dict()["tool_calls"] == [both[0].tool_calls[0].to_dict()]


def test_a_model_thinks_before_it_answers_in_a_form(
    cluster: RunningCluster, client: openai.OpenAI, model: str, model_folder: Path
) -> None:
    """One that was never taught to: it is pushed to say some words, and then the one that ends a thought."""
    tokenizer = Tokenizer.from_folder(model_folder)
    bias = dict.fromkeys(tokenizer.encode("Well so let us see"), 34) | dict.fromkeys(tokenizer.encode("</think>"), 30)
    asked: dict[str, Any] = {
        "model": model, "messages": ASKING, "seed": 3, "temperature": 1, "max_tokens": 500,
        "frequency_penalty": 2, "logit_bias": {str(token_id): by for token_id, by in bias.items()},
    }  # fmt: skip
    form = {"regex": "(yes|no), [a-z]{3,20}"}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}

    def streamed(**body: Any) -> tuple[str, str, Any]:
        thought, content, calls = "", "", []
        for event in client.chat.completions.create(**asked, **body, stream=True):
            delta = event.choices[0].delta
            thought += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
            calls += delta.tool_calls or []
        return thought, content, "".join(piece.function.arguments for piece in calls)

    held = {"extra_body": {**thinks, "structured_outputs": form}}
    message = client.chat.completions.create(**asked, **held).choices[0].message
    assert re.fullmatch(form["regex"], message.content or "")
    assert message.model_extra is not None
    assert message.model_extra["reasoning"]
    assert streamed(**held) == (message.model_extra["reasoning"], message.content, "")
    thought, content, arguments = streamed(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **{
        "extra_body": thinks})  # fmt: skip
    assert (bool(thought), content) == (True, "")
    assert set(json.loads(arguments)) == {"city", "unit"}
    for body in ({"structured_outputs": form, "chat_template_kwargs": {"enable_thinking": False}},
                 {"structured_outputs": form}):  # fmt: skip
        told = streamed(extra_body=body)
        assert not told[0]
        assert re.fullmatch(form["regex"], told[1])
    with Client(cluster.address) as grpc_client:
        assert grpc_client.model_info().reasoning_parser == "deepseek_r1"
        answer = grpc_client.generate(
            ASKING,
            seed=3,
            temperature=1,
            max_tokens=500,
            frequency_penalty=2,
            logit_bias=bias,
            structured_outputs=form,
            **thinks,
        )
        assert (answer.reasoning, answer.text) == (message.model_extra["reasoning"], message.content)
        assert answer.to_dict()["reasoning"] == answer.reasoning
        # What was thought is no part of a completion, which is as it is.
        assert not grpc_client.generate("<think>", max_tokens=3, temperature=0).reasoning


def test_calls_or_an_object(client: openai.OpenAI, model: str) -> None:
    """As OpenAI's own helper asks, and what it makes of the answer is sent back."""

    class Done(pydantic.BaseModel):
        is_right: bool

    tools = [openai.pydantic_function_tool(Done, name="done")]
    asked: dict[str, Any] = {"model": model, "tools": tools, "temperature": 1.5, "parallel_tool_calls": False}
    ends: set[str | None] = set()
    for seed in range(12):
        parsed = client.chat.completions.parse(**asked, messages=ASKING, response_format=Done, seed=seed).choices[0]
        ends.add(parsed.finish_reason)
        if parsed.finish_reason == "tool_calls":
            assert parsed.message.tool_calls is not None
            assert isinstance(parsed.message.tool_calls[0].function.parsed_arguments, Done)
            again: Any = [*ASKING, parsed.message, {"role": "tool", "content": "ok",
                                                    "tool_call_id": parsed.message.tool_calls[0].id}]  # fmt: skip
            assert client.chat.completions.create(**asked, messages=again, max_tokens=2).choices
        else:
            assert isinstance(parsed.message.parsed, Done)
        if len(ends) == 2:
            break
    assert ends == {"tool_calls", "stop"}


# -- the Responses API -----------------------------------------------------------------------------------------------


def test_a_response_says_what_a_chat_says(client: openai.OpenAI, model: str) -> None:
    """Whole, in events, and added up by OpenAI's helper."""
    asked: dict[str, Any] = {"model": model, "temperature": 0.8, "extra_body": {"seed": 5}}
    chat = client.chat.completions.create(
        **asked, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=24
    )
    asked |= {"instructions": "Be brief.", "input": MESSAGES, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    with client.responses.stream(**asked) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    expected = chat.choices[0].message.content
    assert expected
    assert whole.output_text == expected == texts[-1]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    end = events[-1]
    assert end.type in ("response.completed", "response.incomplete")
    assert (end.response.output_text, end.response.status) == (expected, whole.status)
    assert whole.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens,
    )  # fmt: skip
    again = client.responses.create(**asked | {"input": [*MESSAGES, *whole.output, *MESSAGES]})
    assert again.usage is not None
    assert again.usage.input_tokens > whole.usage.total_tokens, "the template ends what was said"


def test_a_response_in_the_form_that_was_asked_for(client: openai.OpenAI, model: str) -> None:
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=30)
        people: int = pydantic.Field(le=10**8)

    asked: dict[str, Any] = {
        "model": model, "input": "Name a large city, and say how many people live there, as JSON.", "temperature": 0.7,
        "max_output_tokens": 80, "extra_body": {"seed": 3},
    }  # fmt: skip
    whole = client.responses.parse(**asked, text_format=City)
    assert isinstance(whole.output_parsed, City)
    with client.responses.stream(**asked, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed
    logprobs = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    [message] = logprobs.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    said = b"".join(bytes(each.bytes) for each in part.logprobs or ())
    assert said.decode().removesuffix("<|im_end|>") == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs or ())


def test_a_response_calls_a_tool_and_goes_on_with_what_came_of_it(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": model, "tools": tools, "temperature": 0.9, "extra_body": {"seed": 4}}
    required = {**asked, "input": ASKING, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.responses.create(**required)
    [call] = whole.output
    assert call.type == "function_call"
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "unit"}
    with client.responses.stream(**required) as stream:
        [streamed] = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.call_id, streamed.arguments) == (call.call_id, call.arguments)
    assert streamed.parsed_arguments == arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "709,000 people"}
    forced: dict[str, Any] = {"tool_choice": "none", "max_output_tokens": 8}
    answer = client.responses.create(**asked, **forced, input=[*ASKING, *whole.output, result])
    made = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    chat = client.chat.completions.create(
        model=model, tools=TOOLS, tool_choice="none", temperature=0.9, seed=4, max_tokens=8, messages=[
            *ASKING, {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "709,000 people"},
        ],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_a_response_has_what_was_thought_apart(client: openai.OpenAI, model: str, model_folder: Path) -> None:
    """And is told of it, where it is sent back."""
    tokenizer = Tokenizer.from_folder(model_folder)
    bias = dict.fromkeys(tokenizer.encode("Well so let us see"), 34) | dict.fromkeys(tokenizer.encode("</think>"), 30)
    further = {
        "seed": 3, "frequency_penalty": 2, "logit_bias": {str(token_id): by for token_id, by in bias.items()},
        "chat_template_kwargs": {"enable_thinking": True}, "structured_outputs": {"regex": "(yes|no), [a-z]{3,20}"},
    }  # fmt: skip
    asked: dict[str, Any] = {"model": model, "temperature": 1, "extra_body": further}
    chat = client.chat.completions.create(**asked, messages=ASKING, max_tokens=500).choices[0].message
    whole = client.responses.create(**asked, input=ASKING, max_output_tokens=500)
    with client.responses.stream(**asked, input=ASKING, max_output_tokens=500) as stream:
        streamed = stream.get_final_response()
    assert chat.model_extra is not None
    assert chat.model_extra["reasoning"]
    for response in (whole, streamed):
        thought, message = response.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert (thought.content[0].text, response.output_text) == (chat.model_extra["reasoning"], chat.content)
        assert message.type == "message"
        assert response.usage is not None
        num_thought = len(tokenizer.encode(thought.content[0].text))
        assert response.usage.output_tokens_details.reasoning_tokens == num_thought
    again: Any = [*ASKING, *[item.model_dump() for item in whole.output], *ASKING]
    assert client.responses.create(**asked, input=again, max_output_tokens=4).output
