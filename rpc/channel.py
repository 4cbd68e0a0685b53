"""Channels to peers: liveness by pings, quick reconnects, bounded messages. Owns no retries: callers decide those."""

from __future__ import annotations

import json

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
        KEPT_WHILE_IDLE,  # else nobody is known to serve when there is a call again
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
    """As `open_channel`, for a connection that carries KV: patient at connecting, with pings, and kept for as long as
    the peer is there, however long nothing is asked of it: its end is taken for the peer's."""
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
    """As `open_channel`, for code without an event loop."""
    options = channel_options(connect_ms=connect_ms(tls))
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)
