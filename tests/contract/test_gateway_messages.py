"""Anthropic's Messages API over HTTP, with its own client, streamed and whole: answers and errors."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import httpx2 as httpx
import pytest
from gateway_harness import TIMEOUT_S, failing, gateway, slowly
from responses_harness import NAMED, begins, goes_on, piece, saying

from protos import tandem_inference_pb2 as pb
from rpc.errors import DeadlinePassed, Draining, InternalError, InvalidRequest, Overloaded, TandemError

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "weather", "description": "Now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _import() -> None:
    """Import only when the tests run: it takes seconds, which test collection need not wait for."""
    global anthropic
    import anthropic


def client_of(http: httpx.AsyncClient, **further: Any) -> anthropic.AsyncAnthropic:
    """Return a client that does not retry."""
    asked = {"api_key": "none", "max_retries": 0, "default_headers": NAMED, **further}
    return anthropic.AsyncAnthropic(base_url=str(http.base_url), http_client=http, **asked)


async def ask(http: httpx.AsyncClient, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the whole answer and the events of a stream; check that both agree."""
    client, asked = client_of(http), {"model": "the-model", "max_tokens": 9, "messages": HI, **body}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    events = [event async for event in await client.messages.create(**asked, stream=True)]
    assert final.model_dump(exclude={"timings"}) == whole.model_dump(exclude={"timings"})
    assert [event.type for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert whole._request_id == "mine"
    return whole.model_dump(exclude_none=True), events


def told(events: list[Any]) -> list[tuple[int, str]]:
    """Return the block index and the kind of each event of a block."""
    kinds = [(each.index, each.delta.type if "delta" in each.type else each.type) for each in events[1:-2]]
    return [(index, kind.removeprefix("content_block_")) for index, kind in kinds]


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_text_streamed_and_whole() -> None:
    async with gateway() as (router, http):
        whole, events = await ask(
            http, system=[{"type": "text", "text": "Be kind."}], stop_sequences=["x"], metadata={"user_id": "tenant"},
            extra_body={"temperature": 0.5, "top_k": 3},
        )  # fmt: skip
    assert told(events) == [(0, "start"), (0, "text_delta"), (0, "text_delta"), (0, "stop")]
    assert whole["content"] == [{"type": "text", "text": "hello you "}]
    assert (whole["id"], whole["type"], whole["role"], whole["model"]) == (
        "msg_mine", "message", "assistant", "the-model",
    )  # fmt: skip
    assert (whole["stop_reason"], whole.get("stop_sequence")) == ("end_turn", None)
    assert whole["usage"] == {
        "input_tokens": 1, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0, "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }  # fmt: skip
    assert whole["timings"]["decode_worker"] == "d"
    assert events[-2].timings == whole["timings"]
    sent = router.requests[0]
    assert [(m.role, m.content) for m in sent.chat.messages] == [("system", "Be kind."), ("user", "Hi")]
    params = sent.sampling_params
    assert (params.max_tokens, params.temperature, params.top_k, list(params.stop)) == (9, 0.5, 3, ["x"])
    assert not params.HasField("top_p"), "what was not given is the model's to say"
    assert (sent.fairness_id, sent.request_id) == ("tenant", "mine")


async def test_blocks_stand_in_the_order_in_which_they_were_said() -> None:
    async with gateway() as (router, http):
        router.script = saying(
            piece(0, 1, reasoning="Hm"), piece(1, 2, reasoning="m."), piece(2, 3, text="Well"),
            piece(3, 4, tool_calls=[*begins(0), *goes_on(0, '{"city":')]),
            piece(4, 5, tool_calls=[*goes_on(0, ' "Oslo"}'), *begins(1)]), piece(5, 6, tool_calls=goes_on(1, "{}")),
            num_thought=2,
        )  # fmt: skip
        whole, events = await ask(http, tools=[WEATHER])
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": "msg_mine"},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
    ]
    assert told(events) == [
        (0, "start"), (0, "thinking_delta"), (0, "thinking_delta"), (0, "signature_delta"), (0, "stop"),
        (1, "start"), (1, "text_delta"), (1, "stop"),
        (2, "start"), (2, "input_json_delta"), (2, "input_json_delta"), (2, "stop"),
        (3, "start"), (3, "input_json_delta"), (3, "stop"),
    ]  # fmt: skip
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


async def test_a_call_that_was_cut_off_has_what_there_is_of_it() -> None:
    cases: Any = [('{"city": "Oslo", "da', {"city": "Oslo"}), ("{", {}), ("", {}), ('{"city": 1e999}', {})]
    async with gateway() as (router, http):
        for arguments, read in cases:
            cut_off = piece(0, 1, tool_calls=[*begins(0), *goes_on(0, arguments)])
            router.script = saying(cut_off, finish_reason=pb.FINISH_REASON_LENGTH)
            whole = (await http.post(PATH, json={"max_tokens": 9, "messages": HI, "tools": [WEATHER]})).json()
            assert whole["content"] == [{"type": "tool_use", "id": "call_0", "name": "weather", "input": read}]
            assert whole["stop_reason"] == "max_tokens"
            if "e999" not in arguments:
                await ask(http, tools=[WEATHER])


async def test_why_an_answer_ended() -> None:
    async with gateway() as (router, http):
        router.script = saying(piece(0, 1, text="a"), finish_reason=pb.FINISH_REASON_LENGTH)
        assert (await ask(http))[0]["stop_reason"] == "max_tokens"
        router.script = saying(piece(0, 1), finish_reason=pb.FINISH_REASON_ABORT)
        whole, events = await ask(http)
        assert (whole.get("stop_reason"), whole["content"], told(events)) == (None, [], [])


# -- what is asked ----------------------------------------------------------------------------------------------------


async def test_what_was_said_before_reaches_the_template() -> None:
    """Blocks like those of answers, with the fields that clients add."""
    cached = {"cache_control": {"type": "ephemeral"}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Rain", **cached}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "msg_1"},
            {"type": "text", "text": "Let me look.", "citations": None},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "wet", **cached},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
             "content": [{"type": "text", "text": "?"}, {"type": "text", "text": "?"}]},
            {"type": "tool_result", "tool_use_id": "c3"},
            {"type": "text", "text": "So?"},
        ]},
        {"role": "system", "content": "Be brief."},
    ]  # fmt: skip
    async with gateway() as (router, http):
        await ask(
            http, messages=said, system="Be kind.", tools=[{**WEATHER, "type": "custom", **cached}],
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto",
            extra_body={"chat_template_kwargs": {"thinking": False}, "seed": 3, "cache_control": cached},
        )  # fmt: skip
        await ask(http, tools=[WEATHER], tool_choice={"type": "any"}, thinking={"type": "adaptive"})
        await ask(
            http, thinking={"type": "disabled"},
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        )  # fmt: skip
        await ask(http, extra_body={"output_format": {"type": "json_schema", "schema": {"type": "array"}}})
    first, second, third, fourth = router.requests[::3]
    assert [(each.role, each.content or each.parts) for each in first.chat.messages] == [
        ("system", "Be kind."), ("user", ["Rain", "?"]), ("assistant", "Let me look."), ("tool", "wet"),
        ("tool", ["?", "?"]), ("tool", []), ("user", "So?"), ("system", "Be brief."),
    ]  # fmt: skip
    answered = first.chat.messages[2]
    calls = [(call.id, call.name, call.arguments) for call in answered.tool_calls]
    assert (answered.reasoning, calls) == ("Hm.", [("c1", "weather", '{"city": "Oslo"}'), ("c2", "weather", "{}")])
    assert [each.tool_call_id for each in first.chat.messages[3:6]] == ["c1", "c2", "c3"]
    [tool] = first.chat.tools
    assert (tool.name, tool.description) == ("weather", "Now.")
    assert '"city"' in tool.parameters
    assert (first.chat.tool_choice, first.chat.tool_name) == (pb.TOOL_CHOICE_REQUIRED, "weather")
    assert first.chat.parallel_tool_calls is False
    assert first.chat.template_kwargs == '{"enable_thinking": true, "thinking": false}'
    assert first.sampling_params.seed == 3
    assert (second.chat.tool_choice, second.chat.tool_name) == (pb.TOOL_CHOICE_REQUIRED, "")
    assert (second.chat.parallel_tool_calls, second.chat.template_kwargs) == (True, "")
    assert third.chat.template_kwargs == '{"enable_thinking": false, "thinking": false}'
    assert third.sampling_params.structured_outputs.json == '{"type": "object"}'
    assert fourth.sampling_params.structured_outputs.json == '{"type": "array"}'


# -- what goes wrong --------------------------------------------------------------------------------------------------


STATUSES: list[tuple[TandemError, int, str, str | None]] = [
    (Overloaded("full", retry_after_s=1.2), 429, "rate_limit_error", "2"),
    (Draining("leaving", retry_after_s=0.1), 503, "overloaded_error", "1"),
    (InvalidRequest([("model", "must be 'the-model'")]), 404, "not_found_error", None),
    (DeadlinePassed("late"), 504, "timeout_error", None),
    (InternalError("a bug"), 500, "api_error", None),
]


async def test_what_fails_before_the_first_byte_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.resume.ANOTHER_ROUTER_S", 0.1)
    async with gateway() as (router, http):
        for (error, status, kind, retry_after), is_stream in product(STATUSES, [False, True]):
            router.script = failing(error)
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client_of(http).messages.create(model="m", max_tokens=9, messages=HI, stream=is_stream)
            told = caught.value
            assert (told.status_code, told.type, told.response.headers.get("retry-after")) == (
                status, kind, retry_after,
            )  # fmt: skip
            assert (told.request_id, told.body["request_id"]) == ("mine", "mine")  # type: ignore[index]


async def test_a_body_that_cannot_be_had_is_refused_by_name() -> None:
    async with gateway() as (_, http):
        client = client_of(http)
        asked: Any = {"model": "m", "messages": HI, "extra_body": {"colour": "red"}}
        for ask in (
            lambda: client.messages.create(max_tokens=9, **asked),
            lambda: client.messages.count_tokens(**asked),
        ):
            with pytest.raises(anthropic.BadRequestError, match="colour: is not a known parameter") as caught:
                await ask()
            assert (caught.value.type, caught.value.request_id) == ("invalid_request_error", "mine")
        answer = await http.post(PATH, json={"model": "m", "messages": HI})
        assert answer.json()["error"]["message"] == "max_tokens: must be given"
        answer = await http.post(PATH, content=b"{")
        assert (answer.status_code, answer.json()["type"]) == (400, "error")


async def read(stream: Any, events: list[Any]) -> None:
    async for event in stream:
        events.append(event)


async def test_what_fails_later_is_the_last_event() -> None:
    """Also for a stream with a gap."""
    scripts = [(failing(Draining("leaving"), after=2), "overloaded_error", "leaving"),
               (saying(piece(0, 1, text="a"), piece(2, 3, text="c")), "api_error", "internal server")]  # fmt: skip
    async with gateway() as (router, http):
        for router.script, kind, message in scripts:
            events: list[Any] = []
            stream = await client_of(http).messages.create(model="m", max_tokens=9, messages=HI, stream=True)
            with pytest.raises(anthropic.APIStatusError, match=message) as caught:
                await read(stream, events)
            assert caught.value.type == kind
            assert told([*events, None, None])[:2] == [(0, "start"), (0, "text_delta")]
            with pytest.raises(anthropic.APIStatusError):
                await client_of(http).messages.create(model="m", max_tokens=9, messages=HI)


async def test_pings_before_and_between_tokens_are_no_part_of_the_answer() -> None:
    async with gateway(sse_keep_alive_s=0.05) as (router, http):
        router.script = slowly
        asked: Any = {"model": "the-model", "max_tokens": 9, "messages": HI}
        async with client_of(http).messages.stream(**asked) as stream:
            assert await stream.get_final_text() == "one two"


async def test_a_client_that_leaves_cancels_its_request() -> None:
    async with gateway() as (router, http):
        router.script = router.endless
        stream = await client_of(http).messages.create(model="m", max_tokens=9, messages=HI, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        assert router.num_open == 1
        await stream.close()
        async with asyncio.timeout(TIMEOUT_S / 2):
            await router.all_closed.wait()


async def test_keys_bounds_and_routes() -> None:
    """Anthropic's key header works, too; other routes keep their own error format."""
    async with gateway(api_key=("secret",), max_body_bytes=4096) as (_, http):
        body = {"max_tokens": 9, "messages": HI}
        for wrong in ({}, {"x-api-key": "other"}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
            refused = await http.post(PATH, json=body, headers=wrong)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for right in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await http.post(PATH, json=body, headers=right)).status_code == 200
        key = {"x-api-key": "secret"}
        large = await http.post(PATH, json={**body, "messages": [{"role": "user", "content": 5000 * "a"}]}, headers=key)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        for path, status in ((PATH, 405), (f"{PATH}/batches", 404)):
            answer = await http.get(path, headers=key)
            assert (answer.status_code, answer.json()["type"]) == (status, "error")
        other = await http.post("/v1/completions", json={}, headers={"x-api-key": "other"})
        assert (other.status_code, other.json()["error"]["code"]) == (401, "invalid_api_key")
        text = (await http.get("/metrics")).text
        assert 'tandem:gateway_requests_total{route="messages",status="200"} 2.0' in text
        assert PATH in (await http.get("/openapi.json")).json()["paths"]
