"""The socket that an HTTP server listens on: what becomes of clients for whom the process has no open file left.

Owns one open file more than it needs, which such a client gets until it has been told so.

    accept ──a file for it──> a connection
       └─ none (ulimit -n) ──> accepted all the same, told (503), closed
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from typing import Any

_log = logging.getLogger(__name__)

NO_FILE_LEFT = (errno.EMFILE, errno.ENFILE)
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
        super().__init__(family, socket.SOCK_STREAM)
        self._last_words = last_words
        self._spare = _open_spare()
        self._is_to_rest = False
        self._told_s = -TOLD_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises `BlockingIOError`, too, where one was turned away: others have their turn before the next one."""
        if self._is_to_rest:
            self._is_to_rest = False
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in NO_FILE_LEFT:
                raise
            self._tell()
            if not self._turn_away():
                self._is_to_rest = True  # the loop waits a second, for the first error; this ends its other tries
                raise
            raise BlockingIOError from error

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _turn_away(self) -> bool:
        """Whether there was a file to do it with: another thread may have had it, or all of the machine's are open."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                client, _ = super().accept()
                with client:
                    client.setblocking(False)
                    client.send(self._last_words)
        self._spare = _open_spare()
        return self._spare is not None

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            _log.error("no open file is left for further connections, which are turned away: raise ulimit -n")


def _open_spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
