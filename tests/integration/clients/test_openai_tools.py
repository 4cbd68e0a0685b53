"""Tools offered by OpenAI's client: calls follow the tools' schemas, over HTTP and over gRPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from clusters import RunningCluster
from openai_cases import ASKING, TEMPLATE, TOOLS, added_up

from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.tokenizer import Tokenizer
from tandem.client import Client


def plain(calls: Any) -> list[dict[str, str]]:
    return [{"id": call.id, "name": call.function.name, "arguments": call.function.arguments} for call in calls]


def test_tools_are_called_as_their_schemas_say(client: openai.OpenAI, model: str, model_folder: Path) -> None:
    """Then the model gets the tool's result."""
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
    with pytest.raises(openai.BadRequestError, match="cannot be enforced: failed to compile JSON schema") as caught:
        client.chat.completions.create(model=model, messages=ASKING, tools=[TOOLS[0], wrong], tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"


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
