"""Request bodies of Anthropic's Messages API: what is accepted, what is refused, and which field the error names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import refusal_of_body
from gateway.messages.input import messages_of
from gateway.messages.request import MessageRequest
from rpc.errors import InvalidRequest

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens: must be a whole number, is null"),
        ({"messages": []}, "messages: must not be empty"),
        ({"colour": "red"}, "colour: is not a known parameter"),
        ({"stop": ["a"]}, "stop: is not supported; use stop_sequences"),
        (of_user(IMAGE), 'messages[0].content[0]: must be a block of one of the types text, thinking, tool_use, '
                         'tool_result, is of type "image"'),
        (of_user({"type": "redacted_thinking", "data": "x"}), 'is of type "redacted_thinking"'),
        (of_user({"type": "thinking", "thinking": "x"}),
         "messages[0]: a message of role user may only have blocks of type text, tool_result; content[0] is of"),
        (of_user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}),
         "messages[0].content[0].content: may only have parts of type 'text', has one of type 'image'"),
        (of_user({"type": "text", "text": "a", "colour": 1}), "messages[0].content[0].colour: is not a known"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: must be a text, or a list of blocks"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: must be one of user, assistant, system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0].type: must be 'custom', is 'web_search_20250305'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice: name must be given with type 'tool'"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: must be 'enabled', 'disabled' or 'adaptive'"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: is not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort: is not supported; use output_config.effort"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0].type: must be 'clear_thinking_20251015'"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
         "context_management.edits[0].keep: must be given"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015",
                                            "keep": {"type": "thinking_turns", "value": 1}}]}},
         'context_management.edits[0].keep: is not supported; only "all" is allowed'),
        ({"output_config": {"format": FORM}, "output_format": FORM},
         "output_format: cannot be combined with output_config.format"),
        ({"structured_outputs": {"regex": "a"}, "output_format": FORM},
         "output_format: cannot be combined with structured_outputs"),
        ({"service_tier": "flex"}, 'service_tier: is not supported; only "auto" is allowed'),
        ({"metadata": {"user_id": 257 * "a"}}, "metadata.user_id: must have at most 256 bytes"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MessageRequest.read(json.dumps({"max_tokens": 9, "messages": HI, **body}).encode())
    assert message in refusal_of_body(caught.value).message


@pytest.mark.parametrize(
    "body",
    [
        {"stop_sequences": None, "tools": None, "thinking": None, "mcp_servers": [], "speed": "standard"},
        {"tools": [], "tool_choice": {"type": "auto"}, "context_management": None, "container": None},
        {"context_management": {}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"service_tier": "standard_only", "metadata": {"user_id": None}, "output_config": {"format": None}},
        {"messages": [*HI, {"role": "assistant", "content": []}, *HI], "system": [], "stream": False},
    ],
)
def test_what_asks_for_nothing_is_let_through(body: dict[str, Any]) -> None:
    asked = MessageRequest.read(json.dumps({"max_tokens": 9, "messages": HI, **body}).encode())
    assert asked.sampling() == {"max_tokens": 9}
    assert asked.prompts() == [[message.to_prompt() for message in messages_of(None, asked.messages)]]
    assert asked.fairness_id == ""


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("chat", "messages"), ("chat.messages", "messages"), ("chat.messages[0]", "system"),
        ("chat.messages[1].role", "messages[0].role"), ("chat.messages[3].content", "messages[2].content[0].content"),
        ("chat.messages[2].tool_calls[0].name", "messages[1].content[1].name"),
        ("chat.messages[2].tool_calls", "messages[1].content[1]"),
        ("chat.tools[0].parameters", "tools[0].input_schema"), ("chat.tools[0].name", "tools[0].name"),
        ("chat.continue_final_message", "messages[2]"),
        ("chat.tools", "tools"), ("chat.tool_name", "tool_choice.name"), ("sampling_params.stop", "stop_sequences"),
        ("sampling_params.stop[1]", "stop_sequences[1]"), ("sampling_params.stop_token_ids", "stop_token_ids"),
        ("sampling_params.max_tokens", "max_tokens"), ("sampling_params.structured_outputs", "output_config.format"),
    ],
)  # fmt: skip
def test_what_a_router_complains_of_has_its_name_in_the_body(field: str, named: str) -> None:
    said = [*HI, {"role": "assistant", "content": [
        {"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]  # fmt: skip
    asked = {"max_tokens": 9, "system": "s", "messages": said}
    for form, its_name in (({"output_config": {"format": FORM}}, named), ({"output_format": FORM}, "output_format")):
        body = MessageRequest.read(json.dumps(asked | form).encode())
        [wrong] = body.in_its_words(InvalidRequest([(field, "is wrong")])).violations
        assert wrong.field == (its_name if named == "output_config.format" else named)
