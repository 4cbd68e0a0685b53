"""HTTP on a process' own event loop: OpenAI's API in the gateway, Prometheus' metrics in every service.

Owns the listening socket and the server; the application is handed in.

    HttpServer(app) ── start(address) ──> serving ── close(grace_s): no new connections, running ones finish ──> gone
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from typing import Any

import httptools
import uvicorn
from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    make_asgi_app,
)
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rpc.listener import open_listener
from rpc.tls import ServerTLS

disable_created_metrics()  # type: ignore[no-untyped-call] # one more series for each counter and histogram

_log = logging.getLogger(__name__)

METRICS_FLAG = "--metrics-listen (tandem up: --metrics-port)"
"""In messages: where `ServiceArgs.metrics_listen` comes from."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers: whoever sends more is refused, before anybody looks at it. So is more than that at
once of anything else that is no body."""
READ_BYTES = 256 * 1024
"""What one read of a socket may bring: a short head may come with so much of its body."""
GOODBYE_S = 1.0
"""For what has been written to leave."""
CLOCK_S = 1.0
"""How old the date of an answer may be."""
KEEP_ALIVE_S = 75
"""For which a connection stays open whose client is silent, between requests or within one: longer than load balancers
keep theirs."""
LAST_SILENCE_S = 2
"""The same within a request, once the server ends: who sends it still is waited for, who has stopped is not."""


class _Http(HttpToolsProtocol):
    """httptools, several times as fast as uvicorn's other parser, but with what it lacks.

    - Bounds: for what is no body (heads, trailers, extensions of chunks), and for how long a client may be silent
      within a request, or before it.
    - Who offers to go on in another protocol is answered in this one, as RFC 9110 has it. httptools takes what follows
      such a head for the other protocol's: it is given the head anew, without the offer.
    """

    _num_bytes_apart = 0
    """Received since the request began, or since the last of its body."""

    def data_received(self, data: bytes) -> None:
        self._num_bytes_apart += len(data)
        if self._num_bytes_apart > MAX_HEAD_BYTES + READ_BYTES:
            self.send_400_response(f"A request's headers may have {MAX_HEAD_BYTES} bytes.")
        elif not self.transport.is_closing():
            self._parse(data)
            self._wait_for_client()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_offer:
                    break
                data = self._head_anew() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                break
        message = "Invalid HTTP request received."
        self.logger.warning(message)
        self.send_400_response(message)

    def _head_anew(self) -> bytes:
        """That of the request which makes an offer, without it, and a parser to read it."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Not for ever: uvicorn's own bound begins with an answer's end."""
        is_its_turn = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if is_its_turn and not self.pipeline and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_client()  # it may have begun the next request meanwhile

    def shutdown(self) -> None:
        """When the server ends: an idle connection does, too."""
        super().shutdown()
        self._abort_soon()
        self.timeout_keep_alive = min(self.timeout_keep_alive, LAST_SILENCE_S)
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self._wait_for_client()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_soon()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._abort_soon()

    def _abort_soon(self) -> None:
        """Over TLS a closed connection waits half a minute for its client to say goodbye, and the server with it."""
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def on_message_begin(self) -> None:
        self._num_bytes_apart = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self._is_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_offer:
            super().on_message_complete()

    @property
    def _is_offer(self) -> bool:
        """Whoever asks for CONNECT demands another protocol, and gets nothing."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_body(self, body: bytes) -> None:
        self._num_bytes_apart = 0
        super().on_body(body)


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: the entry point's are in place. It is woken to end, and does not look ten
    times a second whether it should."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_to_end = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._is_to_end.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOCK_S):
                    await self._is_to_end.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves one ASGI application. Made and used on the event loop."""

    def __init__(self, app: Any, *, tls: ServerTLS | None = None) -> None:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False, http=_Http, ws="none",
            ssl_certfile=tls.files[0] if tls else None, ssl_keyfile=tls.files[1] if tls else None,
        )  # fmt: skip
        config.load()
        if tls is not None and config.ssl is not None:
            tls.follow(config.ssl)
        self._config = config
        self._server = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self, address: str, *, flag: str, reuse_port: bool = False) -> str:
        """Listen on `address` (port 0: a free one), which came from `flag`. `reuse_port`: others may, too. Returns
        where it listens.

        Raises `CannotListen`, which names the flag.
        """
        listener = open_listener(address, flag, has_tls=self._config.is_ssl, reuse_port=reuse_port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def wait_ended(self) -> None:
        """Until it has ended: after `close`, or by an error of its own, which this raises."""
        assert self._serving is not None
        await asyncio.wait([self._serving])
        self._serving.result()

    async def close(self, grace_s: float = 0.0) -> None:
        """Let running requests finish, for at most `grace_s` seconds."""
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.end()
        await self.wait_ended()


def show_metrics(registry: CollectorRegistry, listen: str) -> HttpServer | None:
    """Serve `registry` at `listen`, unless that is empty. The caller closes the server. Raises `CannotListen`."""
    if not listen:
        return None
    server = HttpServer(metrics_app(registry))
    address = server.start(listen, flag=METRICS_FLAG)
    _log.info("metrics", extra={"url": f"http://{address}/metrics"})
    return server


def tell_of_process(registry: CollectorRegistry) -> None:
    """Have `registry` show what Prometheus' clients show of every process (CPU seconds, memory, open files), and its
    Python's version."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)


def metrics_app(registry: CollectorRegistry) -> Any:
    """An ASGI application that shows `registry` as plain text, whatever path or format is asked for.

    Other formats that Prometheus prefers have no colons in names: tandem:workers would be tandem_workers there.
    """
    app = make_asgi_app(registry)

    async def plain_text(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept"]
        await app({**scope, "headers": [*headers, (b"accept", b"text/plain;version=0.0.4")]}, receive, send)

    return plain_text
