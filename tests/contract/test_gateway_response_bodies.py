"""Requests to OpenAI's Responses API: items become messages, fields reach the router, and errors name their field."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2 as httpx
from gateway_harness import Router, failing, gateway
from openai.types.responses import Response
from responses_harness import (
    LOGPROBS,
    PATH,
    WEATHER,
    ask,
    begins,
    call_item,
    message_item,
    piece,
    saying,
    thought_item,
)

from gateway.responses.input import CallItem, MessageItem, messages_of
from gateway.responses.request import ResponseRequest
from protos import tandem_inference_pb2 as pb
from rpc.errors import InvalidRequest

# -- what is asked ----------------------------------------------------------------------------------------------------


async def messages_sent(http: httpx.AsyncClient, router: Router, **body: Any) -> list[pb.ChatMessage]:
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return list(router.requests[-1].chat.messages)


def made(number: int) -> pb.ToolCall:
    return pb.ToolCall(id=f"call_{number}", name="weather", arguments="{}")


def text_part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def result_item(number: int, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


USER = {"role": "user", "content": "Hi"}
SAID_USER = pb.ChatMessage(role="user", content="Hi")
CALLS = [call_item(7, 0, "{}"), call_item(8, 1, "{}")]


CONVERTED: list[tuple[list[Any], list[pb.ChatMessage]]] = [
    ([{"role": "developer", "content": "Brief."}, {**USER, "type": "message"}, {"role": "system", "content": ""}],
     [pb.ChatMessage(role="developer", content="Brief."), SAID_USER, pb.ChatMessage(role="system")]),
    ([{"role": "user", "content": [text_part("Hi")]}], [SAID_USER]),
    ([{"role": "user", "content": [text_part("H"), text_part("i")]}], [pb.ChatMessage(role="user", parts=["H", "i"])]),
    ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [text_part("b", "output_text")]}],
     [pb.ChatMessage(role="assistant", content="a"), pb.ChatMessage(role="assistant", content="b")]),
    ([USER, thought_item(0, "So"), message_item(1, "Two."), USER],
     [SAID_USER, pb.ChatMessage(role="assistant", content="Two.", reasoning="So"), SAID_USER]),
    ([USER, thought_item(0, "So"), USER], [SAID_USER, pb.ChatMessage(role="assistant", reasoning="So"), SAID_USER]),
    ([USER, thought_item(0, "So"), message_item(1, "Well"), *CALLS, result_item(1, "rain"),
      result_item(0, [text_part("su"), text_part("n")])],
     [SAID_USER,
      pb.ChatMessage(role="assistant", content="Well", reasoning="So", tool_calls=[made(0), made(1)]),
      pb.ChatMessage(role="tool", content="rain", tool_call_id="call_1"),
      pb.ChatMessage(role="tool", parts=["su", "n"], tool_call_id="call_0")]),
    ([CALLS[0], result_item(0, ""), CALLS[1], result_item(1, "")],
     [pb.ChatMessage(role="assistant", tool_calls=[made(0)]), pb.ChatMessage(role="tool", tool_call_id="call_0"),
      pb.ChatMessage(role="assistant", tool_calls=[made(1)]), pb.ChatMessage(role="tool", tool_call_id="call_1")]),
    ([CALLS[0], thought_item(1, "A"), message_item(2, "b"), CALLS[1], thought_item(4, "C"), message_item(5, "d"),
      result_item(0, "")],
     [pb.ChatMessage(role="assistant", content="bd", reasoning="AC", tool_calls=[made(0), made(1)]),
      pb.ChatMessage(role="tool", tool_call_id="call_0")]),
    ([message_item(0, "a"), thought_item(0, "B"), message_item(1, "c")],
     [pb.ChatMessage(role="assistant", content="a"),
      pb.ChatMessage(role="assistant", content="c", reasoning="B")]),
    ([USER, {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "s"}]}], [SAID_USER]),
]  # fmt: skip


async def test_items_are_messages() -> None:
    """The items of one answer become one message, which continues after calls until their results come."""
    async with gateway() as (router, http):
        for items, messages in CONVERTED:
            assert await messages_sent(http, router, input=items) == messages
            instructed = await messages_sent(http, router, input=items, instructions="First.")
            assert instructed == [pb.ChatMessage(role="system", content="First."), *messages]
            assert await messages_sent(http, router, input=items, instructions="") == messages, "they say nothing"


def test_thousands_of_items_that_are_one_message_are_added_up_in_a_moment() -> None:
    said = MessageItem(role="assistant", content=42 * "a")
    items = [CallItem(type="function_call", call_id="c", name="f", arguments="{}"), *[said] * 40_000]
    begun_s = time.process_time()
    [message] = messages_of(None, items)
    assert time.process_time() - begun_s < 1, "each text is copied once"
    assert len(message.to_prompt()["content"]) == 42 * 40_000


async def test_what_was_answered_can_be_sent_back_as_clients_do() -> None:
    """OpenAI's client dumps an answer with nulls and with the parsed arguments."""
    async with gateway() as (router, http):
        router.script = saying(
            piece(0, 1, reasoning="So"), piece(1, 2, text="Well"), piece(2, 3, tool_calls=begins(0, arguments="{}"))
        )
        answer = Response.model_validate((await ask(http, input="Rain?", tools=[WEATHER]))[0])
        dumped = [item.model_dump() for item in answer.output]
        dumped[-1]["parsed_arguments"] = {}
        for output in (dumped, [item.model_dump(exclude_none=True) for item in answer.output]):
            sent = await messages_sent(http, router, input=[USER, *output, result_item(0, "rain")], tools=[WEATHER])
            assert sent == [
                SAID_USER, pb.ChatMessage(role="assistant", content="Well", reasoning="So", tool_calls=[made(0)]),
                pb.ChatMessage(role="tool", content="rain", tool_call_id="call_0"),
            ]  # fmt: skip


async def test_what_a_request_says_of_tools_travels() -> None:
    async with gateway() as (router, http):
        named = {"type": "function", "name": "weather"}
        body = {"input": "Rain?", "tools": [WEATHER], "tool_choice": named, "parallel_tool_calls": False}
        assert (await http.post(PATH, json=body)).status_code == 200
        chat = router.requests[0].chat
        (tool,) = chat.tools
        assert (tool.name, tool.description, json.loads(tool.parameters)) == ("weather", "Now.", WEATHER["parameters"])
        assert tool.strict
        assert (chat.tool_choice, chat.tool_name) == (pb.TOOL_CHOICE_REQUIRED, "weather")
        assert chat.parallel_tool_calls is False
        for choice in ("auto", "none", "required"):
            assert (await http.post(PATH, json=body | {"tool_choice": choice})).status_code == 200
            assert router.requests[-1].chat.tool_choice == pb.ToolChoice.Value(f"TOOL_CHOICE_{choice.upper()}")
        bare = {"type": "function", "name": "f", "parameters": None, "strict": None, "defer_loading": False}
        assert (await http.post(PATH, json={"input": "a", "tools": [bare]})).status_code == 200
        assert router.requests[-1].chat.tools[0] == pb.Tool(name="f")


async def test_the_form_of_an_answer_and_what_it_is_drawn_by() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    sampling = {
        "top_p": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "seed": 7, "stop": ["x"], "min_tokens": 1,
        "priority": -3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "ignore_eos": True,
    }  # fmt: skip
    async with gateway() as (router, http):
        for text, expected in (
            ({"format": schema}, pb.StructuredOutputs(json='{"type": "object"}')),
            ({"format": {"type": "json_object"}}, pb.StructuredOutputs(json_object=True)),
            ({"format": {"type": "text"}}, None),
            ({}, None),
        ):
            assert (await http.post(PATH, json={"input": "a", "text": text})).status_code == 200
            params = router.requests[-1].sampling_params
            assert params.HasField("structured_outputs") == (expected is not None)
            assert expected is None or params.structured_outputs == expected
        further = {"structured_outputs": {"regex": "a+"}, "text": {"format": {"type": "text"}}, **sampling}
        further |= {"cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False}, "user": "u"}
        answer = await http.post(PATH, json={"input": "a", "request_id": "named", **further})
        assert answer.status_code == 200, answer.text
        with_its_prefix = await http.post(PATH, json={"input": "a", "request_id": "resp_mine"})
    assert with_its_prefix.json()["id"] == "resp_mine"
    [request] = router.requests[4:5]
    assert answer.json()["id"] == "resp_named"
    assert answer.headers["x-request-id"] == request.request_id == "named"
    assert request.sampling_params.structured_outputs.regex == "a+"
    got = {name: getattr(request.sampling_params, name) for name in sampling}
    assert got == {name: value if name != "stop" else ["x"] for name, value in sampling.items()}
    assert (request.cache_salt, request.fairness_id) == ("s", "u")
    assert request.chat.template_kwargs == '{"enable_thinking": false}'


async def test_a_prompt_that_is_too_long_may_be_cut() -> None:
    async with gateway() as (router, http):
        for asked, kept in (({}, None), ({"truncation": "disabled"}, None), ({"truncation": "auto"}, -1)):
            answer = await http.post(PATH, json={"input": "a", **asked})
            assert answer.json()["truncation"] == asked.get("truncation", "disabled"), answer.text
            request = router.requests[-1]
            assert request.HasField("truncate_prompt_tokens") == (kept is not None)
            assert kept is None or request.truncate_prompt_tokens == kept


async def test_null_is_absent_and_what_asks_for_nothing_is_let_through() -> None:
    nulls = {name: None for name, field in ResponseRequest.model_fields.items() if not field.is_required()}
    neutral = {
        "n": 1, "store": False, "background": False, "truncation": "disabled", "client_metadata": {"session_id": "x"},
        "reasoning": {"effort": None, "summary": "auto"},
        "text": {}, "include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False},
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {"a": "b"}, "service_tier": "auto",
        "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "context_management": [], "top_logprobs": 0,
        "prompt_cache_retention": "in_memory", "include_reasoning": True, "detokenize": True, "nobody_knows": None,
    }  # fmt: skip
    async with gateway() as (router, http):
        for body in (nulls, neutral, {"text": {"format": None, "verbosity": None}, "reasoning": {}}, {}):
            answer = await http.post(PATH, json={"input": "a", **body})
            assert answer.status_code == 200, answer.text
    for request in router.requests:
        request.sampling_params.ClearField("seed")  # chosen by the client, so that a resumed answer continues alike
    assert all(each.sampling_params == router.requests[-1].sampling_params for each in router.requests)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "must be a text, or a list of items, is null"),
    ({"input": 5}, "input", "must be a text, or a list of items, is 5"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": [5]}, "input[0]", "must be an item of one of the types message, reasoning, function_call, function"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]",
     'is of type "item_reference"; this server stores no responses: send the whole conversation in input'),
    ({"input": [{"type": ["item_reference"]}]}, "input[0]", 'is of type ["item_reference"]'),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", 'is of type "computer_call"'),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "must have at least one item with content"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "must be one of system, developer, user, as"),
    ({"input": [USER, {"role": "user"}]}, "input[1].content", "must be given"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content",
     "may only have parts of type 'input_text' or 'output_text', has one of type 'input_image'"),
    ({"input": [{"role": "user", "content": [text_part("a"), {"type": "input_text"}]}]}, "input[0].content[1].text",
     "must be given"),
    ({"input": [{**USER, "audio": {}}]}, "input[0].audio", "not a known parameter"),
    ({"input": [result_item(0, [{"type": "input_file"}])]}, "input[0].output", "'input_text', has one of"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "must be given"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content",
     "is not supported; encrypted reasoning cannot be read here"),
    ({"instructions": [USER]}, "instructions", "a text"),
    ({"tools": [{"type": "web_search", "user_location": {}}]}, "tools[0].type", "must be 'function', is 'web_search'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "must be given"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading", "only false is allowed"),
    ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto", "required" or {"type": "function", "na'),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", 'must be "none", "auto"'),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_object"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "schema must be given with type"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format", "schema must be given with type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text",
     "cannot be combined with structured_outputs"),
    ({"include": ["file_search_call.results"]}, "include", "has 'file_search_call.results'"),
    ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "top_logprobs", 'needs include: ["message.output_text.logprobs"]'),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "not a known parameter"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "'none', 'minimal', 'low'"),
    ({"reasoning": {"colour": "red"}}, "reasoning.colour", "not a known parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
    ({"store": True}, "store", "is not supported; only false is allowed; this server stores no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses: send the whole conversation"),
    ({"conversation": "c"}, "conversation", "this server stores no responses"),
    ({"background": True}, "background", "only false is allowed"),
    ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"truncation": "middle"}, "truncation", "must be 'auto' or 'disabled'"),
    ({"max_tool_calls": 3}, "max_tool_calls", "is not supported"),
    ({"enable_response_messages": True}, "enable_response_messages", "only false is allowed"),
    ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
    ({"messages": [USER]}, "messages", "use input"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "a whole number"),
    ({"n": 2}, "n", "only 1 is allowed"),
    ({"metadata": "a"}, "metadata", "must be an object"),
    ({"best_of": 2}, "best_of", "is not a known parameter"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "is not supported"),
]  # fmt: skip


async def test_what_cannot_be_had_is_refused_by_name() -> None:
    async with gateway() as (router, http):
        for body, param, complaint in REFUSED:
            for is_stream in (False, True):
                answer = await http.post(PATH, json={"input": "a", "stream": is_stream, **body})
                error = answer.json()["error"]
                assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), (
                    body
                )
                assert complaint in error["message"]
    assert router.requests == []


ITEMS = [USER, message_item(0, "a"), *CALLS, result_item(0, "rain")]


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("sampling_params.max_tokens", {}, "max_output_tokens"),
    ("sampling_params.top_p", {}, "top_p"),
    ("sampling_params.logprobs", {}, "top_logprobs"),
    ("sampling_params.structured_outputs", {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ("sampling_params.structured_outputs", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("chat", {}, "input"),
    ("chat.messages", {}, "input"),
    ("chat.messages[0].role", {"input": "a", "instructions": "b"}, "instructions.role"),
    ("chat.messages[1].role", {"input": "a", "instructions": "b"}, "input.role"),
    ("chat.messages[1].role", {}, "input[1].role"),
    ("chat.messages[2].role", {"instructions": "b"}, "input[1].role"),
    ("chat.messages[1].tool_calls", {}, "input[2]"),
    ("chat.messages[1].tool_calls[1].arguments", {}, "input[3].arguments"),
    ("chat.messages[2].content", {}, "input[4].content"),
    ("chat.tools[1].parameters", {}, "tools[1].parameters"),
    ("chat.tool_name", {}, "tool_choice"),
    ("chat.template_kwargs", {}, "chat_template_kwargs"),
]


async def test_what_a_router_refuses_is_named_as_in_the_body() -> None:
    async with gateway() as (router, http):
        for field, asked, param in FIELDS:
            router.script = failing(InvalidRequest([(field, "is wrong")]))
            error = (await http.post(PATH, json={"input": ITEMS, **asked})).json()["error"]
            assert (error["param"], error["message"]) == (param, f"{param}: is wrong"), field


async def test_what_a_router_says_of_other_fields_is_in_the_bodys_words() -> None:
    wrong = InvalidRequest([("sampling_params.min_tokens", "must be at most max_tokens (5), is 9")])
    async with gateway() as (router, http):
        router.script = failing(wrong)
        error = (await http.post(PATH, json={"input": "a", "max_output_tokens": 5, "min_tokens": 9})).json()["error"]
        router.script = failing(InvalidRequest(message="of no field"))
        of_none = (await http.post(PATH, json={"input": "a"})).json()["error"]
    assert error["message"] == "min_tokens: must be at most max_output_tokens (5), is 9"
    assert (of_none["param"], of_none["message"]) == (None, "of no field")


async def test_an_item_is_one_of_the_kinds_that_are_described() -> None:
    """The catch-all kind is described as matching nothing: else it would match every item, and oneOf allows only one
    match."""
    async with gateway() as (_, http):
        described = (await http.get("/openapi.json")).json()
    [_, items] = described["components"]["schemas"]["ResponseRequest"]["properties"]["input"]["oneOf"]
    kinds = [f"#/components/schemas/{name}" for name in ("MessageItem", "ReasoningItem", "CallItem", "CallOutputItem")]
    assert items["items"]["oneOf"] == [*({"$ref": kind} for kind in kinds), {"not": {}}]
