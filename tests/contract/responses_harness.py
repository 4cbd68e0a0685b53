"""Reads answers of /v1/responses with the types of OpenAI's own client, and scripts a router's messages for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import openai
from gateway_harness import Script, last
from openai.lib.streaming.responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from protos import tandem_inference_pb2 as pb

PATH = "/v1/responses"
NAMED = {"x-request-id": "mine"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function", "name": "weather", "description": "Now.", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
LOGPROBS = ["message.output_text.logprobs"]


def events_of(body: str) -> list[dict[str, Any]]:
    """Return a stream's events. Check that each has its name and its sequence number, and fits OpenAI's types."""
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
    """Return the items that the deltas add up to. Check that the events at an item's end agree with its deltas."""
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
    """Return the whole answer and the events of a stream; check that both agree."""
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


def saying(
    *messages: pb.GenerateResponse, finish_reason: pb.FinishReason = pb.FINISH_REASON_STOP, num_thought: int = 0
) -> Script:
    """Return a script that sends these messages and then the end."""

    async def script(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        num_tokens = 0
        for message in messages:
            num_tokens += len(message.token_ids)
            yield message
        yield last(num_tokens, finish_reason=finish_reason, num_thought=num_thought)

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
