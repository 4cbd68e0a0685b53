"""An HTTP server on a process' own event loop: OpenAI's API in the gateway, Prometheus metrics in every service.

Owns the listening socket and the server; the caller passes the application.

    HttpServer(app) ── start(address) ──> serving ── close(grace_s): no new connections, running ones finish ──> gone
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
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
"""The flags of `ServiceArgs.metrics_listen`, for messages."""
MAX_HEAD_BYTES = 64 * 1024
"""Limit of a request's line and headers: larger requests are refused before the application sees them. The same limit
applies to everything else that is not part of a body."""
READ_BYTES = 256 * 1024
"""Maximum bytes of one read from a socket: a short head may come with this much of its body."""
GOODBYE_S = 1.0
"""Time for written data to be sent before a connection is aborted."""
CLOCK_S = 1.0
"""How old the date header of an answer may be."""
KEEP_ALIVE_S = 75
"""How long a connection with a silent client stays open, between requests or within one: longer than load balancers'
idle timeouts."""
LAST_SILENCE_S = 2
"""The same within a request while the server shuts down: it waits for clients that still send, not for silent ones."""


class _Http(HttpToolsProtocol):
    """uvicorn's protocol with httptools, which is several times as fast as the other parser, plus what it lacks:

    - Limits on everything that is not a body (heads, trailers, chunk extensions), and on how long a client may be
    silent
      within or before a request.
    - A client that offers an upgrade to another protocol is answered in HTTP/1.1, as RFC 9110 requires. httptools would
      treat what follows such a head as the other protocol, so the head is parsed again without the offer.
    """

    _num_bytes_apart = 0
    """Bytes received since the begin of the request, or since the last part of its body."""

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
        """Return the head of a request without its upgrade offer, and make a new parser for it."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""])

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Start the silence timeout; uvicorn itself starts it only after an answer."""
        is_its_turn = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if is_its_turn and not self.pipeline and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_client()  # the client may already have begun the next request

    def shutdown(self) -> None:
        """The server shuts down: close idle connections soon."""
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
        """Abort a closing connection soon: with TLS it would wait half a minute for the client's closing message."""
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
        """Whether the request offers an upgrade. CONNECT requires another protocol, which is not served."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_body(self, body: bytes) -> None:
        self._num_bytes_apart = 0
        super().on_body(body)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without signal handlers, which the entry point installs. It is woken to shut down, instead of
    polling for that ten times a second."""

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
    """Serves one ASGI application. Created and used on the event loop."""

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
        """Listen on `address` (port 0: a free one), which came from `flag`. `reuse_port`: other processes may listen
        there, too. Returns the address with its port.

        Raises `CannotListen`, which names the flag.
        """
        listener = open_listener(address, flag, has_tls=self._config.is_ssl, reuse_port=reuse_port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def wait_ended(self) -> None:
        """Wait until the server has ended after `close`, or by an error, which this raises."""
        assert self._serving is not None
        await asyncio.wait([self._serving])
        self._serving.result()

    async def close(self, grace_s: float = 0.0) -> None:
        """Shut down; running requests have at most `grace_s` seconds to finish."""
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.end()
        await self.wait_ended()


def show_metrics(registry: CollectorRegistry, listen: str, is_ready: Callable[[], bool]) -> HttpServer | None:
    """Serve `registry` at `listen`, unless that is empty, and whether the process `is_ready`. The caller closes the
    server. Raises `CannotListen`."""
    if not listen:
        return None
    server = HttpServer(metrics_app(registry, is_ready))
    address = server.start(listen, flag=METRICS_FLAG)
    _log.info("metrics", extra={"url": f"http://{address}/metrics"})
    return server


def tell_of_process(registry: CollectorRegistry) -> None:
    """Add the standard process metrics (CPU seconds, memory, open files) and Python's version to `registry`."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)


def metrics_app(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> Any:
    """An ASGI application that serves `registry` as plain text, whatever path or format is requested.

    Formats that Prometheus prefers do not allow colons in names: tandem:workers would become tandem_workers.

    Also /health, while the process lives, and /ready, for as long as it `is_ready`: the same as gRPC's health service,
    for those who speak no gRPC, or not with this process' certificates, such as Kubernetes.
    """
    app = make_asgi_app(registry)

    async def plain_text(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in ("/health", "/ready"):
            is_well = scope["path"] == "/health" or is_ready()
            await send({"type": "http.response.start", "status": 200 if is_well else 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept"]
        await app({**scope, "headers": [*headers, (b"accept", b"text/plain;version=0.0.4")]}, receive, send)

    return plain_text
