"""A channel to several peers behind one address; each call goes to a peer that can serve it. No retries.

                ┌── connections to all, calls in turn to serving peers ── as soon as a serving peer is known
a call ── over ─┤
                └── one connection to any peer, which says why not ── until then, and while none serves
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.channel import connect_ms, open_blocking_channel, open_channel
from rpc.targets import addresses_of
from rpc.tls import ClientTLS

RENEW_CONNECTIONS_S = 300.0
"""How long connections of a `SpreadChannel` are used for new calls."""
REOPEN_S = 5.0
"""The same if no serving peer is found: after a failed DNS lookup, gRPC waits longer and longer before the next one, up
to two minutes, and cannot be told to do it sooner."""
HEARD_S = 1.0
"""How long a peer's health answer is used."""
_A_STREAM_S = 86_400.0
"""Longer than any stream lasts."""
CANCELLED_S = 1.0
"""The most time that calls take to end once they are cancelled."""


class SpreadChannel:
    """A channel to the peers behind one address: calls go in turn to those that serve `service`, or, if none does, to
    any peer, which says why not. Used on the event loop; the caller closes it.

        connected to all ──renew_s──> connecting to all anew ──one serves there──> the new connections; the old ones
                       └──nobody serves there for REOPEN_S──> others, at once       close when their streams have ended

    gRPC looks up names only when a connection is lost, and reads certificates when a channel is opened. Without new
    connections, added peers would get no calls, and a renewed certificate would not be used.
    """

    def __init__(
        self, address: str, *, service: str, tls: ClientTLS | None = None, renew_s: float = RENEW_CONNECTIONS_S
    ) -> None:
        self._open = partial(_Spread, address, service, tls)
        self._renew_s = renew_s
        self._now = self._open()
        self._now_s = time.monotonic()
        """When the current connections were opened."""
        self._served_s = self._now_s
        """When a peer was last seen to serve over them; or when they were opened."""
        self._next: _Spread | None = None
        self._closing: dict[asyncio.Task[None], _Spread] = {}
        """Connections over which streams still run, by the tasks that wait for these to end."""

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels, of which stubs are made."""
        return self._calling(lambda spread: spread.unary_unary(*described, **further))

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels."""
        return self._calling(lambda spread: spread.unary_stream(*described, **further))

    async def close(self) -> None:
        """Close all connections. Running calls are cancelled, also those over old connections."""
        closing = dict(self._closing)
        for old in closing.values():
            old.cancel_calls()
        if closing:
            _, late = await asyncio.wait(closing, timeout=CANCELLED_S)  # they wait for these calls
            for task in late:
                task.cancel()
        for spread in (self._now, self._next):
            if spread is not None:
                await spread.close()

    def _calling(self, describe: Callable[[_Spread], Any]) -> Any:
        """Make the function that stubs call with a request. `describe` makes the call for given connections."""
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
                self._closing[closing] = old
                closing.add_done_callback(self._closing.pop)
        self._now, self._next = spread, None
        self._now_s = self._served_s = time.monotonic()


class _Spread:
    """The connections of a `SpreadChannel` from one resolution of its address."""

    def __init__(self, address: str, service: str, tls: ClientTLS | None) -> None:
        # Streams have their own turns: if a unary call preceded each stream, all streams would go to the same peer.
        self._streams, self._questions = (open_channel(address, tls=tls, spread_service=service) for _ in range(2))
        for channel in (self._streams, self._questions):
            channel.get_state(try_to_connect=True)
        self._any = open_channel(address, tls=tls)
        self._calls: WeakSet[grpc.aio.Call] = WeakSet()

    def is_one_serving(self) -> bool:
        return all(_is_ready(channel) for channel in (self._streams, self._questions))

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        at_any = self._any.unary_unary(*described, **further)
        return self._either(self._questions, self._questions.unary_unary(*described, **further), at_any)

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        at_any = self._any.unary_stream(*described, **further)
        return self._either(self._streams, self._streams.unary_stream(*described, **further), at_any)

    def _either(self, channel: grpc.aio.Channel, at_serving: Any, at_any: Any) -> Any:
        """Call a serving peer if `channel` knows one by now, else any peer."""

        def call(*request: Any, **how: Any) -> Any:
            called = (at_serving if _is_ready(channel) else at_any)(*request, **how)
            self._calls.add(called)
            return called

        return call

    def cancel_calls(self) -> None:
        """Cancel all running calls: a channel that is being closed with grace cannot be told to hurry."""
        for call in self._calls:
            call.cancel()

    async def close(self, grace_s: float | None = None) -> None:
        """Close the connections; running calls have `grace_s` seconds to end."""
        await asyncio.gather(*(channel.close(grace_s) for channel in (self._streams, self._questions, self._any)))


def _is_ready(channel: grpc.aio.Channel) -> bool:
    return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


class BlockingSpreadChannel:
    """A channel to listed peers, for code without an event loop: a call goes to the next peer whose health service says
    that it serves `service`, or, if none does, to the next one, which says why not. Threads may share it; the caller
    closes it.

    It makes the health calls itself: gRPC reports a channel's state on a thread that crashes forked children, and that
    outlives a program which does not close the channel.
    """

    def __init__(self, address: str, *, service: str, tls: ClientTLS | None = None) -> None:
        self._peers = [_Peer(each, service, tls) for each in addresses_of(address)]
        self._patience_s = connect_ms(tls) / 1_000

    def unary_unary(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels, of which stubs are made."""
        return self._calling([peer.channel.unary_unary(*described, **further) for peer in self._peers])

    def unary_stream(self, *described: Any, **further: Any) -> Any:
        """As of gRPC's channels."""
        return self._calling([peer.channel.unary_stream(*described, **further) for peer in self._peers])

    def close(self) -> None:
        for peer in self._peers:
            peer.channel.close()

    def _calling(self, at_each: Sequence[Any]) -> Any:
        """Make the function that stubs call; `at_each`: the same call at each peer. Each kind of call has its own
        turns: if a unary call preceded each stream, all streams would go to the same peer."""
        turns = count()

        def call(*request: Any, timeout: float | None = None, **how: Any) -> Any:
            begin_s, patience_s = time.monotonic(), self._patience_s
            chosen = self._choose(next(turns), begin_s + (patience_s if timeout is None else min(timeout, patience_s)))
            left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin_s))
            return at_each[chosen](*request, timeout=left_s, **how)

        return call

    def _choose(self, turn: int, until_s: float) -> int:
        """Choose a serving peer. The peers share the time for health calls, so that a silent one leaves time for
        others.
        """
        num_peers = len(self._peers)
        for number in range(num_peers):
            now_s, chosen = time.monotonic(), (turn + number) % num_peers
            if self._peers[chosen].is_serving(now_s + (until_s - now_s) / (num_peers - number)):
                return chosen
        return turn % num_peers


class _Peer:
    """A peer of a `BlockingSpreadChannel`."""

    def __init__(self, address: str, service: str, tls: ClientTLS | None) -> None:
        self.channel = open_blocking_channel(address, tls=tls)
        self._check = health_pb2_grpc.HealthStub(self.channel).Check
        self._question = health_pb2.HealthCheckRequest(service=service)
        self._is_serving = False
        self._heard_until_s = 0.0

    def is_serving(self, until_s: float) -> bool:
        """Whether the peer serves, by its last answer if that is recent, else by asking it; False if it does not answer
        by `until_s`. Raises what calls on a closed channel raise."""
        left_s = until_s - time.monotonic()
        if time.monotonic() < self._heard_until_s or left_s <= 0:
            return self._is_serving
        try:
            answer: health_pb2.HealthCheckResponse = self._check(self._question, timeout=left_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # the channel is being closed
                raise
            self._is_serving, good_for_s = False, REOPEN_S
        else:
            self._is_serving, good_for_s = answer.status == health_pb2.HealthCheckResponse.SERVING, HEARD_S
        self._heard_until_s = time.monotonic() + good_for_s
        return self._is_serving
