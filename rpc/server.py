"""A process' gRPC server: port, health, reflection, TLS, and orderly shutdown.

Owns the port and the health of each service. A service finishes or hands over its own streams between `enter_drain` and
`drain`.

    NEW ── add(…)* ── start() ──> SERVING ── enter_drain() ──> DRAINING ── drain(grace_s) ──> STOPPED
                        │         set_serving() when a         readiness NOT_SERVING;         no new RPCs; those that
                        v         service is ready             RPCs are still accepted:       run after grace_s
                   CannotListen                                handlers refuse new work       are cancelled
                 (nothing is bound)                            and finish what runs
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc import health
from rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, KEEPALIVE_TIME_MS, connection_options
from rpc.interceptors import ErrorInterceptor
from rpc.keys import KeyInterceptor
from rpc.tls import ServerTLS

_grpc_log = logging.getLogger("grpc._cython.cygrpc")


class CannotListen(Exception):  # noqa: N818 - reads as the sentence it is
    """The address cannot be bound. The message tells the user why, and what to do."""


class Server:
    """See the module's docstring. Create it on the event loop that will serve."""

    def __init__(
        self,
        listen: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tls: ServerTLS | None = None,
        ping_timeout_ms: int | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        """`listen`: "host:port". `ping_timeout_ms`: see `rpc.channel.connection_options`. `keys`: calls must carry one
        of them, except health and reflection; empty: anybody may call. Raises `ValueError`."""
        _grpc_log.addFilter(_shows_no_header)
        self._listen = listen
        self._host, self._port = split_address(listen)
        self._tls = tls
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if keys:
            interceptors.append(KeyInterceptor(keys, open_services=self._names))
        self._server = grpc.aio.server(interceptors=interceptors, options=_options(max_message_bytes, ping_timeout_ms))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, add_servicer: Callable[[Any, Any], None], servicer: object, service_name: str) -> None:
        """Add `servicer` (`add_servicer`: the generated add_XServicer_to_server), which is not ready until
        `set_serving`.

        `service_name` is the full name: "tandem.v1.Inference". Only before `start`.
        """
        add_servicer(servicer, self._server)
        self._names.append(service_name)
        self._health.add(service_name)

    async def start(self) -> str:
        """Bind and serve. Returns "host:port" with the bound port. Raises `CannotListen`."""
        reflection.enable_server_reflection(self._names, self._server)
        port = self._bind()
        await self._server.start()
        return f"{self._host}:{port}"

    def _bind(self) -> int:
        if why := _why_not(self._host, self._port):  # checked first: gRPC only says that it failed, and also logs that
            raise CannotListen(why)
        try:
            if self._tls is None:
                return int(self._server.add_insecure_port(self._listen))
            return int(self._server.add_secure_port(self._listen, self._tls.credentials()))
        except RuntimeError as error:
            if self._tls is not None:  # the port was free just now
                raise CannotListen(f"gRPC does not accept the certificate or its key: {error}") from error
            raise CannotListen(_sentence(self._host, self._port, str(error), is_busy=False)) from error

    def set_serving(self, service_name: str, is_serving: bool) -> None:
        """Set whether `service_name` is ready. Without effect once draining."""
        self._health.set_serving(service_name, is_serving)

    def is_serving(self, service_name: str) -> bool:
        """Whether `service_name` is ready."""
        return self._health.is_serving(service_name)

    def enter_drain(self) -> None:
        """Set readiness to NOT_SERVING permanently; RPCs are still accepted. Safe to repeat."""
        self._health.enter_drain()

    async def drain(self, grace_s: float) -> None:
        """Refuse new RPCs, wait for the running ones, cancel what still runs after `grace_s` seconds."""
        self.enter_drain()
        self._health.end_watches()
        await self._server.stop(grace_s)


def _options(max_message_bytes: int, ping_timeout_ms: int | None) -> list[tuple[str, int]]:
    return [
        *connection_options(max_message_bytes, ping_timeout_ms),
        # A second process on the same port would silently get half of the connections.
        ("grpc.so_reuseport", 0),
        # Clients ping every KEEPALIVE_TIME_MS; by default a server treats that as an attack (GOAWAY too_many_pings).
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ]


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port"; an IPv6 host keeps its brackets. Raises `ValueError`, to follow the address'
    name."""
    if "://" in address:
        raise ValueError(f"must be HOST:PORT, without a scheme such as http://, is {address!r}")
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT with a port from 0 to 65535, is {address!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"must have an IPv6 host in brackets, as in [::1]:50051, is {address!r}")
    return host, int(port)


def is_any_host(host: str) -> bool:
    """Whether `host` means all addresses of a machine, such as "0.0.0.0", "[::]" or "*". Looks up no names."""
    if host == "*":
        return True
    address: IPv4Address | IPv6Address
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        try:
            address = IPv4Address(socket.inet_aton(host))  # which also accepts "0" and "0.0", as clients do
        except OSError:
            return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_unspecified


def _why_not(host: str, port: int) -> str:
    """Why the address cannot be bound, tested with a plain socket; empty if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(address)
            probe.listen(1)  # otherwise two sockets may be bound to one port
    except OSError as error:
        return _sentence(host, port, error.strerror or str(error), is_busy=error.errno == errno.EADDRINUSE)
    return ""


def _sentence(host: str, port: int, reason: str, *, is_busy: bool) -> str:
    remedy = f"Stop what uses port {port}, or choose" if is_busy else "Choose"
    return f"cannot listen on {host}:{port}: {reason}. {remedy} another with --listen HOST:PORT (port 0: a free one)."


def _shows_no_header(record: logging.LogRecord) -> bool:
    """A log filter: for metadata that is not UTF-8, gRPC would log the value, which may be a key, with a traceback."""
    return not str(record.msg).startswith("Invalid encoding")
