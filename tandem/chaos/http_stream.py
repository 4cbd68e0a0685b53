"""One POST whose answer is a stream of server-sent events, over its own connection and as simple as possible: passes
events on as they come, and reports exactly how the stream ended.

    connect ──> ask ──> status ──> events ──> complete
       │                  │           └─ the connection ends before: HttpCut (so it does without a status)
       │                  └─ not 200: HttpRefused, with the body
       └─ nobody listens: HttpAway
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httptools

READ_BYTES = 64 * 1024
EVENT_END = b"\n\n"
DATA = b"data: "


class HttpAway(Exception):  # noqa: N818 - named for what happened
    """No connection could be made."""


class HttpCut(Exception):  # noqa: N818
    """The connection ended before the answer did."""


class HttpRefused(Exception):  # noqa: N818
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body


class HttpNonsense(Exception):  # noqa: N818
    """What came is not an HTTP answer."""


class _Answer:
    """The callbacks that httptools calls."""

    def __init__(self) -> None:
        self.body = bytearray()
        """The part of the body that has not been passed on yet."""
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    def events(self) -> Iterator[str]:
        """Yield the data of complete events, and remove them from the body."""
        while (end := self.body.find(EVENT_END)) >= 0:
            event = bytes(self.body[:end])
            del self.body[: end + len(EVENT_END)]
            if event.startswith(DATA):  # others are comments
                yield event[len(DATA) :].decode()


async def post(address: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncGenerator[str, None]:
    """Yield the data of each event. Closing the generator closes the connection. Raises this module's exceptions."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        raise HttpAway(str(error)) from error
    try:
        writer.write(_request(address, path, json.dumps(body).encode(), headers))
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.is_complete:
            _feed(parser, await _read(reader))
            if parser.get_status_code() == 200:
                for event in answer.events():
                    yield event
        if parser.get_status_code() != 200:
            raise HttpRefused(parser.get_status_code(), bytes(answer.body))
        if answer.body:
            raise HttpNonsense(f"it ends in the middle of an event: {bytes(answer.body[:200])!r}")
    finally:
        writer.close()


def _request(address: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    told = {"host": address, "content-type": "application/json", "content-length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items()), "", ""]
    return "\r\n".join(lines).encode() + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        data = await reader.read(READ_BYTES)
    except OSError as error:
        raise HttpCut(repr(error)) from error
    if not data:
        raise HttpCut("the connection was closed")
    return data


def _feed(parser: httptools.HttpResponseParser, data: bytes) -> None:
    try:
        parser.feed_data(data)
    except httptools.HttpParserError as error:
        raise HttpNonsense(f"{error}: {data[:200]!r}") from error
