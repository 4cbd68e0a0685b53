"""A middleware that records a trace span for each request for an answer, until its last byte is sent."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.headers import REQUEST_ID_HEADER
from rpc.tracing import Tracing, Value, trace_headers_of

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Traced:
    """An ASGI application that wraps another one."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            return await self._app(scope, receive, send)
        route = scope["path"]
        span = self._tracing.begin(f"POST {route}", trace_headers_of(Headers(scope=scope).items()))
        scope.setdefault("state", {})["trace_headers"] = span.trace_headers
        attributes: dict[str, Value] = {"http.request.method": "POST", "http.route": route}

        async def note_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                attributes["http.response.status_code"] = message["status"]
                attributes["gen_ai.request.id"] = MutableHeaders(raw=message["headers"]).get(REQUEST_ID_HEADER, "")
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        finally:
            status = attributes.get("http.response.status_code", 500)
            if failed := scope["state"].get("failed_stream_status"):
                attributes["tandem.stream.failed_status_code"] = status = failed
            # A server's span counts as failed only for errors of the server (OpenTelemetry's conventions for HTTP).
            span.end(attributes, error=f"status {status}" if int(status) >= 500 else "")
