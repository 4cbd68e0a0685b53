"""Streams that are not exact: what `tandem bench` finds, over HTTP and over gRPC, and how it reads servers'
refusals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import numpy as np
import pytest

from protos import tandem_inference_pb2 as pb
from rpc.errors import DeadlinePassed, Draining, InternalError, Overloaded, TandemError, Unreachable
from tandem.answer import AnswerStream, StreamBroken
from tandem.bench.backends import WORDS, GrpcBackend, HttpServer, OpenAIBackend, Sending
from tandem.bench.openai_stream import DONE, OpenAIStream, ServerError
from tandem.bench.outcome import BROKEN_STREAM, WRONG_LENGTH, Outcome, Usage
from tandem.bench.run import run_load
from tandem.bench.workload import Request, Workload

REQUEST = Request(at_s=0.0, prompt=np.array([500, 501, 502], dtype=np.int32), output_tokens=3)


# -- OpenAI's events --------------------------------------------------------------------------------------------


def event(text: str | None, count: int | None = None, finish: str | None = None, **further: Any) -> dict[str, Any]:
    """A piece of text; `count` is the number of tokens so far."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, **further}
    found: dict[str, Any] = {"id": "cmpl-1", "choices": [choice]}
    if count is not None:
        found["usage"] = usage(count)
    return found


def usage(count: int, cached: int | None = 2) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count, "prompt_tokens_details": details,
    }  # fmt: skip


def last(count: int) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [], "usage": usage(count)}


A, B, C = event("a", 1), event("b", 2), event("c", 3, "length")
EXACT: list[Any] = [A, B, C, last(3), DONE]


def read(*events: Any, is_chat: bool = False) -> tuple[int, Usage]:
    stream = OpenAIStream(is_chat=is_chat)
    num_tokens = sum(stream.accept(e if isinstance(e, str) else json.dumps(e)) for e in events)
    return num_tokens, stream.check_ended()


def test_an_exact_stream_is_counted() -> None:
    assert read(*EXACT) == (3, Usage(3, 3, 2))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([A, C, A, last(3), DONE], "a piece of text came after the end"),
        ([A, B, B, C, last(3), DONE], "stayed 2: repeated"),
        ([A, B, A, C, last(3), DONE], "went back by 1"),
        ([A, B, event("c", 3, "stop"), C, last(3), DONE], "a second end came after the end"),
        ([A, B, event("", None, "stop"), last(3), DONE], "2 tokens came, 3 were counted"),
        ([A, B, C, last(4), DONE], "3 tokens came, 4 were counted"),
        ([A, B, C, last(2), DONE], "3 tokens came, 2 were counted"),
        ([A, B, last(2), DONE], "the usage came before the end"),
        ([A, B, DONE], "before the end"),
        ([A, B, event("c", None, "length"), DONE], "and no usage"),
        ([A, B, C, last(3), last(3), DONE], "the usage came twice"),
        ([*EXACT, DONE], "after"),
        ([*EXACT, A], "after"),
        ([A, B, C, last(3)], "ended without"),
        ([], "ended without"),
        ([A, {**B, "id": "cmpl-2"}], "another answer"),
        ([event("a", 1, index=1)], "a choice that was not asked for"),
        ([A, "{"], "not JSON"),
        ([A, "[]"], "no object"),
        ([A, B, C, {"id": "cmpl-1", "choices": [], "usage": {**usage(3), "total_tokens": 7}}], "add up"),
    ],
)
def test_what_is_not_exact_is_found(events: list[Any], said: str) -> None:
    with pytest.raises(StreamBroken, match=said):
        read(*events)


def usage_with(**odd: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [], "usage": {**usage(3), **odd}}


def usage_without(name: str) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [], "usage": {key: value for key, value in usage(3).items() if key != name}}


def cached(value: Any) -> dict[str, Any]:
    return usage_with(prompt_tokens_details={"cached_tokens": value})


ODD = [
    ([A, B, C, cached("2"), DONE], "cached_tokens is no count of tokens: '2'"),
    ([A, B, C, cached(1.5), DONE], "cached_tokens is no count of tokens: 1.5"),
    ([A, B, C, cached(True), DONE], "cached_tokens is no count of tokens: True"),
    ([A, B, C, cached(-1), DONE], "cached_tokens is no count of tokens: -1"),
    ([A, B, C, cached(4), DONE], "4 of 3 prompt tokens were cached"),
    ([A, B, C, usage_with(prompt_tokens=-3, total_tokens=0), DONE], "prompt_tokens is no count of tokens: -3"),
    ([A, B, C, usage_with(prompt_tokens="3"), DONE], "prompt_tokens is no count of tokens: '3'"),
    ([A, B, C, usage_with(prompt_tokens=None), DONE], "prompt_tokens is no count of tokens: None"),
    ([A, B, C, usage_without("prompt_tokens"), DONE], "the usage has no prompt_tokens"),
    ([A, B, C, usage_without("completion_tokens"), DONE], "the usage has no completion_tokens"),
    ([A, B, C, usage_with(completion_tokens=[3]), DONE], r"completion_tokens is no count of tokens: [3]"),
    ([A, B, C, usage_with(prompt_tokens_details=[2]), DONE], "prompt_tokens_details is no object: [2]"),
    ([A, B, C, usage_with(prompt_tokens_details=0), DONE], "prompt_tokens_details is no object: 0"),
    ([A, B, C, {"id": "cmpl-1", "choices": [], "usage": [3, 3]}, DONE], "usage is no object: [3, 3]"),
    ([{**A, "usage": 1}], "usage is no object: 1"),
    ([{**A, "usage": {"prompt_tokens": 3}}], "the usage has no completion_tokens"),
    ([{**A, "usage": {**usage(1), "completion_tokens": None}}], "completion_tokens is no count of tokens: None"),
    ([{**A, "choices": {"0": "a"}}], "choices is no list of objects: {'0': 'a'}"),
    ([{**A, "choices": ["a"]}], "choices is no list of objects: ['a']"),
    ([{**A, "choices": 7}], "choices is no list of objects: 7"),
    ([event("a", 1, token_ids=5)], "token_ids is no list: 5"),
]


@pytest.mark.parametrize(("events", "said"), ODD)
async def test_what_has_no_known_form_is_a_broken_stream_in_plain_words(events: list[Any], said: str) -> None:
    outcome = await over_http(lambda _: answer(*events))
    assert (outcome.code, outcome.message) == (BROKEN_STREAM, said)


def test_a_delta_that_is_no_object_is_a_broken_stream() -> None:
    with pytest.raises(StreamBroken, match="delta is no object: 'a'"):
        read(event(None, 1, delta="a"), is_chat=True)


async def test_a_completion_has_the_prompt_that_was_sent() -> None:
    """Checked only if the client knows the prompt's length: not for a chat, a text, or a prompt that the server is to
    cut."""
    other = usage_with(prompt_tokens=4, total_tokens=7)
    events = [A, B, C, other, DONE]
    outcome = await over_http(lambda _: answer(*events))
    assert (outcome.code, outcome.message) == (
        BROKEN_STREAM, "a prompt of 3 tokens was sent, 4 prompt tokens were counted",
    )  # fmt: skip
    for extra_body in ({"prompt": "a text"}, {"prompt": [1, 2, 3, 4]}, {"truncate_prompt_tokens": 4}):
        outcome = await over_http(lambda _: answer(*events), extra_body=extra_body)
        assert outcome.is_answered, outcome.message
    pieces = [event(None, n, "length" if n == 3 else None, delta={"content": "x"}) for n in (1, 2, 3)]
    assert (await over_http(lambda _: answer(*pieces, other, DONE), is_chat=True)).is_answered


def test_with_token_ids_a_gap_and_a_repetition_show() -> None:
    def piece(ids: list[int], count: int, finish: str | None = None) -> dict[str, Any]:
        return event("x", count, finish, token_ids=ids)

    assert read(piece([5, 6], 2), piece([7], 3, "length"), last(3), DONE) == (3, Usage(3, 3, 2))
    with pytest.raises(StreamBroken, match="1 tokens came where the count went up by 2"):
        read(piece([5], 1), piece([7], 3, "length"), last(3), DONE)
    with pytest.raises(StreamBroken, match="2 tokens came where the count went up by 1"):
        read(piece([5], 1), piece([5, 6], 2, "length"), last(2), DONE)


def test_a_server_that_counts_only_at_the_end_is_believed_within_reason() -> None:
    """A piece may hold several tokens, but never none."""
    pieces = [event("a"), event("b"), event("c", finish="length")]
    assert read(*pieces, last(5), DONE) == (3, Usage(3, 5, 2))
    with pytest.raises(StreamBroken, match="3 tokens came, 2 were counted"):
        read(*pieces, last(2), DONE)


def test_the_usage_may_come_with_the_end_and_nowhere_else() -> None:
    """As llama.cpp sends it. An answer of one token counts as one, even if its text is empty."""
    pieces = [event("a"), event("b")]
    assert read(*pieces, event("", 2, "length"), DONE) == (2, Usage(3, 2, 2))
    assert read(event("", 1, "length"), DONE) == (1, Usage(3, 1, 2))
    assert read(A, B, C, DONE) == (3, Usage(3, 3, 2))
    with pytest.raises(StreamBroken, match="2 tokens came, 1 were counted"):
        read(*pieces, event("", 1, "length"), DONE)


def test_text_held_back_may_come_with_the_end() -> None:
    assert read(event("a", 1), event("", 2), event("bc", 2, "stop"), last(2), DONE)[0] == 2


def test_a_chat_opens_with_a_role_and_may_think_aloud() -> None:
    def piece(delta: dict[str, Any], count: int | None, finish: str | None = None) -> dict[str, Any]:
        return event(None, count, finish, delta=delta)

    opening = piece({"role": "assistant", "content": ""}, None)
    pieces = [opening, piece({"reasoning_content": "hm"}, 1), piece({"content": "b"}, 2), piece({}, 2, "stop")]
    assert read(*pieces, last(2), DONE, is_chat=True) == (2, Usage(3, 2, 2))
    uncounted = [opening, piece({"content": "b"}, None), piece({}, None, "stop"), last(1), DONE]
    assert read(*uncounted, is_chat=True)[0] == 1


def test_an_error_in_the_stream_is_no_answer() -> None:
    with pytest.raises(ServerError, match="the worker died") as failed:
        read(A, {"error": {"message": "the worker died", "type": "server_error", "code": "unavailable"}})
    assert failed.value.code == "unavailable"


def test_a_server_may_keep_its_cache_to_itself() -> None:
    closing = {"id": "cmpl-1", "choices": [], "usage": usage(3, cached=None)}
    assert read(A, B, C, closing, DONE)[1] == Usage(3, 3, None)


# -- over HTTP --------------------------------------------------------------------------------------------------


async def over_http(
    handle: Callable[[httpx2.Request], Any],
    *,
    is_chat: bool = False,
    ignores_eos: bool = True,
    extra_body: dict[str, Any] | None = None,
    timeout_s: float = 5.0,
) -> Outcome:
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(handle), base_url="http://server") as client:
        server = HttpServer(base_url="http://server", model="m", is_chat=is_chat, extra_body=extra_body or {})
        backend = OpenAIBackend(client, server, Sending(ignores_eos=ignores_eos, timeout_s=timeout_s))
        (outcome,) = await run_load(Workload(requests=[REQUEST], request_rate=1.0), backend)
    return outcome


def answer(*events: Any) -> httpx2.Response:
    lines = [f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events]
    return httpx2.Response(200, text=": a comment\n\n" + "".join(lines))


async def test_a_completion_is_asked_for_as_vllm_wants_it() -> None:
    asked: list[httpx2.Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return answer(*EXACT)

    outcome = await over_http(handle, extra_body={"return_token_ids": True})
    assert (outcome.is_answered, outcome.num_tokens, len(outcome.arrived_s)) == (True, 3, 3)
    assert asked[0].url.path == "/v1/completions"
    assert json.loads(asked[0].content) == {
        "model": "m", "prompt": [500, 501, 502], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }  # fmt: skip
    assert asked[0].headers["x-request-timeout-ms"] == "5000"


async def test_a_chat_says_a_word_for_each_token() -> None:
    asked: list[httpx2.Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        pieces = [{**event(None, n), "choices": [{"delta": {"content": "x"}}]} for n in (1, 2)]
        return answer(*pieces, event(None, 3, "length", delta={"content": "y"}), last(3), DONE)

    outcome = await over_http(handle, is_chat=True)
    assert outcome.is_answered, outcome.message
    assert asked[0].url.path == "/v1/chat/completions"
    (message,) = json.loads(asked[0].content)["messages"]
    assert message["content"].split() == [WORDS[n % len(WORDS)] for n in (500, 501, 502)]


@pytest.mark.parametrize(("status", "is_refused"), [(429, True), (503, True), (400, False), (500, False), (504, False)])
async def test_refusals_are_no_failures(status: int, is_refused: bool) -> None:
    body = {"error": {"message": "no  room\nnow", "type": "t", "code": None}}
    outcome = await over_http(lambda _: httpx2.Response(status, json=body))
    assert (outcome.code, outcome.is_refused, outcome.message) == (str(status), is_refused, "no room now")


async def test_what_goes_wrong_over_http_has_a_name() -> None:
    def gone(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    assert (await over_http(gone)).code == "ConnectError"
    assert (await over_http(lambda _: answer(A, C, A))).code == BROKEN_STREAM
    assert (await over_http(lambda _: answer(A, B))).code == BROKEN_STREAM
    assert (await over_http(lambda _: answer(A, {"error": {"message": "x", "code": "boom"}}))).code == "boom"
    assert (await over_http(lambda _: httpx2.Response(500, text="<html>"))).code == "500"
    short = [event("a", 1), event("b", 2, "stop"), last(2), DONE]
    assert (await over_http(lambda _: answer(*short))).code == WRONG_LENGTH
    assert (await over_http(lambda _: answer(*short), ignores_eos=False)).is_answered


async def test_a_client_gives_up_in_time() -> None:
    async def stall(request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(30)
        return answer(*EXACT)

    started_s = time.monotonic()
    outcome = await over_http(stall, timeout_s=0.05)
    assert (outcome.code, outcome.is_refused) == ("timeout", False)
    assert time.monotonic() - started_s < 5


# -- over gRPC --------------------------------------------------------------------------------------------------


class ScriptedClient:
    """Stands in for an `AsyncClient`: its messages are scripted, the check of the stream is the real client's."""

    def __init__(self, messages: list[pb.GenerateResponse], error: TandemError | None = None) -> None:
        self._messages = messages
        self._error = error
        self.asked: dict[str, Any] = {}

    async def stream(self, prompt: list[int], **asked: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        self.asked = {"prompt": prompt, **asked}
        stream = AnswerStream()
        for message in self._messages:
            yield stream.accept(message)
        if self._error:
            raise self._error
        stream.check_ended()


def tokens(offset: int, *token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", offset=offset, token_ids=token_ids)


def end(offset: int) -> pb.GenerateResponse:
    counted = pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=offset)
    return pb.GenerateResponse(request_id="r", offset=offset, finish_reason=pb.FINISH_REASON_LENGTH, usage=counted)


async def over_grpc(messages: list[pb.GenerateResponse], error: TandemError | None = None) -> Outcome:
    backend = GrpcBackend(ScriptedClient(messages, error), Sending())  # type: ignore[arg-type]
    (outcome,) = await run_load(Workload(requests=[REQUEST], request_rate=1.0), backend)
    return outcome


async def test_grpc_counts_what_came() -> None:
    outcome = await over_grpc([tokens(0, 1), tokens(1, 2, 3), end(3)])
    assert outcome.is_answered, outcome.message
    assert (outcome.num_tokens, len(outcome.arrived_s), outcome.usage) == (3, 2, Usage(3, 3, 1))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([tokens(0, 1), tokens(2, 3), end(3)], id="a gap"),
        pytest.param([tokens(0, 1), tokens(0, 1), tokens(1, 2, 3), end(3)], id="a repetition"),
        pytest.param([tokens(0, 1, 2, 3), end(3), end(3)], id="two ends"),
        pytest.param([tokens(0, 1, 2, 3)], id="none"),
    ],
)
async def test_streams_over_grpc_that_are_not_exact(messages: list[pb.GenerateResponse]) -> None:
    outcome = await over_grpc(messages)
    assert (outcome.code, outcome.is_refused) == (BROKEN_STREAM, False)


async def test_an_answer_of_another_length_is_wrong() -> None:
    assert (await over_grpc([tokens(0, 1, 2), end(2)])).code == WRONG_LENGTH


@pytest.mark.parametrize(
    ("error", "code", "is_refused"),
    [
        (Overloaded("full"), "RESOURCE_EXHAUSTED", True),
        (Draining("leaving"), "UNAVAILABLE", True),
        (Unreachable("gone"), "UNAVAILABLE", False),
        (DeadlinePassed("late"), "timeout", False),
        (InternalError("bug"), "INTERNAL", False),
    ],
)
async def test_statuses_are_told_apart(error: TandemError, code: str, is_refused: bool) -> None:
    outcome = await over_grpc([], error)
    assert (outcome.code, outcome.is_refused, outcome.message) == (code, is_refused, error.message)
    begun = await over_grpc([tokens(0, 1)], error)
    assert (begun.code, begun.is_refused) == (code, False)
