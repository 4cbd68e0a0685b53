"""OpenAI's Responses API over HTTP, streamed and whole. What is answered is read by the types of OpenAI's own client;
the router's answers are scripted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from gateway_harness import TIMEOUT_S, Router, Script, failing, gateway, last, tokens
from openai.lib.streaming.responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.responses.input import CallItem, MessageItem, messages_of
from gateway.responses.request import ResponseRequest
from protos import tandem_inference_pb2 as pb
from rpc.errors import Draining, InternalError, InvalidRequest, Overloaded, RequestCancelled, TandemError

PATH = "/v1/responses"
NAMED = {"x-request-id": "mine"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function", "name": "weather", "description": "Now.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
LOGPROBS = ["message.output_text.logprobs"]


def events_of(body: str) -> list[dict[str, Any]]:
    """Checked: each has its name before it, and its number; OpenAI's types know it."""
    events = []
    for number, block in enumerate(body.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        assert EVENT.validate_python(event).type == event["type"]
        events.append(event)
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "created_at": 0}


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the deltas tell of. What is said of each when it is done is the same."""
    items: dict[int, dict[str, Any]] = {}
    sums: dict[int, str] = {}
    told: dict[int, list[Any]] = {}
    for event in events:
        kind, index = event["type"].removeprefix("response."), event.get("output_index", -1)
        if kind == "output_item.added":
            assert index == len(items)
            items[index], sums[index], told[index] = event["item"], "", []
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[index]["id"]
            sums[index] += event["delta"]
            told[index] += event.get("logprobs", [])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == sums[index]
            assert event.get("logprobs", []) == told[index]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == sums[index]
        elif kind == "content_part.done":
            assert (event["part"]["text"], event["part"].get("logprobs", [])) == (sums[index], told[index])
        elif kind == "output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (items[index]["id"], items[index]["type"])
            said = event["item"]["arguments"] if "arguments" in event["item"] else event["item"]["content"][0]["text"]
            assert said == sums[index]
            items[index] = event["item"]
    return list(items.values())


async def ask(http: httpx.AsyncClient, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of a stream, which tell the same."""
    answer = await http.post(PATH, json=body, headers=NAMED)
    assert answer.status_code == 200, answer.text
    streamed = await http.post(PATH, json=body | {"stream": True}, headers=NAMED)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    whole, events = answer.json(), events_of(streamed.text)
    Response.model_validate(whole)
    assert kinds_of(events)[:2] == ["created", "in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_times(events[-1]["response"]) == without_times(whole)
    assert added_up(events) == whole["output"]
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    return whole, events


def piece(offset: int, token_id: int, **said: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset, token_ids=[token_id], **said)


def saying(*messages: pb.GenerateResponse, finish_reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> Script:
    """These, and then the end."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        num_tokens = 0
        for message in messages:
            num_tokens += len(message.token_ids)
            yield message
        yield last(num_tokens, finish_reason=finish_reason)

    return script


def begins(index: int, name: str = "weather", arguments: str = "") -> list[pb.ToolCallDelta]:
    return [pb.ToolCallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)]


def goes_on(index: int, arguments: str) -> list[pb.ToolCallDelta]:
    return [pb.ToolCallDelta(index=index, arguments=arguments)]


def message_item(index: int, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": f"msg_mine_{index}", "type": "message", "role": "assistant", "content": content, "status": status}


def thought_item(index: int, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_mine_{index}", "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(index: int, number: int, arguments: str, status: str = "completed") -> dict[str, Any]:
    called = {"call_id": f"call_{number}", "name": "weather", "arguments": arguments, "status": status}
    return {"id": f"fc_mine_{index}", "type": "function_call", **called}


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_text_streamed_and_whole() -> None:
    async with gateway() as (router, http):
        whole, events = await ask(http, input="Hi", instructions="Be kind.", max_output_tokens=9, temperature=0.5)
    assert kinds_of(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress", "in_progress"]
    assert [event["response"]["output"] for event in events[:2]] == [[], []]
    assert events[2]["item"]["content"] == []
    assert [event["delta"] for event in events[4:6]] == ["hello ", "you "]
    assert whole["output"] == [message_item(0, "hello you ")]
    assert (whole["id"], whole["object"], whole["status"]) == ("resp_mine", "response", "completed")
    assert (whole["error"], whole["incomplete_details"], whole["store"]) == (None, None, False)
    assert whole["usage"] == {
        "input_tokens": 2, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0}, "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 4,
    }  # fmt: skip
    assert whole["timings"]["decode_worker"] == "d"
    assert Response.model_validate(whole).output_text == "hello you "
    sent = router.requests[0]
    assert [(m.role, m.content) for m in sent.chat.messages] == [("system", "Be kind."), ("user", "Hi")]
    assert (sent.sampling_params.max_tokens, sent.sampling_params.temperature) == (9, 0.5)
    assert not sent.sampling_params.HasField("top_p"), "what was not given is the model's to say"


async def test_an_answer_repeats_what_was_asked() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    async with gateway() as (_, http):
        plain, _ = await ask(http, input="Hi")
        asked = {
            "instructions": "Be kind.", "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.5, "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False,
            "text": {"format": form}, "metadata": {"a": "b"}, "model": "m", "store": False, "top_logprobs": 2,
        }  # fmt: skip
        whole, events = await ask(http, input="Hi", include=LOGPROBS, **asked)
    assert {name: whole[name] for name in asked} == asked
    assert {name: events[0]["response"][name] for name in asked} == asked
    defaults = {
        "instructions": None, "max_output_tokens": None, "temperature": None, "top_p": None, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "metadata": {},
        "model": "the-model", "store": False, "top_logprobs": None, "truncation": "disabled", "background": False,
        "previous_response_id": None,
    }  # fmt: skip
    assert {name: plain[name] for name in defaults} == defaults


async def test_a_thought_is_an_item_before_the_answer() -> None:
    async with gateway() as (router, http):
        router.script = saying(
            piece(0, 1), piece(1, 2, reasoning="So"), piece(2, 3), piece(3, 4, reasoning=" then."), piece(4, 5),
            piece(5, 6, text="Two"), piece(6, 7, text="."),
        )  # fmt: skip
        whole, events = await ask(http, input="1+1?")
    assert whole["output"] == [thought_item(0, "So then."), message_item(1, "Two.")]
    assert kinds_of(events)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}, "not the word that ends it"
    assert whole["usage"]["output_tokens"] == 7


async def test_calls_streamed_and_whole() -> None:
    async with gateway() as (router, http):
        router.script = saying(
            piece(0, 1, text="Well"), piece(1, 2, tool_calls=[*begins(0), *goes_on(0, '{"city":')]),
            piece(2, 3, tool_calls=[*goes_on(0, ' "Oslo"}'), *begins(1)]), piece(3, 4, tool_calls=goes_on(1, "{}")),
        )  # fmt: skip
        whole, events = await ask(http, input="Rain?", tools=[WEATHER])
    calls = [call_item(1, 0, '{"city": "Oslo"}'), call_item(2, 1, "{}")]
    assert whole["output"] == [message_item(0, "Well"), *calls]
    assert whole["status"] == "completed"
    assert kinds_of(events)[7:] == [
        "output_item.done", "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    (added,) = [each["item"] for each in events if each["type"].endswith("item.added") and each["output_index"] == 1]
    assert added == {**calls[0], "arguments": "", "status": "in_progress"}


async def test_items_stand_in_the_order_in_which_they_were_said() -> None:
    """A message of the router that ends a call may begin what follows it."""
    async with gateway() as (router, http):
        router.script = saying(
            piece(0, 1, tool_calls=begins(0, arguments="{")),
            piece(1, 2, tool_calls=[*goes_on(0, "}"), *begins(1)], reasoning="Hm.", text="And"),
            piece(2, 3, tool_calls=goes_on(1, "{}")), piece(3, 4, reasoning="So."), piece(4, 5, text="Done"),
        )  # fmt: skip
        whole, _ = await ask(http, input="Rain?", tools=[WEATHER])
    assert whole["output"] == [
        call_item(0, 0, "{}"), thought_item(1, "Hm."), message_item(2, "And"), call_item(3, 1, "{}"),
        thought_item(4, "So."), message_item(5, "Done"),
    ]  # fmt: skip
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(
    ("messages", "output"),
    [
        ([piece(0, 1, text="a")], [message_item(0, "a", "incomplete")]),
        ([piece(0, 1, reasoning="So")], [thought_item(0, "So", "incomplete")]),
        ([piece(0, 1, text="a"), piece(1, 2, tool_calls=begins(0, arguments='{"ci'))],
         [message_item(0, "a"), call_item(1, 0, '{"ci', "incomplete")]),
        ([piece(0, 1, tool_calls=begins(0))], [call_item(0, 0, "", "incomplete")]),
        ([piece(0, 1)], [message_item(0, "", "incomplete")]),
    ],
    ids=["text", "thought", "call", "name of a call", "nothing"],
)  # fmt: skip
async def test_an_answer_that_was_cut_off_is_incomplete(
    messages: list[pb.GenerateResponse], output: list[dict[str, Any]]
) -> None:
    async with gateway() as (router, http):
        router.script = saying(*messages, finish_reason=pb.FINISH_REASON_LENGTH)
        whole, events = await ask(http, input="Hi", tools=[WEATHER])
        router.script = saying(*messages, finish_reason=pb.FINISH_REASON_ABORT)
        aborted, _ = await ask(http, input="Hi", tools=[WEATHER])
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events[-1]["type"] == "response.incomplete"
    assert whole["output"] == output
    assert (aborted["status"], aborted["incomplete_details"]) == ("incomplete", {"reason": None})


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    async with gateway() as (router, http):
        router.script = saying(piece(0, 1))
        whole, events = await ask(http, input="Hi")
    assert whole["output"] == [message_item(0, "")]
    assert kinds_of(events)[2:] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip


def told(offset: int, *entries: bytes, **said: Any) -> pb.GenerateResponse:
    """A token for each text, and beside each the one alternative "x"."""
    message = tokens(offset, *range(offset, offset + len(entries)))
    message.MergeFrom(pb.GenerateResponse(**said))
    for number, token in enumerate(entries, offset):
        sampled = pb.Logprob(token_id=number, logprob=-1.5, rank=2, token=token)
        message.logprobs.add(sampled=sampled, top=[pb.Logprob(token_id=99, logprob=-0.25, rank=1, token=b"x")])
    return message


async def test_logprobs_of_what_a_text_is_made_of() -> None:
    """Parts of a character come before its text, what ends an answer has none; a thought's are left out."""
    async with gateway() as (router, http):
        router.script = saying(
            told(0, b"Hm", reasoning="Hm"), told(1, b" h", text=" h"), told(2, b"\xc3"),
            told(3, b"\xa9", b"!", text="\u00e9!"), told(5, b"<end>"),
        )  # fmt: skip
        whole, events = await ask(http, input="Hi", include=LOGPROBS, top_logprobs=1)
        plain = (await http.post(PATH, json={"input": "Hi", "include": LOGPROBS})).json()
        calls = saying(told(0, b"a", text="a"), told(1, b"{", tool_calls=begins(0, arguments="{")), told(2, b"<end>"))
        router.script = calls
        called, _ = await ask(http, input="Hi", include=LOGPROBS, tools=[WEATHER])
    x = {"token": "x", "logprob": -0.25, "bytes": [120]}
    expected = [
        {"token": token, "logprob": -1.5, "bytes": list(data), "top_logprobs": [x]}
        for token, data in
        [(" h", b" h"), ("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("!", b"!"), ("<end>", b"<end>")]
    ]  # fmt: skip
    assert whole["output"][1]["content"][0]["logprobs"] == expected
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], len(event["logprobs"])) for event in deltas] == [(" h", 1), ("\u00e9!", 3), ("", 1)]
    assert [request.sampling_params.logprobs for request in router.requests] == [1, 1, 0, 0, 0]
    assert plain["output"][1]["content"][0]["logprobs"] == expected, "this router tells alternatives anyway"
    assert [each["token"] for each in called["output"][0]["content"][0]["logprobs"]] == ["a"]


async def test_an_answer_that_ends_at_once_has_the_logprobs_of_its_end() -> None:
    """As a chat's."""
    async with gateway() as (router, http):
        router.script = saying(told(0, b"<end>"))
        whole, events = await ask(http, input="Hi", include=LOGPROBS)
    [message] = whole["output"]
    assert [(part["text"], len(part["logprobs"])) for part in message["content"]] == [("", 1)]
    assert kinds_of(events)[2:5] == ["output_item.added", "content_part.added", "output_text.delta"]


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
    ([{"role": "user", "content": [text_part("H"), text_part("i")]}], [SAID_USER]),
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
      pb.ChatMessage(role="tool", content="sun", tool_call_id="call_0")]),
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
    """Those of one answer are one message; it goes on after calls, until it hears what came of them."""
    async with gateway() as (router, http):
        for items, messages in CONVERTED:
            assert await messages_sent(http, router, input=items) == messages
            instructed = await messages_sent(http, router, input=items, instructions="First.")
            assert instructed == [pb.ChatMessage(role="system", content="First."), *messages]


def test_thousands_of_items_that_are_one_message_are_added_up_in_a_moment() -> None:
    said = MessageItem(role="assistant", content=42 * "a")
    items = [CallItem(type="function_call", call_id="c", name="f", arguments="{}"), *[said] * 40_000]
    begun_s = time.process_time()
    [message] = messages_of(None, items)
    assert time.process_time() - begun_s < 1, "each text is copied once"
    assert len(message.to_prompt()["content"]) == 42 * 40_000


async def test_what_was_answered_can_be_sent_back_as_clients_do() -> None:
    """As OpenAI's client dumps it, with nulls and with what it made of arguments beside."""
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
    [request] = router.requests[4:]
    assert answer.json()["id"] == "resp_named"
    assert answer.headers["x-request-id"] == request.request_id == "named"
    assert request.sampling_params.structured_outputs.regex == "a+"
    got = {name: getattr(request.sampling_params, name) for name in sampling}
    assert got == {name: value if name != "stop" else ["x"] for name, value in sampling.items()}
    assert (request.cache_salt, request.fairness_id) == ("s", "u")
    assert request.chat.template_kwargs == '{"enable_thinking": false}'


async def test_null_is_absent_and_what_asks_for_nothing_is_let_through() -> None:
    nulls = {name: None for name, field in ResponseRequest.model_fields.items() if not field.is_required()}
    neutral = {
        "n": 1, "store": False, "background": False, "truncation": "disabled", "reasoning": {"effort": None},
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
        request.sampling_params.ClearField("seed")  # drawn by the client, so that a resumed answer goes on alike
    assert all(each.sampling_params == router.requests[-1].sampling_params for each in router.requests)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "must be a text, or a list of items, is null"),
    ({"input": 5}, "input", "must be a text, or a list of items, is 5"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [5]}, "input[0]", "must be an item of one of the types message, reasoning, function_call, function"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", 'is of type "item_reference"'),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "must have an item that says something"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "must be one of system, developer, user, as"),
    ({"input": [USER, {"role": "user"}]}, "input[1].content", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content",
     "may have parts of type 'input_text' or 'output_text' alone, has one of type 'input_image'"),
    ({"input": [{"role": "user", "content": [text_part("a"), {"type": "input_text"}]}]}, "input[0].content[1].text",
     "required"),
    ({"input": [{**USER, "audio": {}}]}, "input[0].audio", "knows"),
    ({"input": [result_item(0, [{"type": "input_file"}])]}, "input[0].output", "'input_text' alone, has one of"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "required"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content",
     "is not supported; it cannot be read here"),
    ({"instructions": [USER]}, "instructions", "valid string"),
    ({"tools": [{"type": "web_search", "user_location": {}}]}, "tools[0].type", "alone, is 'web_search'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "required"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading", "it may be false"),
    ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto", "required" or {"type": "function", "na'),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", 'must be "none", "auto"'),
    ({"tool_choice": "required"}, "tool_choice", "is of no use without tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_object"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "a schema goes with type 'json_s"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format", "a schema goes with type 'json_schema'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text",
     "cannot be had with structured_outputs"),
    ({"include": ["file_search_call.results"]}, "include", "has 'file_search_call.results'"),
    ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", 'is of no use without include: ["message.output_text.logprobs"]'),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "knows"),
    ({"reasoning": {"effort": "low"}}, "reasoning", 'chat_template_kwargs: {"reasoning_effort": ...}'),
    ({"reasoning_effort": "low"}, "reasoning_effort", 'chat_template_kwargs: {"reasoning_effort": ...}'),
    ({"store": True}, "store", "is not supported; it may be false; nothing is kept"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept: give what was said before"),
    ({"conversation": "c"}, "conversation", "nothing is kept"),
    ({"background": True}, "background", "it may be false"),
    ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"truncation": "auto"}, "truncation", 'it may be "disabled"'),
    ({"max_tool_calls": 3}, "max_tool_calls", "is not supported"),
    ({"max_tokens": 3}, "max_tokens", "the bound is max_output_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", "it is text.format"),
    ({"messages": [USER]}, "messages", "what is said is input"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "valid integer"),
    ({"n": 2}, "n", "it may be 1"),
    ({"metadata": "a"}, "metadata", "should be an object"),
    ({"best_of": 2}, "best_of", "is not a parameter that this server knows"),
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
    """In JSON's schemas a kind that is anything would be a second one of each, of which there may be one alone."""
    async with gateway() as (_, http):
        described = (await http.get("/openapi.json")).json()
    [_, items] = described["components"]["schemas"]["ResponseRequest"]["properties"]["input"]["oneOf"]
    kinds = [f"#/components/schemas/{name}" for name in ("MessageItem", "ReasoningItem", "CallItem", "CallOutputItem")]
    assert items["items"]["oneOf"] == [*({"$ref": kind} for kind in kinds), {"not": {}}]


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", retry_after_s=1.2), 429, "2"),
        (Draining("leaving", retry_after_s=0.1), 503, "1"),
        (InvalidRequest([("model", "must be 'the-model'")]), 404, None),
        (InternalError("a bug"), 500, None),
    ],
    ids=["overloaded", "draining", "model", "bug"],
)
async def test_what_fails_before_the_first_byte_is_a_status(
    error: TandemError, status: int, retry_after: str | None, is_stream: bool
) -> None:
    async with gateway() as (router, http):
        router.script = failing(error)
        answer = await http.post(PATH, json={"input": "a", "stream": is_stream})
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Draining("leaving"), "server_error", "leaving"),
        (Overloaded("full"), "rate_limit_exceeded", "full"),
        (RequestCancelled("aborted"), "server_error", "aborted"),
        (InvalidRequest([("chat", "is wrong")]), "invalid_prompt", "input: is wrong"),
    ],
)
async def test_what_fails_later_is_the_last_event(error: TandemError, code: str, message: str) -> None:
    async with gateway() as (router, http):
        router.script = failing(error, after=2)
        answer = await http.post(PATH, json={"input": "a", "stream": True}, headers=NAMED)
        whole = await http.post(PATH, json={"input": "a"})
    *events, failed = events_of(answer.text)
    assert answer.status_code == 200
    assert kinds_of(events)[-2:] == ["output_text.delta", "output_text.delta"]
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": code, "message": message})
    assert response["output"] == [message_item(0, "aa", "incomplete")]
    assert response["usage"] is None
    assert whole.status_code != 200


async def test_a_stream_that_is_not_exact_is_never_shown_as_an_answer() -> None:
    """A gap; and more of a call, after it was told that it is over."""
    scripts = [
        saying(piece(0, 1, text="a"), piece(2, 3, text="c")),
        saying(piece(0, 1, tool_calls=begins(0)), piece(1, 2, text="a"), piece(2, 3, tool_calls=goes_on(0, "{"))),
        saying(piece(0, 1, tool_calls=[*begins(0), *begins(1)]), piece(1, 2, tool_calls=goes_on(0, "{"))),
    ]
    async with gateway() as (router, http):
        for script in scripts:
            router.script = script
            whole = await http.post(PATH, json={"input": "a", "tools": [WEATHER]})
            events = events_of((await http.post(PATH, json={"input": "a", "stream": True})).text)
            assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
            assert kinds_of(events)[-1] == "failed"
            assert "a bug of the server" in events[-1]["response"]["error"]["message"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_outlasts_the_grace_ends_with_the_reason(is_stream: bool) -> None:
    async with gateway(drain_grace_s=0.3) as (router, http):
        router.script = router.endless
        asked = asyncio.create_task(http.post(PATH, json={"input": "a", "stream": is_stream}))
        while not router.num_open:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.01)
        router.stop.set()
        answer = await asked
        await router.all_closed.wait()
    error = events_of(answer.text)[-1]["response"]["error"] if is_stream else answer.json()["error"]
    assert answer.status_code == (200 if is_stream else 503)
    assert "this gateway is leaving" in error["message"]


async def wait_without_a_token(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    await asyncio.Event().wait()
    yield tokens(0, 1)


@pytest.mark.parametrize(("is_stream", "begins"), [(False, False), (True, True), (True, False)])
async def test_a_client_that_leaves_cancels_its_request(is_stream: bool, begins: bool) -> None:
    async with gateway() as (router, http):
        router.script = router.endless if begins else wait_without_a_token
        body = json.dumps({"input": "a", "stream": is_stream}).encode()
        host, port = http.base_url.host, http.base_url.port
        assert port is not None
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        if begins:
            await reader.readuntil(b"once")
        while not router.num_open:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.01)
        writer.close()
        async with asyncio.timeout(TIMEOUT_S / 2):
            await router.all_closed.wait()
        text = (await http.get("/metrics")).text
    status = 200 if begins else 499
    assert f'tandem:gateway_requests_total{{route="responses",status="{status}"}} 1.0' in text


# -- what all routes promise ------------------------------------------------------------------------------------------


async def test_headers_keys_bounds_and_counts_are_those_of_other_routes() -> None:
    async with gateway(api_key="secret", max_body_bytes=4096) as (router, http):
        key = {"authorization": "Bearer secret"}
        refused = await http.post(PATH, json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.post(PATH, json={"input": 5000 * "a"}, headers=key)).status_code == 413
        assert (await http.post(PATH, content=b'{"input": "a', headers=key)).status_code == 400
        headers = {**key, **NAMED, "x-request-timeout-ms": "5000", "x-gateway-inference-fairness-id": "tenant"}
        answer = await http.post(PATH, json={"input": "a", "user": "u"}, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"], answer.json()["id"]) == (200, "mine", "resp_mine")
        bad = await http.post(PATH, json={"input": "a"}, headers={**key, "x-request-timeout-ms": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout-ms")
        assert (await http.get(PATH, headers=key)).status_code == 405
        text = (await http.get("/metrics")).text
        assert 'tandem:gateway_requests_total{route="responses",status="200"} 1.0' in text
        assert "/v1/responses" in (await http.get("/openapi.json")).json()["paths"]
    [request] = router.requests
    assert (request.request_id, request.fairness_id) == ("mine", "tenant")
    [deadline_s] = router.deadlines_s
    assert deadline_s is not None
    assert 0 < deadline_s < 5.2
