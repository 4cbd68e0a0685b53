"""Tests that need the real model: known answers, tokens that a model of few layers seldom chooses (such as the end of a
thought), and answers that take long enough for a client to leave."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from clusters import RunningCluster, wait_until
from openai_cases import ASKING, MESSAGES, TOOLS

from router.text.tokenizer import Tokenizer
from tandem.client import Client


@pytest.fixture
def cluster(real_cluster: RunningCluster) -> RunningCluster:
    return real_cluster


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


def generate(cluster: RunningCluster, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `tandem generate`."""
    command = [sys.executable, "-m", "tandem", "generate", *arguments, "--router", cluster.address]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_generate_prints_the_answer_and_nothing_else(cluster: RunningCluster) -> None:
    done = generate(cluster, "The capital of France is", "--max-tokens", "3", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " Paris.\n" + "\n", "three tokens' text and the end of the line"


def test_generate_json_holds_the_whole_answer(cluster: RunningCluster) -> None:
    # A salt of its own, since other tests send the same prompt, and blocks that the decode worker has cached would not
    # be transferred.
    asked = ("-", "--chat", "--json", "--temperature", "0", "--cache-salt", "json")
    done = generate(cluster, *asked, stdin="What is the capital of France?")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    timings = answer["timings"]
    assert (timings["mode"], timings["prefill_worker"], timings["decode_worker"]) == (
        "disaggregated", "prefill-1", "decode-1",
    )  # fmt: skip
    parts = sum(timings[f"{part}_ms"] for part in ("queue", "prefill", "transfer", "decode"))
    assert parts == pytest.approx(timings["total_ms"], abs=0.01)


def test_texts_are_scored_as_evaluations_do(client: openai.OpenAI, model: str) -> None:
    """For each continuation of a context: its probability, and whether it is the greedy one. With `echo`, as
    lm-evaluation-harness asks; cached parts of the context are computed again."""
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
    # Long before all 1,900 tokens could be generated.
    await asyncio.to_thread(
        wait_until, lambda: all(w.record.load.num_running == 0 for w in cluster.workers()), 5, "nothing runs"
    )
    await asyncio.to_thread(cluster.wait_until_at_rest)


@pytest.mark.slow
def test_a_model_thinks_before_it_answers_in_a_form(
    cluster: RunningCluster, client: openai.OpenAI, model: str, model_folder: Path
) -> None:
    """The model was not trained to think: a logit bias makes it say some words, and then the end of a thought."""
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
        # A completion has no reasoning part: its text stays as it is.
        assert not grpc_client.generate("<think>", max_tokens=3, temperature=0).reasoning


def test_a_response_has_what_was_thought_apart(client: openai.OpenAI, model: str, model_folder: Path) -> None:
    """The client can send the reasoning back as input."""
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


def test_calls_or_an_object(client: openai.OpenAI, model: str) -> None:
    """Uses OpenAI's own parsing helper, and sends its parsed message back."""

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
