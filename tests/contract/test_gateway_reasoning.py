"""A model's reasoning over HTTP: in vLLM's fields, streamed and whole, and sent back by clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import events_of, gateway, last, tokens

from protos import tandem_inference_pb2 as pb
from rpc.errors import InvalidRequest

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "1+1?"}]}


async def thinking(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(request_id="r", token_ids=[1], reasoning="So")
    yield pb.GenerateResponse(request_id="r", offset=1, token_ids=[2])
    yield pb.GenerateResponse(request_id="r", offset=2, token_ids=[3], reasoning=" then.", text="Two")
    yield tokens(3, 4, text=".")
    yield last(4, num_thought=2)


async def test_a_thought_streamed_and_whole() -> None:
    async with gateway() as (router, http):
        router.script = thinking
        whole = (await http.post(CHAT, json=ASKED)).json()
        body = (await http.post(CHAT, json={**ASKED, "stream": True})).text
    (choice,) = whole["choices"]
    said = {"role": "assistant", "content": "Two.", "refusal": None, "reasoning": "So then."}
    assert (choice["message"], choice["finish_reason"]) == (said, "stop")
    assert whole["usage"]["completion_tokens"] == 4, "those of the thought as well"
    assert [event["choices"][0]["delta"] for event in events_of(body)[:-1]] == [
        {"role": "assistant", "content": ""}, {"reasoning": "So"}, {"reasoning": " then.", "content": "Two"},
        {"content": "."}, {},
    ]  # fmt: skip


async def test_a_thought_is_not_told_to_who_does_not_want_it() -> None:
    asked = {**ASKED, "include_reasoning": False}
    async with gateway() as (router, http):
        router.script = thinking
        whole = (await http.post(CHAT, json=asked)).json()
        as_stream = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = events_of((await http.post(CHAT, json=asked | as_stream)).text)
    (choice,) = whole["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, "Two.")
    deltas = [event["choices"][0]["delta"] for event in streamed[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Two."
    assert not any("reasoning" in delta for delta in deltas)
    for usage in (whole["usage"], streamed[-2]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}, "it was thought all the same"


async def test_an_answer_that_ends_within_its_thought_has_no_content() -> None:
    async def endless(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id="r", token_ids=[1], reasoning="Well")
        end = last(1, finish_reason=pb.FINISH_REASON_LENGTH)
        end.reasoning = " <"
        yield end

    async with gateway() as (router, http):
        router.script = endless
        (choice,) = (await http.post(CHAT, json=ASKED)).json()["choices"]
        body = (await http.post(CHAT, json={**ASKED, "stream": True})).text
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Well <", "")
    assert choice["finish_reason"] == "length"
    assert [event["choices"][0]["delta"] for event in events_of(body)[1:-1]] == [
        {"reasoning": "Well"}, {"reasoning": " <"},
    ]  # fmt: skip


def told(offset: int, *said: str, **fields: Any) -> pb.GenerateResponse:
    """Return a message with a token and its logprob for each text."""
    message = pb.GenerateResponse(request_id="r", offset=offset, token_ids=range(offset, offset + len(said)), **fields)
    for number, text in enumerate(said, offset):
        message.logprobs.add(sampled=pb.Logprob(token_id=number, logprob=-0.5, rank=1, token=text.encode()))
    return message


def calling(index: int) -> list[pb.ToolCallDelta]:
    return [pb.ToolCallDelta(index=index, id=f"c{index}", name="f", arguments="{}")]


SAID = [
    ([told(0, "<think>"), told(1, "So", reasoning="So"), told(2, "</", "think"), told(4, ">\n"), told(5, "\n"),
      told(6, "Tw", text="Tw"), told(7, "o", text="o"), told(8, "<end>")], ["Tw", "o", "<end>"]),
    ([told(0, "So", " th"), told(2, "en", "</think>", "\n", "Two", ".", reasoning="So then", text="Two."),
      told(7, "<", "b"), told(9, ">", text="<b>")], ["Two", ".", "<", "b", ">"]),
    ([told(0, "So", reasoning="So"), told(1, "</think>"), told(2, "<call>"), told(3, "f", tool_calls=calling(0)),
      told(4, "</call>"), told(5, "\n", "Now", text="Now"), told(7, "!", "<call>", text="!"),
      told(9, "f", tool_calls=calling(1)), told(10, "</call>")], ["Now", "!"]),
    ([told(0, "Two", "<call>", "f", text="Two", tool_calls=calling(0)), told(3, "</call>")], ["Two"]),
    ([told(0, "So", reasoning="So"), told(1, "</think>"), told(2, "<end>")], []),
    ([told(0, "<think>"), told(1, "\n\n"), told(2, "</think>"), told(3, "\n\n"), told(4, "<", text="<"),
      told(5, "b>", text="b>")], ["<", "b>"]),
    ([told(0, "Two", text="Two"), told(1, "<|end|>"), told(2, "<|start|>", "analysis"), told(4, "Hm", reasoning="Hm"),
      told(5, "<|message|>", "Three", text="\n\nThree")], ["Two", "Three"]),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "of_content"), SAID)
async def test_logprobs_are_of_the_tokens_of_the_content(
    messages: list[pb.GenerateResponse], of_content: list[str]
) -> None:
    """Not of thoughts, of calls or of the words around them; streamed and whole, and in the Responses API, too."""

    async def say(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        for message in messages:
            yield message
        yield last(sum(len(message.token_ids) for message in messages))

    async with gateway() as (router, http):
        router.script = say
        body = {**ASKED, "logprobs": True}
        (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
        events = events_of((await http.post(CHAT, json={**body, "stream": True})).text)[:-1]
        include = ["message.output_text.logprobs"]
        response = (await http.post("/v1/responses", json={"input": "1+1?", "include": include})).json()
    assert [each["token"] for each in choice["logprobs"]["content"]] == of_content
    streamed = [event["choices"][0] for event in events if event["choices"][0]["logprobs"]]
    assert [each["token"] for piece in streamed for each in piece["logprobs"]["content"]] == of_content
    for piece in streamed:
        assert piece["delta"].get("content", "").strip() in "".join(e["token"] for e in piece["logprobs"]["content"])
    texts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert [each["token"] for part in texts for each in part["logprobs"]] == of_content


async def test_one_who_does_not_think_has_no_thought() -> None:
    """A whole message still has the field, because vLLM's clients read it as an attribute; events have none."""
    async with gateway() as (_, http):
        (choice,) = (await http.post(CHAT, json=ASKED)).json()["choices"]
        body = (await http.post(CHAT, json={**ASKED, "stream": True})).text
    assert choice["message"]["reasoning"] is None
    assert "reasoning" not in body


async def test_what_a_chat_says_of_thoughts_travels() -> None:
    sent = [
        {"role": "assistant", "content": "a", "reasoning": "first"},
        {"role": "assistant", "content": "b", "reasoning_content": "second"},
        {"role": "assistant", "content": "c", "reasoning": {"no": "text"}, "reasoning_content": 3},
        {"role": "user", "content": "d", "reasoning": "of nobody"},
    ]
    async with gateway() as (router, http):
        router.script = thinking
        body = {**ASKED, "messages": [*ASKED["messages"], *sent], "chat_template_kwargs": {"enable_thinking": False}}
        answer = await http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        await http.post(CHAT, json={**ASKED, "chat_template_kwargs": None})
        first, second = router.requests
    assert first.chat.template_kwargs == '{"enable_thinking": false}'
    assert [message.reasoning for message in first.chat.messages] == ["", "first", "second", "", ""]
    assert second.chat.template_kwargs == ""


@pytest.mark.parametrize("wrong", ["no", [1]])
async def test_variables_that_are_no_object_are_refused(wrong: Any) -> None:
    async with gateway() as (router, http):
        refused = await http.post(CHAT, json={**ASKED, "chat_template_kwargs": wrong})
        completion = await http.post("/v1/completions", json={"prompt": "a", "chat_template_kwargs": {"a": 1}})
    assert (refused.status_code, completion.status_code) == (400, 400)
    assert refused.json()["error"]["param"] == completion.json()["error"]["param"] == "chat_template_kwargs"
    assert not router.requests


async def test_what_a_router_refuses_is_named_as_in_the_body() -> None:
    async def refuse(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        raise InvalidRequest([("chat.template_kwargs", "must not set tools")])
        yield

    async with gateway() as (router, http):
        router.script = refuse
        error = (await http.post(CHAT, json={**ASKED, "chat_template_kwargs": {"tools": 1}})).json()["error"]
    assert (error["param"], error["message"]) == (
        "chat_template_kwargs",
        "chat_template_kwargs: must not set tools",
    )
