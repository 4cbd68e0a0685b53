"""Tools over HTTP: OpenAI's fields are translated for the router, and calls come back, streamed and whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import events_of, gateway, last, tokens

from protos import tandem_inference_pb2 as pb
from rpc.errors import InvalidRequest

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": True}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Rain?"}], "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
MADE = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


NEXT = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}}


async def call(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Send two calls in pieces, as the router streams them."""
    yield tokens(0, 1, text="Well")
    pieces = [pb.ToolCallDelta(id="call_1", name="weather"), pb.ToolCallDelta(arguments='{"city":')]
    yield pb.GenerateResponse(request_id="r", offset=1, token_ids=[2], tool_calls=pieces)
    pieces = [pb.ToolCallDelta(arguments=' "Oslo"'), pb.ToolCallDelta(arguments="}")]
    pieces += [pb.ToolCallDelta(index=1, id="call_2", name="now"), pb.ToolCallDelta(index=1, arguments="{}")]
    yield pb.GenerateResponse(request_id="r", offset=2, token_ids=[3], tool_calls=pieces)
    yield last(3)


async def test_calls_streamed_and_whole() -> None:
    """An event has at most one piece of each call, since many clients read only the first."""
    async with gateway() as (router, http):
        router.script = call
        whole = (await http.post(CHAT, json=ASKED)).json()["choices"][0]
        body = (await http.post(CHAT, json={**ASKED, "stream": True})).text
    said = {"role": "assistant", "content": "Well", "refusal": None, "reasoning": None}
    assert whole["message"] == said | {"tool_calls": [MADE, NEXT]}
    assert whole["finish_reason"] == "tool_calls"
    choices = [event["choices"][0] for event in events_of(body)[:-1]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""}, {"content": "Well"},
        {"tool_calls": [{**MADE, "index": 0, "function": {"name": "weather", "arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}, {"index": 1, **NEXT}]}, {},
    ]  # fmt: skip
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["tool_calls"]


async def test_what_a_chat_says_of_tools_travels() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    told = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [MADE]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]}]  # fmt: skip
    async with gateway() as (router, http):
        router.script = call
        body = {**ASKED, "messages": told, "tool_choice": named, "parallel_tool_calls": False}
        answer = (await http.post(CHAT, json=body)).json()["choices"][0]
        assert answer["finish_reason"] == "stop", "which tool was said: the call is the answer"
        chat = router.requests[0].chat
        (tool,) = chat.tools
        assert (tool.name, tool.description, tool.strict) == ("weather", "Now.", True)
        assert tool.parameters == '{"type": "object", "properties": {"city": {"type": "string"}}}'
        assert (chat.tool_choice, chat.tool_name) == (pb.TOOL_CHOICE_REQUIRED, "weather")
        assert chat.parallel_tool_calls is False
        made, result = chat.messages[1:]
        assert made.tool_calls[0] == pb.ToolCall(id="call_1", name="weather", arguments='{"city": "Oslo"}')
        assert (result.role, result.tool_call_id, result.content) == ("tool", "call_1", "rain")
        for choice in ("auto", "none", "required"):
            await http.post(CHAT, json={**ASKED, "tool_choice": choice})
            assert router.requests[-1].chat.tool_choice == pb.ToolChoice.Value(f"TOOL_CHOICE_{choice.upper()}")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": "sometimes"}, 'tool_choice: must be "none", "auto", "required" or {'),
        ({"tool_choice": {"name": "weather"}}, 'tool_choice: must be "none", "auto", "required" or {'),
        ({"tool_choice": "required", "tools": None}, "tool_choice: needs tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: must be given"),
        ({"tools": [{"type": "search"}]}, "tools[0].type: must be 'function', is \"search\""),
        ({"functions": [FUNCTION]}, "functions: is not supported; only [] is allowed"),
    ],
)
async def test_what_is_no_tool_is_refused(asked: dict[str, Any], message: str) -> None:
    async with gateway() as (router, http):
        refused = await http.post(CHAT, json={**ASKED, **asked})
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert not router.requests


async def test_pieces_of_a_call_that_has_not_begun_are_no_answer() -> None:
    async def gap(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id="r", token_ids=[1], tool_calls=[pb.ToolCallDelta(index=1, id="b")])
        yield last(1)

    async with gateway() as (router, http):
        router.script = gap
        answer = await http.post(CHAT, json=ASKED)
    assert answer.status_code == 500


async def test_what_clients_send_back_is_taken() -> None:
    """The messages have the extra fields that clients, and other servers, add."""
    sent = [
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "parsed": None,
         "reasoning_content": None, "tool_calls": [{"index": 0, "id": None, "type": None, "function": {
             "name": "weather", "arguments": {"city": "Oslo"}, "parsed_arguments": {"city": "Oslo"}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather"}}]},
        {"role": "assistant", "content": None},
    ]  # fmt: skip
    async with gateway() as (router, http):
        router.script = call
        answer = await http.post(CHAT, json={**ASKED, "messages": [*ASKED["messages"], *sent]})
    assert answer.status_code == 200, answer.text
    first, second, third = router.requests[0].chat.messages[1:]
    assert first.tool_calls[0] == pb.ToolCall(name="weather", arguments='{"city": "Oslo"}')
    assert second.tool_calls[0] == pb.ToolCall(name="weather")
    assert third == pb.ChatMessage(role="assistant")


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("chat.tools[3].name", "tools[3].function.name"), ("chat.tools", "tools"), ("chat.tool_name", "tool_choice"),
        ("chat.messages[1].tool_calls[0].arguments", "messages[1].tool_calls[0].function.arguments"),
        ("chat.messages[1].tool_calls", "messages[1].tool_calls"),
    ],
)  # fmt: skip
async def test_what_a_router_refuses_is_named_as_in_the_body(field: str, place: str) -> None:
    async def refuse(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise InvalidRequest([(field, "is wrong")])
        yield

    async with gateway() as (router, http):
        router.script = refuse
        error = (await http.post(CHAT, json=ASKED)).json()["error"]
    assert (error["param"], error["message"]) == (place, f"{place}: is wrong")
