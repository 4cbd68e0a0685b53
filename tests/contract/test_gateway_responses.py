"""OpenAI's Responses API over HTTP, streamed and whole: answers and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from gateway_harness import TIMEOUT_S, failing, gateway, slowly, tokens
from openai.types.responses import Response
from responses_harness import (
    LOGPROBS,
    NAMED,
    PATH,
    WEATHER,
    ask,
    begins,
    call_item,
    events_of,
    goes_on,
    kinds_of,
    message_item,
    piece,
    saying,
    thought_item,
)

from protos import tandem_inference_pb2 as pb
from rpc.errors import Draining, InternalError, InvalidRequest, Overloaded, RequestCancelled, TandemError

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
            piece(5, 6, text="Two"), piece(6, 7, text="."), num_thought=3,
        )  # fmt: skip
        whole, events = await ask(http, input="1+1?")
    assert whole["output"] == [thought_item(0, "So then."), message_item(1, "Two.")]
    assert kinds_of(events)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
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
    """A router's message that ends a call may also begin the next item."""
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
    """Return a message with a token for each text, each with the one alternative "x"."""
    message = tokens(offset, *range(offset, offset + len(entries)))
    message.MergeFrom(pb.GenerateResponse(**said))
    for number, token in enumerate(entries, offset):
        sampled = pb.Logprob(token_id=number, logprob=-1.5, rank=2, token=token)
        message.logprobs.add(sampled=sampled, top=[pb.Logprob(token_id=99, logprob=-0.25, rank=1, token=b"x")])
    return message


async def test_logprobs_of_what_a_text_is_made_of() -> None:
    """A character's first tokens come before its text, an end token has no text; a thought's logprobs are left out."""
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
    """Like a chat."""
    async with gateway() as (router, http):
        router.script = saying(told(0, b"<end>"))
        whole, events = await ask(http, input="Hi", include=LOGPROBS)
    [message] = whole["output"]
    assert [(part["text"], len(part["logprobs"])) for part in message["content"]] == [("", 1)]
    assert kinds_of(events)[2:5] == ["output_item.added", "content_part.added", "output_text.delta"]


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
    error: TandemError, status: int, retry_after: str | None, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.resume.ANOTHER_ROUTER_S", 0.1)
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
    """A stream with a gap, or with more of a call after the call has ended."""
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
            assert "internal server error" in events[-1]["response"]["error"]["message"]


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
    assert "this gateway is shutting down" in error["message"]


async def test_comments_before_and_between_tokens_are_no_part_of_the_answer() -> None:
    async with gateway(sse_keep_alive_s=0.05) as (router, http):
        router.script = slowly
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=http)
        chat = await client.chat.completions.create(
            model="the-model", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "one two"
        async with client.responses.stream(model="the-model", input="Hi") as stream:
            assert (await stream.get_final_response()).output_text == "one two"


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
    async with gateway(api_key=("secret",), max_body_bytes=4096) as (router, http):
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
