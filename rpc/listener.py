"""The listening socket of an HTTP server, which turns clients away when the process runs out of file descriptors.

accept ──a descriptor below those kept back──> a connection
   ├─ one of those kept back (near ulimit -n) ──> answered 503, closed
   └─ no descriptor at all ──> the loop stops accepting for a second

If several processes listen at one address (`reuse_port`), Linux gives each connection to one of them, by the client's
address and port. With one inherited socket, no waiting connection would be lost when a process dies; but while there is
little to do, the process that is woken first would take nearly all connections, and keep them once there is much to do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import time
from typing import Any

from rpc.server import CannotListen, split_address

_log = logging.getLogger(__name__)

KEPT_BACK = 64
"""File descriptors reserved for the process itself (a quarter of all, if there are few): without them, a process that
has lost its router could not connect to another."""
NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 25\r\n"
    b"content-type: text/plain\r\n\r\nToo many open connections"
)
TOLD_EVERY_S = 10.0
"""Interval of log lines about clients turned away."""


class Listener(socket.socket):
    """A listening socket for asyncio's event loop. If a plain socket cannot accept, CPython's loop tries as often as
    the backlog is long, logs each try, and a second later repeats all of that for each of them: hundreds of megabytes
    of logs in minutes, and no time for running streams."""

    def __init__(self, family: socket.AddressFamily, last_words: bytes = TOO_MANY) -> None:
        """`last_words`: sent to a client that is turned away."""
        # With the protocol given explicitly, the loop sets TCP_NODELAY on accepted sockets. Otherwise each write (the
        # head of an answer, its body, each token of a stream) would wait for the previous one's acknowledgement (40
        # ms).
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._last_words = last_words
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The system gives out the lowest free descriptor: a high one means that all lower ones are in use.
        self._first_kept_back = limit - min(KEPT_BACK, limit // 4) if limit != resource.RLIM_INFINITY else 1 << 31
        self._is_to_rest = False
        self._told_s = -TOLD_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Also raises `BlockingIOError` after turning a client away, so that the loop does other work in between."""
        if self._is_to_rest:
            self._is_to_rest = False
            raise BlockingIOError  # after the error before, the loop pauses for a second; this ends its other tries
        try:
            client, address = super().accept()
        except OSError as error:
            self._is_to_rest = error.errno in NONE_LEFT
            raise
        if client.fileno() < self._first_kept_back:
            return client, address
        self._tell()
        with client, contextlib.suppress(OSError):
            client.setblocking(False)
            client.send(self._last_words)
        raise BlockingIOError

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            _log.error("too many open files: further connections are turned away; raise ulimit -n")


def hold_port(address: str, flag: str) -> tuple[socket.socket, str]:
    """Reserve `address` (port 0: a free one) for processes that share it. Returns the reserving socket and the address
    with its port. While the socket is open, even if none of them listens, only processes of the same user that ask to
    share the address can bind it. Raises `CannotListen` if another process listens there."""
    with open_listener(address, flag) as alone:
        host, port = alone.getsockname()[:2]
    held = socket.socket(alone.family, socket.SOCK_STREAM)
    _reuse(held, reuse_port=True)
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # was needed to bind in spite of ended connections
    except OSError as error:  # taken in between
        held.close()
        raise _cannot_listen(address, error, flag) from error
    return held, f"{address.rpartition(':')[0]}:{port}"


def open_listener(address: str, flag: str, *, has_tls: bool = False, reuse_port: bool = False) -> Listener:
    """Listen on `address` (port 0: a free one), which came from `flag`. `reuse_port`: other processes may listen there,
    too. Raises `CannotListen`, which names the flag."""
    host, port = split_address(address)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, b"" if has_tls else TOO_MANY)  # with TLS, nothing can be sent before a handshake
    _reuse(listener, reuse_port=reuse_port)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _cannot_listen(address, error, flag) from error
    listener.setblocking(False)
    return listener


def _reuse(unbound: socket.socket, *, reuse_port: bool) -> None:
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _cannot_listen(address: str, error: OSError, flag: str) -> CannotListen:
    return CannotListen(f"cannot listen on {address}: {error.strerror}; take another port with {flag}")
