"""Sends answers to HTTP clients: server-sent events, keep-alives between them, and clients that disconnect.

If a client disconnects, the task that waits here for the router is cancelled. This drops the gRPC streams, which
cancels their requests on every worker.

    request ──> while_connected(the first message, or the whole answer) ──> EventStream(events) ──> data: … data: [DONE]
                    ├─ disconnected: cancelled                                  ├─ disconnected: events are closed
                    └─ none for a while: the stream begins without it           └─ no event for a while: a keep-alive
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""A keep-alive that clients ignore."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""`json.dumps` with these options would make a new encoder each time."""


class Leaving(Exception):  # noqa: N818 - nothing is wrong
    """This process is ending and has waited for the answer long enough."""


class ClientGone(Exception):  # noqa: N818 - nothing is wrong
    """The client has disconnected; nobody reads an answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If the client disconnects first, cancels `work` and raises `ClientGone`.

    The request's body must have been read: this function only listens for the disconnect.
    """
    return await _unless(_wait_disconnected(receive), ClientGone, work)


async def while_staying(leaving: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. If `leaving` is set first, cancels `work` and raises `Leaving`."""
    return await _unless(leaving.wait(), Leaving, work)


async def _unless(other: Coroutine[Any, Any, object], error: type[Exception], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; raises `error` if `other` ends first. Cancels whichever has not ended."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(other)
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()
        await asyncio.wait({working, waiting})


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event that is named by its `type`."""
    name: str = value["type"]
    return f"event: {name}\n".encode() + event(value)


def to_json(value: dict[str, Any]) -> bytes:
    return _encode(value).encode()


class EventStream(Response):
    """Sends `events` as they come, and closes them in any case. A header keeps nginx from buffering them."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        *,
        keep_alive: bytes = COMMENT,
        keep_alive_s: float | None = None,
    ) -> None:
        """`keep_alive`: sent whenever nothing was sent for `keep_alive_s` seconds; None: never."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._sent_s = 0.0
        """When something was last sent, by the loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientGone, OSError):  # a server may raise OSError from `send` if the client is gone
            pass

    async def _send_all(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._sent_s = clock()
            living = None if self._keep_alive_s is None else asyncio.create_task(self._live(send, self._keep_alive_s))
            try:
                async for data in events:
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                if living is not None:
                    living.cancel()
                    await asyncio.wait({living})
            await send({"type": "http.response.body", "body": b""})

    async def _live(self, send: Send, every_s: float) -> None:
        clock = asyncio.get_running_loop().time
        with suppress(OSError):  # the client is gone, which `while_connected` handles
            while True:
                await asyncio.sleep(self._sent_s + every_s - clock())
                if self._sent_s + every_s <= clock():
                    self._sent_s = clock()
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})


async def until_leaving(items: AsyncGenerator[T, None], leaving: asyncio.Event) -> AsyncGenerator[T, None]:
    """Yield `items`, and close them. Raises `Leaving` as soon as `leaving` is set, even while waiting for an item."""
    waiting: asyncio.Timeout | None = None

    async def give_up() -> None:
        await leaving.wait()
        if waiting is not None:
            waiting.reschedule(0.0)

    # One task for all items: a task for each would be a third of a token's cost here.
    watch = asyncio.create_task(give_up())
    try:
        while not leaving.is_set():
            try:
                async with asyncio.timeout(None) as waiting:
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if leaving.is_set():
                    break
                raise
            finally:
                waiting = None
            yield item
        raise Leaving
    finally:
        watch.cancel()
        await items.aclose()


class Begun(AsyncIterator[T], Generic[T]):
    """Iterates over `items`, of which it has requested the first one already. The holder must call `aclose`, which also
    closes `items`."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._first: asyncio.Task[T] | None = asyncio.create_task(anext(items))

    async def wait_first(self, timeout_s: float | None) -> None:
        """Wait for the first item, at most `timeout_s` seconds (None: no limit). Raises the error that came instead of
        it."""
        assert self._first is not None
        done, _ = await asyncio.wait({self._first}, timeout=timeout_s)
        for first in done:
            first.result()

    async def __anext__(self) -> T:
        if self._first is None:
            return await anext(self._items)
        first, self._first = self._first, None
        return await first

    async def aclose(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait({self._first})
        await self._items.aclose()
