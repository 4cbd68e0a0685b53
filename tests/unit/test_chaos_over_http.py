"""What a soak reads from an HTTP stream, and how it judges the stream's end. A test scripts every byte of the
gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.chaos.asked import Asked, EndedAs, Ending, Heard, Way
from tandem.chaos.over_http import body_of, read_over_http

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(*parts: bytes) -> bytes:
    data = b"".join(parts)
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(index: int, token_ids: list[int], text: str, reason: str | None = None, **others: Any) -> bytes:
    """One event of a completion. `others` replaces fields of its logprobs."""
    logprobs = {
        "tokens": [f"token_id:{token_id}" for token_id in token_ids],
        "token_logprobs": [-0.5 * token_id for token_id in token_ids],
        "text_offset": [10 * token_id for token_id in token_ids],
        **others,
    }
    choice = {"index": index, "text": text, "token_ids": token_ids, "finish_reason": reason}
    choice["logprobs"] = logprobs if token_ids else None
    return event({"choices": [choice], "timings": {"attempts": 2}} if reason else {"choices": [choice]})


def chat(token_ids: list[int], delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "token_ids": token_ids, "logprobs": None, "finish_reason": reason}
    return event({"choices": [choice]})


@asynccontextmanager
async def gateway(*pieces: bytes) -> AsyncIterator[str]:
    """Sends `pieces` to every client, whatever it asks, and hangs up. Yields the gateway's address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def read(*pieces: bytes, n: int = 1, way: Way = Way.COMPLETIONS) -> tuple[Asked, Ending]:
    asked = Asked(7, [5], {"logprobs": 0} if way is Way.COMPLETIONS else {}, n, way)
    async with gateway(*pieces) as address:
        try:
            await read_over_http(address, asked)
        except EndedAs as ended:
            return asked, ended.ending
    return asked, Ending.ANSWERED


async def test_a_whole_answer_in_any_pieces() -> None:
    answer = (
        HEAD
        + chunk(completion(1, [4], "d"), completion(0, [1, 2], "a"), b": keep-alive\n\n")
        + chunk(completion(0, [3], "bc", "stop"))
        + chunk(completion(1, [], "", "length"), DONE)
        + END
    )
    for pieces in ([answer], [bytes([byte]) for byte in answer]):
        asked, ending = await read(*pieces, n=2)
        assert ending is Ending.ANSWERED
        assert asked.answers == {
            0: Heard([1, 2, 3], "abc", [(-0.5, 10), (-1.0, 20), (-1.5, 30)], "stop"),
            1: Heard([4], "d", [(-2.0, 40)], "length"),
        }
        assert asked.num_attempts == 2


async def test_a_chat() -> None:
    opening = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    told = chunk(opening, chat([1], {"content": "a"}), chat([2], {}, "length"), DONE)
    asked, ending = await read(HEAD, told, END, way=Way.CHATS)
    assert ending is Ending.ANSWERED
    assert asked.answers == {0: Heard([1, 2], "a", finish_reason="length")}


FIRST = completion(0, [1], "a")
LAST = completion(0, [2], "b", "stop")


@pytest.mark.parametrize(
    ("pieces", "ending", "came"),
    [
        ([], Ending.CUT, None),
        ([HEAD[:30]], Ending.CUT, None),
        ([HEAD, chunk(FIRST)], Ending.CUT, [1]),
        ([HEAD, chunk(FIRST), chunk(LAST)[:-20]], Ending.CUT, [1]),
        ([HEAD, chunk(FIRST, LAST)], Ending.CUT, [1, 2]),
        ([HEAD, chunk(FIRST, LAST, DONE)], Ending.ANSWERED, [1, 2]),
    ],
)
async def test_a_connection_that_ends_before_its_answer(
    pieces: list[bytes], ending: Ending, came: list[int] | None
) -> None:
    asked, seen = await read(*pieces)
    assert seen is ending
    assert (asked.answers[0].token_ids if asked.answers else None) == came


@pytest.mark.parametrize(
    "told",
    [
        chunk(FIRST, LAST),
        chunk(FIRST, DONE),
        chunk(FIRST, LAST, DONE, LAST),
        chunk(FIRST, LAST, LAST, DONE),
        chunk(FIRST, LAST, DONE, b"data: "),
        chunk(FIRST, b"data: nonsense\n\n"),
        chunk(event({"choices": [{}]})),
        chunk(completion(0, [1], "a", tokens=["token_id:2"]), LAST, DONE),
        chunk(completion(0, [1], "a", token_logprobs=[]), LAST, DONE),
        b"no chunk\r\n",
    ],
)
async def test_what_is_no_answer(told: bytes) -> None:
    """Complete as HTTP, yet part of an answer is missing, or something is too much or wrong."""
    _, ending = await read(HEAD, told, END)
    assert ending is Ending.WRONG


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        ("rate_limit_exceeded", Ending.OVERLOADED, Ending.WRONG),
        ("unavailable", Ending.UNAVAILABLE, Ending.GIVEN_UP),
        ("deadline_exceeded", Ending.HUNG, Ending.HUNG),
        ("internal_error", Ending.WRONG, Ending.WRONG),
        (None, Ending.WRONG, Ending.WRONG),
    ],
)
async def test_what_an_error_means(code: str | None, before: Ending, after: Ending) -> None:
    """As a status, in a stream that has just begun, and after some tokens."""
    error = {"error": {"message": "no", "type": "t", "param": None, "code": code}}
    body = json.dumps(error).encode()
    refused = b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    assert (await read(refused))[1] is before
    assert (await read(HEAD, chunk(event(error)), END))[1] is before
    assert (await read(HEAD, chunk(FIRST, event(error)), END))[1] is after


async def test_nobody_listens() -> None:
    async with gateway() as address:
        pass
    with pytest.raises(EndedAs) as ended:
        await read_over_http(address, Asked(7, [5], {}, way=Way.COMPLETIONS))
    assert ended.value.ending is Ending.NO_GATEWAY


def test_what_is_asked_is_what_the_gateway_knows() -> None:
    from gateway.requests import ChatRequest, CompletionRequest

    sampling = {"max_tokens": 4, "temperature": 0.8, "seed": 1, "stop": ["e"], "min_tokens": 4, "ignore_eos": True}
    completions = body_of(Asked(7, [5, 6], sampling, 3, Way.COMPLETIONS, "sql"))
    read = CompletionRequest.read(json.dumps(completions).encode())
    assert (read.prompts(), read.num_answers, read.model, read.stream) == ([[5, 6]], 3, "sql", True)
    chat = body_of(Asked(7, [{"role": "user", "content": "1 2"}], sampling, 1, Way.CHATS))
    asked = ChatRequest.read(json.dumps(chat).encode())
    assert (asked.model, asked.return_token_ids) == (None, True)
    assert {name: asked.sampling()[name] for name in sampling} == sampling  # type: ignore[literal-required]
