"""Channels to peers: liveness by pings, quick reconnects, bounded messages. Owns no retries: callers decide those."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rpc.tls import ClientTLS

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Bound of one message in either direction, on servers and channels alike."""

CONNECT_MS = 1_000
TLS_CONNECT_MS = 5_000
"""Takes two more round trips, and computing."""
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
"""A peer that answers no ping within time + timeout is taken for dead: its streams end UNAVAILABLE."""
KV_PING_TIMEOUT_MS = 20_000
"""For connections that carry KV, at both ends: there an answer waits behind megabytes in the sockets' buffers, for many
seconds where the link is slow, and slow is not dead (above 0.2 MB/s). A machine that is gone is noticed as soon as
elsewhere (TCP_USER_TIMEOUT, which gRPC sets to the keepalive's), and a process that hangs by leases; later is noticed
a connection that both ends keep and understand no more, as after a damaged frame."""
KV_CONNECT_MS = 5_000
"""For them, too: who connects has computed a prompt for this one receiver, and nobody else can take its KV. A router
has other workers, and goes on to one of them. A second is too short where the first packet is lost (Linux sends it
again after one), or a machine stands still for that long."""
KEPT_WHILE_IDLE = ("grpc.client_idle_timeout_ms", 2**31 - 1)
"""By default gRPC hangs up after half an hour without calls. NIXL would connect anew, and keeps both connections."""


MIN_RESOLUTION_MS = 5_000
"""Between two questions to a name server, which gRPC asks when a connection is lost, or a peer can serve no more: by
default 30 seconds, in which all peers that it knows may have been replaced."""

RENEW_CONNECTIONS_S = 300.0
"""So long those of a `SpreadChannel` are used for new calls."""
REOPEN_S = 5.0
"""And so long where nobody is found that serves: gRPC asks a name server that knew nothing of a name, or did not
answer, again after ever longer times, two minutes in the end, and cannot be told to ask sooner."""
_A_STREAM_S = 86_400.0
"""More than any stream lasts."""

SESSION_READ_AHEAD_BYTES = 16 * 1024
"""Some steps of a worker. Whoever reads more slowly than is written has so much waiting, which is as much delay, and
the writer does not hear of it: gRPC begins with four times as much, and lets it grow to megabytes. What waits at the
worker goes in fewer messages instead, which take a router less time."""


def channel_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    *,
    connect_ms: int = CONNECT_MS,
    ping_timeout_ms: int | None = None,
    read_ahead_bytes: int = 0,
    spread_service: str = "",
) -> list[tuple[str, int | str]]:
    """What every channel of ours is opened with. `ping_timeout_ms`: `KEEPALIVE_TIMEOUT_MS` unless given.
    `read_ahead_bytes`: of one stream, that may come before they are read; 0: as many as a round trip takes.
    `spread_service`: calls go to all peers behind the address in turn that say they serve this; "": to the first."""
    read_ahead = [("grpc.http2.lookahead_bytes", read_ahead_bytes), ("grpc.http2.bdp_probe", 0)]
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Else a peer that hangs is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms or KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Workers are addressed directly; an http_proxy in the environment is not meant for them.
        ("grpc.enable_http_proxy", 0),
        # gRPC's own retries (on by default, transparent ones included) lose calls when a server restarts: those of the
        # blocking client then wait for ever, past their deadline (tests/contract/test_channel_restarts.py).
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", connect_ms),  # how long connecting may take, in spite of its name
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Else all channels of one process to one address share a connection, and one TCP window.
        ("grpc.use_local_subchannel_pool", 1),
        *(read_ahead if read_ahead_bytes else []),
        *(_spread(spread_service) if spread_service else []),
    ]


def _spread(service: str) -> list[tuple[str, int | str]]:
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.dns_min_time_between_resolutions_ms", MIN_RESOLUTION_MS),
    ]


def open_channel(address: str, *, tls: ClientTLS | None = None, read_ahead_bytes: int = 0) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"). Connects at the first call; the caller closes it.

    `read_ahead_bytes`: see `channel_options`.
    """
    return _open(address, tls, channel_options(connect_ms=_connect_ms(tls), read_ahead_bytes=read_ahead_bytes))


def open_kv_channel(
    address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, tls: ClientTLS | None = None
) -> grpc.aio.Channel:
    """As `open_channel`, for a connection that carries KV: patient at connecting, with pings, and kept for as long as
    the peer is there, however long nothing is asked of it: its end is taken for the peer's."""
    options = channel_options(max_message_bytes, connect_ms=KV_CONNECT_MS, ping_timeout_ms=KV_PING_TIMEOUT_MS)
    return _open(address, tls, [*options, KEPT_WHILE_IDLE])


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
        options = channel_options(connect_ms=_connect_ms(tls), spread_service=service)
        # Streams take turns by themselves: with a question before each, all would be the same peer's.
        self._streams, self._questions = (_open(address, tls, options) for _ in range(2))
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


def _connect_ms(tls: ClientTLS | None) -> int:
    return CONNECT_MS if tls is None else TLS_CONNECT_MS


def _open(address: str, tls: ClientTLS | None, options: list[tuple[str, int | str]]) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def open_blocking_channel(address: str, *, tls: ClientTLS | None) -> grpc.Channel:
    """As `open_channel`, for code without an event loop."""
    options = channel_options(connect_ms=_connect_ms(tls))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)
