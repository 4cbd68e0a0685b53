"""The socket that an HTTP server listens on: what becomes of clients for whom the process has no open file to spare.

accept ──a file below those kept back──> a connection
   ├─ one of those (near ulimit -n) ──> told so (503), closed
   └─ none at all ──> the loop rests for a second

Where several processes listen at one address (`reuse_port`), Linux gives each connection to one of them, by its
client's address and port. One socket that all of them inherit would lose no connection that waits at one that dies; but
whoever is woken first takes nearly all that come while it has little to do, and keeps them once it has much.
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
"""Open files, or a quarter of all where these are few: clients leave so many for what the process itself opens, or one
that has lost its router could not call another."""
NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 25\r\n"
    b"content-type: text/plain\r\n\r\nToo many open connections"
)
TOLD_EVERY_S = 10.0
"""In the log."""


class Listener(socket.socket):
    """For asyncio's event loop. Where a socket cannot accept, CPython's goes on trying as often as connections may
    wait, logs each try, and a second later begins anew for each of them: hundreds of megabytes in minutes, and no time
    for the streams that run."""

    def __init__(self, family: socket.AddressFamily, last_words: bytes = TOO_MANY) -> None:
        """`last_words`: to a client that is turned away."""
        # Named, as the loop asks for it, and writes of who is accepted would wait for each other's acknowledgements (40
        # ms) otherwise: the head of an answer, its body, and each token of a stream.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._last_words = last_words
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The lowest free number is taken: who gets one of the last has all others before it.
        self._first_kept_back = limit - min(KEPT_BACK, limit // 4) if limit != resource.RLIM_INFINITY else 1 << 31
        self._is_to_rest = False
        self._told_s = -TOLD_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises `BlockingIOError`, too, where one was turned away: others have their turn before the next one."""
        if self._is_to_rest:
            self._is_to_rest = False
            raise BlockingIOError  # the loop rests for a second, after the error before; this ends its other tries
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
    """For processes that are to share `address` (port 0: a free one): as long as the socket is open, and even while
    none of them listens, nobody can take it but who asks to share it, too, and is of the same user. And the address,
    with its port. Raises `CannotListen` where somebody listens there."""
    with open_listener(address, flag) as alone:
        host, port = alone.getsockname()[:2]
    held = socket.socket(alone.family, socket.SOCK_STREAM)
    _reuse(held, reuse_port=True)
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # until then, for connections that have ended there
    except OSError as error:  # taken in between
        held.close()
        raise _cannot_listen(address, error, flag) from error
    return held, f"{address.rpartition(':')[0]}:{port}"


def open_listener(address: str, flag: str, *, has_tls: bool = False, reuse_port: bool = False) -> Listener:
    """Listening on `address` (port 0: a free one), which came from `flag`. `reuse_port`: others may, too. Raises
    `CannotListen`, which names the flag."""
    host, port = split_address(address)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, b"" if has_tls else TOO_MANY)  # over TLS nothing can be said without a handshake
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
