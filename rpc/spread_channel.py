"""A channel to several peers behind one address, of which each call reaches one that can serve it. Owns no retries.

                ┌── connections to all, calls in turn to those that serve ── as soon as one is known that does
a call ── over ─┤
                └── one connection to anyone, who says why ── until then, and while none does
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rpc.channel import CONNECT_MS, open_blocking_channel, open_channel
from rpc.tls import ClientTLS

RENEW_CONNECTIONS_S = 300.0
"""So long those of a `SpreadChannel` are used for new calls."""
REOPEN_S = 5.0
"""And so long where nobody is found that serves: gRPC asks a name server that knew nothing of a name, or did not
answer, again after ever longer times, two minutes in the end, and cannot be told to ask sooner."""
_A_STREAM_S = 86_400.0
"""More than any stream lasts."""


class SpreadChannel:
    """Of peers behind one address: calls go in turn to those that serve `service`, and where none does to anyone, who
    says why. On the event loop; the caller closes it.

        connected to all ──renew_s──> connecting to all anew ──one serves there──> the new connections; the old ones
                       └──nobody serves there for REOPEN_S──> others, at once       close when their streams have ended

    gRPC asks a name server only when a connection is lost, and reads certificates when a channel is opened: without
    new ones, a peer that was added would get nothing, and a certificate that was renewed would run out.
    """

    def __init__(
        self, address: str, *, service: str, tls: ClientTLS | None = None, renew_s: float = RENEW_CONNECTIONS_S
    ) -> None:
        self._open = partial(_Spread, address, service, tls)
        self._renew_s = renew_s
        self._now = self._open()
        self._now_s = time.monotonic()
        """When its connections were opened."""
        self._served_s = self._now_s
        """When somebody served over them, as far as was seen; or when they were opened."""
        self._next: _Spread | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels, of which stubs are made."""
        return self._calling(lambda spread: spread.unary_unary(*described, **further))

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels."""
        return self._calling(lambda spread: spread.unary_stream(*described, **further))

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for spread in (self._now, self._next):
            if spread is not None:
                await spread.close()

    def _calling(self, describe: Callable[[_Spread], Any]) -> Any:
        """What is called with a request; `describe`: how, over some connections."""
        calls: WeakKeyDictionary[_Spread, Any] = WeakKeyDictionary()

        def call(*request: Any, **how: Any) -> Any:
            spread = self._newest()
            if spread not in calls:
                calls[spread] = describe(spread)
            return calls[spread](*request, **how)

        return call

    def _newest(self) -> _Spread:
        now_s = time.monotonic()
        if self._now.is_one_serving():
            self._served_s = now_s
        if now_s - self._served_s > REOPEN_S:
            self._go_on_with(self._open())
        elif self._next is not None and self._next.is_one_serving():
            self._go_on_with(self._next)
        elif self._next is None and now_s - self._now_s >= self._renew_s:
            self._next = self._open()
        return self._now

    def _go_on_with(self, spread: _Spread) -> None:
        for old in (self._now, self._next):
            if old is not None and old is not spread:
                closing = asyncio.create_task(old.close(_A_STREAM_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        self._now, self._next = spread, None
        self._now_s = self._served_s = time.monotonic()


class _Spread:
    """The connections of a `SpreadChannel`, as of one resolution of its address."""

    def __init__(self, address: str, service: str, tls: ClientTLS | None) -> None:
        # Streams take turns by themselves: with a question before each, all would be the same peer's.
        self._streams, self._questions = (open_channel(address, tls=tls, spread_service=service) for _ in range(2))
        for channel in (self._streams, self._questions):
            channel.get_state(try_to_connect=True)
        self._any = open_channel(address, tls=tls)

    def is_one_serving(self) -> bool:
        return all(_is_ready(channel) for channel in (self._streams, self._questions))

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        at_any = self._any.unary_unary(*described, **further)
        return _either(self._questions, self._questions.unary_unary(*described, **further), at_any)

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        at_any = self._any.unary_stream(*described, **further)
        return _either(self._streams, self._streams.unary_stream(*described, **further), at_any)

    async def close(self, grace_s: float | None = None) -> None:
        """Calls that run have `grace_s` seconds to end."""
        await asyncio.gather(*(channel.close(grace_s) for channel in (self._streams, self._questions, self._any)))


def _either(channel: grpc.aio.Channel, at_serving: Any, at_any: Any) -> Any:
    """How to call one that serves, if `channel` knows one by now, or anyone."""

    def call(*request: Any, **how: Any) -> Any:
        return (at_serving if _is_ready(channel) else at_any)(*request, **how)

    return call


def _is_ready(channel: grpc.aio.Channel) -> bool:
    return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class BlockingSpreadChannel:
    """As `SpreadChannel`, for code without an event loop, whose peers are listed: no name server is asked anew. Threads
    may share one; the caller closes it."""

    def __init__(self, address: str, *, service: str, tls: ClientTLS | None = None) -> None:
        self._serving = open_blocking_channel(address, tls=tls, spread_service=service)
        self._any = open_blocking_channel(address, tls=tls)
        self._heard = _Heard()
        self._lock = threading.Lock()
        self._is_listening = False
        """Or never will again."""

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels, of which stubs are made."""
        return self._calling(*(channel.unary_unary(*described, **further) for channel in (self._serving, self._any)))

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels."""
        return self._calling(*(channel.unary_stream(*described, **further) for channel in (self._serving, self._any)))

    def close(self) -> None:
        with self._lock:
            self._is_listening = True
            self._serving.unsubscribe(self._heard.note)
            for channel in (self._serving, self._any):
                channel.close()
        self._heard.is_known.set()  # nobody waits for it any more

    def _calling(self, at_serving: Any, at_any: Any) -> Any:
        def call(*request: Any, timeout: float | None = None, **how: Any) -> Any:
            begin_s, connect_s = time.monotonic(), CONNECT_MS / 1_000
            self._listen()
            self._heard.is_known.wait(connect_s if timeout is None else min(timeout, connect_s))
            left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin_s))
            return (at_serving if self._heard.is_one_serving else at_any)(*request, timeout=left_s, **how)

        return call

    def _listen(self) -> None:
        """From the first call on: gRPC has a thread for it, which fails aloud where its channel is closed at once."""
        with self._lock:
            if not self._is_listening:
                self._is_listening = True
                self._serving.subscribe(self._heard.note, try_to_connect=True)


class _Heard:
    """What is heard of peers. Has nothing of their channel, whose thread has this: who forgets to close it leaves none
    behind."""

    def __init__(self) -> None:
        self.is_one_serving = False
        self.is_known = threading.Event()
        """Whether one serves, by what is heard of all when they are connected to."""

    def note(self, state: grpc.ChannelConnectivity) -> None:
        self.is_one_serving = state is grpc.ChannelConnectivity.READY
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            self.is_known.set()
