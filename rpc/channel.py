"""Channels to peers: liveness by pings, quick reconnects, bounded messages. No retries: callers decide on those."""

from __future__ import annotations

import json

import grpc

from rpc.tls import ClientTLS

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of one message in either direction, on servers and channels alike."""

CONNECT_MS = 1_000
TLS_CONNECT_MS = 5_000
"""A TLS handshake takes two more round trips, and computing."""
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
"""A peer that answers no ping within time + timeout is considered dead: its streams end UNAVAILABLE."""
KV_PING_TIMEOUT_MS = 20_000
"""For connections that carry KV, at both ends. There an answer queues behind megabytes in the sockets' buffers, for
many seconds on a slow link, and slow (above 0.2 MB/s) is not dead. A lost machine is still noticed quickly
(TCP_USER_TIMEOUT, which gRPC sets to the keepalive's), and a hanging process by its leases. Only a connection that is
open but corrupted, as after a damaged frame, is noticed later."""
KV_CONNECT_MS = 5_000
"""Also for connections that carry KV: the sender has computed a prompt for this receiver, and no other can take its KV,
while a router can turn to another worker. One second is too short if the first packet is lost (Linux repeats it after a
second), or if a machine pauses for that long."""
KEPT_WHILE_IDLE = ("grpc.client_idle_timeout_ms", 2**31 - 1)
"""By default gRPC disconnects after half an hour without calls. NIXL would then reconnect, and keep both
connections."""


MIN_RESOLUTION_MS = 5_000
"""Minimum time between DNS lookups, which gRPC makes when a connection is lost or a peer stops serving. The default of
30 seconds is long enough for all known peers to be replaced."""

SESSION_READ_AHEAD_BYTES = 16 * 1024
"""Equals some steps of a worker. If the reader is slower than the writer, this much is buffered, which adds delay
without the writer noticing. gRPC's default is four times this, growing to megabytes. Events that wait at the worker
instead are merged into fewer messages, which take a router less time."""


def connection_options(max_message_bytes: int, ping_timeout_ms: int | None) -> list[tuple[str, int]]:
    """The options of channels and servers: bounds, and pings. By a server's pings, clients whose machine is gone are
    noticed, so that what their streams own is freed. `ping_timeout_ms`: default `KEEPALIVE_TIMEOUT_MS`."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Otherwise a hanging peer is noticed only after a minute.
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms or KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    *,
    connect_ms: int = CONNECT_MS,
    ping_timeout_ms: int | None = None,
    read_ahead_bytes: int = 0,
    spread_service: str = "",
) -> list[tuple[str, int | str]]:
    """The options of all our channels.
    `read_ahead_bytes`: how much of a stream may be buffered unread; 0: as much as a round trip needs.
    `spread_service`: distribute calls in turn to the peers behind the address that serve this; "": call the first."""
    read_ahead = [("grpc.http2.lookahead_bytes", read_ahead_bytes), ("grpc.http2.bdp_probe", 0)]
    return [
        *connection_options(max_message_bytes, ping_timeout_ms),
        # Workers are addressed directly; an http_proxy in the environment is not meant for them.
        ("grpc.enable_http_proxy", 0),
        # gRPC's own retries (on by default, including transparent ones) lose calls when a server restarts: the blocking
        # client's calls then wait forever, past their deadline (tests/contract/test_channel_restarts.py).
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", connect_ms),  # in spite of its name, limits how long connecting may take
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Otherwise all channels of a process to the same address share a connection and its TCP window.
        ("grpc.use_local_subchannel_pool", 1),
        *(read_ahead if read_ahead_bytes else []),
        *(_spread(spread_service) if spread_service else []),
    ]


def _spread(service: str) -> list[tuple[str, int | str]]:
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": service}}
    return [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.dns_min_time_between_resolutions_ms", MIN_RESOLUTION_MS),
        KEPT_WHILE_IDLE,  # after idling, no peer would be known to serve
    ]


def open_channel(
    address: str, *, tls: ClientTLS | None = None, read_ahead_bytes: int = 0, spread_service: str = ""
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"). Connects at the first call; the caller closes it.

    `read_ahead_bytes`, `spread_service`: see `channel_options`.
    """
    options = channel_options(
        connect_ms=connect_ms(tls), read_ahead_bytes=read_ahead_bytes, spread_service=spread_service
    )
    return _open(address, tls, options)


def open_kv_channel(
    address: str, *, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, tls: ClientTLS | None = None
) -> grpc.aio.Channel:
    """Like `open_channel`, for a connection that carries KV: with longer connect and ping timeouts, and kept open while
    idle, since the connection's end is taken for the peer's end."""
    options = channel_options(max_message_bytes, connect_ms=KV_CONNECT_MS, ping_timeout_ms=KV_PING_TIMEOUT_MS)
    return _open(address, tls, [*options, KEPT_WHILE_IDLE])


def connect_ms(tls: ClientTLS | None) -> int:
    """How long connecting may take."""
    return CONNECT_MS if tls is None else TLS_CONNECT_MS


def _open(address: str, tls: ClientTLS | None, options: list[tuple[str, int | str]]) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def open_blocking_channel(address: str, *, tls: ClientTLS | None) -> grpc.Channel:
    """Like `open_channel`, for code without an event loop."""
    options = channel_options(connect_ms=connect_ms(tls))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)
