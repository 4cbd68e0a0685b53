"""Anthropic's own client, unmodified, against `tandem up`: the answers of chats, in Anthropic's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pydantic
import pytest
from clusters import RunningCluster, wait_until
from openai_cases import ASKING, MESSAGES, TOOLS


@pytest.fixture(scope="module", autouse=True)
def _import() -> None:
    """Import only when the tests run: it takes seconds, which test collection need not wait for."""
    global anthropic
    import anthropic


@pytest.fixture
def messages(cluster: RunningCluster) -> Iterator[Any]:
    """`client.messages`. Without certificates, because loading them would take longer than most tests."""
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    url = f"http://{cluster.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        yield client.messages


def test_a_message_says_what_a_chat_says(messages: Any, client: openai.OpenAI, model: str) -> None:
    """Both whole and streamed; count_tokens agrees with the usage."""
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=24, temperature=0.8,
        seed=5,
    )  # fmt: skip
    said: dict[str, Any] = {"model": model, "system": "Be brief.", "messages": MESSAGES}
    asked = {**said, "max_tokens": 24, "extra_body": {"temperature": 0.8, "seed": 5}}
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    [block] = whole.content
    assert block.text == texts == final.content[0].text == chat.choices[0].message.content
    assert whole.stop_reason == final.stop_reason
    assert whole.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    assert chat.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens == chat.usage.completion_tokens
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert messages.count_tokens(**said).input_tokens == chat.usage.prompt_tokens


def test_a_stop_sequence_is_named(messages: Any, client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24}
    further = {"temperature": 0.8, "seed": 5}
    text = messages.create(**asked, extra_body=further).content[0].text
    stops = ["\u2603", text[10:14]]
    chat = client.chat.completions.create(**asked, **further, stop=stops)  # type: ignore[call-overload]
    whole = messages.create(**asked, stop_sequences=stops, extra_body=further)
    with messages.stream(**asked, stop_sequences=stops, extra_body=further) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stops[1])
        assert message.content[0].text == chat.choices[0].message.content
        assert text.startswith(message.content[0].text + stops[1])


def test_a_tool_is_called_and_what_came_of_it_is_told(messages: Any, client: openai.OpenAI, model: str) -> None:
    functions = [tool["function"] for tool in TOOLS]
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in functions
    ]
    asked: dict[str, Any] = {"model": model, "tools": tools, "extra_body": {"temperature": 0.9, "seed": 4}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = messages.create(**asked, messages=ASKING, tool_choice=choice, max_tokens=100)
    [call] = whole.content
    assert (whole.stop_reason, call.type) == ("tool_use", "tool_use")
    assert set(call.input) == {"city", "unit"}
    with messages.stream(**asked, messages=ASKING, tool_choice=choice, max_tokens=100) as stream:
        [streamed] = stream.get_final_message().content
    assert (streamed.id, streamed.name, streamed.input) == (call.id, call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "709,000 people"}
    said: list[Any] = [*ASKING, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = messages.create(**asked, messages=said, tool_choice={"type": "none"}, max_tokens=8)
    made = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
    chat = client.chat.completions.create(
        model=model, tools=TOOLS, tool_choice="none", temperature=0.9, seed=4, max_tokens=8, messages=[
            *ASKING, {"role": "assistant", "tool_calls": [made]},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": call.id, "content": "709,000 people"},
        ],
    )  # fmt: skip
    assert answer.content[0].text == chat.choices[0].message.content
    assert chat.usage is not None
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert messages.count_tokens(model=model, tools=tools, messages=said).input_tokens == chat.usage.prompt_tokens


def test_a_message_in_the_form_that_was_asked_for(messages: Any, model: str) -> None:
    class Done(pydantic.BaseModel):
        is_right: bool

    asked: dict[str, Any] = {
        "model": model, "messages": ASKING, "max_tokens": 80, "extra_body": {"temperature": 0.7, "seed": 3},
    }  # fmt: skip
    whole = messages.parse(**asked, output_format=Done)
    assert isinstance(whole.parsed_output, Done)
    said = [*ASKING, {"role": "assistant", "content": whole.content}, *ASKING]
    assert messages.create(**{**asked, "messages": said, "max_tokens": 2}).content


def test_an_answer_that_is_begun_is_gone_on_with(messages: Any, client: openai.OpenAI, model: str) -> None:
    said: Any = [*MESSAGES, {"role": "assistant", "content": "The answer is ("}]
    asked: dict[str, Any] = {"model": model, "messages": said, "max_tokens": 8}
    chat = client.chat.completions.create(**asked, temperature=0, extra_body={"continue_final_message": True})
    whole = messages.create(**asked, extra_body={"temperature": 0})
    with messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        first = next(iter(stream))
        final = stream.get_final_message()
    assert whole.content[0].text == final.content[0].text == chat.choices[0].message.content
    assert chat.usage is not None
    assert first.message.usage.input_tokens == chat.usage.prompt_tokens, "known when it begins"
    assert messages.count_tokens(model=model, messages=said).input_tokens == chat.usage.prompt_tokens


def test_thinking_is_the_templates_switch(messages: Any, model: str) -> None:
    """An answer that ends within its thought has only a thinking block, which the client can send back unchanged."""
    asked: dict[str, Any] = {"model": model, "messages": ASKING, "max_tokens": 4, "extra_body": {"temperature": 0}}
    enabled = messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    with messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        final = stream.get_final_message()
    disabled = messages.create(**asked, thinking={"type": "disabled"})
    assert [block.type for block in enabled.content] == ["thinking"]
    assert final.content[0].thinking == enabled.content[0].thinking
    assert enabled.content[0].signature
    assert [block.type for block in disabled.content] == ["text"]
    said = [*ASKING, {"role": "assistant", "content": enabled.content}, *ASKING]
    assert messages.create(**{**asked, "messages": said}).content


def test_a_thought_ends_with_its_budget(client: openai.OpenAI, messages: Any, model: str) -> None:
    """Then the answer begins: the same in both APIs, whole and streamed, whichever worker computes it."""
    asked: dict[str, Any] = {"model": model, "messages": ASKING, "max_tokens": 12, "extra_body": {"temperature": 0}}
    budget: Any = {"type": "enabled", "budget_tokens": 5}
    whole = messages.create(**asked, thinking=budget)
    with messages.stream(**asked, thinking=budget) as stream:
        streamed = stream.get_final_message()
    thought, text = whole.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, streamed.content[1].text) == (thought.thinking, text.text)
    assert whole.usage.to_dict()["output_tokens_details"] == {"thinking_tokens": 5}

    def chat(num_tokens: int, **more: Any) -> Any:
        of_vllm = {"thinking_token_budget": num_tokens, "chat_template_kwargs": {"enable_thinking": True}, **more}
        return client.chat.completions.create(
            model=model, messages=ASKING, max_tokens=12, temperature=0, n=2, extra_body=of_vllm
        )

    for choice in chat(5).choices:
        assert (choice.message.reasoning, choice.message.content) == (thought.thinking, text.text)
    assert chat(4).usage.completion_tokens_details.reasoning_tokens == 2 * 4
    at_once = chat(0)
    assert not at_once.choices[0].message.reasoning
    assert at_once.choices[0].message.content
    held = chat(3, structured_outputs={"choice": ["yes", "no"]}).choices[0].message
    assert held.content in ("yes", "no")
    assert held.reasoning
    endless = client.chat.completions.create(
        model=model, messages=ASKING, max_tokens=12, temperature=0, extra_body={"chat_template_kwargs": {
            "enable_thinking": True}, "thinking_token_budget": -1})  # fmt: skip
    assert not endless.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget: is only for chats"):
        client.completions.create(model=model, prompt="a", max_tokens=2, extra_body={"thinking_token_budget": 3})


def test_errors_are_those_that_the_client_knows(messages: Any, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        messages.create(model="claude", messages=ASKING, max_tokens=4)
    assert unknown.value.type == "not_found_error"
    too_long = [{"role": "user", "content": 3000 * "a "}]
    with pytest.raises(anthropic.BadRequestError, match="messages: must be at most 2047 tokens") as caught:
        messages.create(model=model, messages=too_long, max_tokens=4)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be at most"):
        messages.create(model=model, messages=ASKING, max_tokens=4000)
    wrong = {"name": "f", "input_schema": {"properties": {"a": {"type": "strin"}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema: cannot be enforced"):
        messages.create(model=model, messages=ASKING, max_tokens=4, tools=[wrong], tool_choice={"type": "any"})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences: must have at most 16 strings, has 17"):
        messages.create(model=model, messages=ASKING, max_tokens=4, stop_sequences=list("abcdefghijklmnopq"))


def test_a_client_that_leaves_frees_every_worker(cluster: RunningCluster, messages: Any, model: str) -> None:
    def num_generated() -> int:
        return sum(worker.num_generation_tokens for worker in cluster.workers())

    before = num_generated()
    asked = {"model": model, "messages": ASKING, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with messages.create(**asked, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
    wait_until(lambda: all(w.record.load.num_running == 0 for w in cluster.workers()), 15, "nothing runs")
    assert num_generated() - before < 1000
    cluster.wait_until_at_rest()
