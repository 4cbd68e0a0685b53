"""The gateway's HTTP application: its routes, and their description in /openapi.json. `gateway.handlers` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.asked import Body
from gateway.errors import refusal_of_route
from gateway.handlers import Gateway, refuse
from gateway.headers import ANSWERED_ID_HEADER, REQUEST_ID_HEADER
from gateway.messages.request import MessageRequest
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.requests import ChatRequest, CompletionRequest
from gateway.responses.request import ResponseRequest
from gateway.tokens import CountMessagesRequest, CountRequest, DetokenizeRequest, TokenizeRequest
from gateway.traced import Traced
from rpc.tracing import Tracing
from tandem import __version__

_REF = "#/components/schemas/{model}"


def create_app(
    models: Models,
    *,
    api_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = 4 * 1024 * 1024,
    sse_keep_alive_s: float = 0.0,
    leaving: asyncio.Event | None = None,
    tracing: Tracing | None = None,
    metrics: Metrics | None = None,
    is_alone: bool = True,
) -> FastAPI:
    """The gateway's ASGI application.

    models, tracing: the caller closes them.
    api_keys: a request must bring one of them, if there are any.
    allowed_origins: origins of the pages that may read answers in a browser.
    sse_keep_alive_s: for how long a stream may be silent; 0: forever.
    leaving: set it to end the answers that still run; their clients are told why.
    metrics: counts the requests.
    is_alone: no other process listens on the same port, so that this process' counts may be served there.
    """
    gateway = Gateway(
        models,
        api_keys=api_keys,
        max_body_bytes=max_body_bytes,
        keep_alive_s=sse_keep_alive_s or None,
        leaving=leaving or asyncio.Event(),
        metrics=metrics or Metrics(),
        is_alone=is_alone,
    )
    app = FastAPI(title="Tandem", version=__version__, docs_url=None, redoc_url=None)
    _add_routes(app, gateway)
    app.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, ANSWERED_ID_HEADER, "retry-after"],
        )
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing)
    return app


def _add_routes(app: FastAPI, gateway: Gateway) -> None:
    posting: list[tuple[str, Any, type[Body]]] = [
        ("/v1/completions", gateway.completions, CompletionRequest),
        ("/v1/chat/completions", gateway.chat, ChatRequest),
        ("/v1/responses", gateway.responses, ResponseRequest),
        ("/v1/responses/input_tokens", gateway.input_tokens, CountRequest),
        ("/v1/messages", gateway.messages, MessageRequest),
        ("/v1/messages/count_tokens", gateway.count_tokens, CountMessagesRequest),
        ("/tokenize", gateway.tokenize, TokenizeRequest),
        ("/detokenize", gateway.detokenize, DetokenizeRequest),
    ]
    for path, handler, body in posting:
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=_takes(body))
    _describe(app, [body for _, _, body in posting])
    asking: list[tuple[str, Any]] = [
        ("/v1/models", gateway.models),
        ("/v1/models/{model:path}", gateway.model),
        ("/health", gateway.health),
        ("/ping", gateway.health),
        ("/load", gateway.load),
        ("/version", gateway.version),
        ("/metrics", gateway.scrape),
        ("/", gateway.page),
    ]
    for path, handler in asking:
        app.add_api_route(path, handler, response_model=None, include_in_schema=path != "/")
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    # Amazon SageMaker's probe, which vLLM answers with either method.
    app.add_api_route("/ping", gateway.health, methods=["POST"], response_model=None, include_in_schema=False)


def _takes(body: type[Body]) -> dict[str, Any]:
    """A route's request body in /openapi.json."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI, bodies: Sequence[type[Body]]) -> None:
    """Describe `bodies` in /openapi.json: FastAPI does not know them, since the handlers read them themselves."""
    schemas = _schemas_of(tuple(bodies))

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            described.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


@cache  # takes a tenth of a second
def _schemas_of(bodies: tuple[type[Body], ...]) -> dict[str, Any]:
    """The JSON schemas of `bodies` and all their parts, by name."""
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    named: dict[str, Any] = schemas["$defs"]
    return named


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Refuse a request to an unknown route, or with the wrong method."""
    paths = [route.path for route in request.app.routes if isinstance(route, Route)]
    return refuse(request, refusal_of_route(error, request.method, request.url.path, paths), error.headers)
