"""The handlers of the HTTP routes. Each reads its body (bounded), asks the router, and answers in OpenAI's format or in
Anthropic's.

    body ──requests──> prompts, sampling ──Run──> one stream for each prompt ──Rendering──> JSON, or server-sent events
           └──Models──> whose routers are asked

The gateway sends a stream's status with its first token, so that a refusal (429, 503 …) has a status of its own as with
any other request. If the first token takes longer than proxies keep silent connections, it sends the status with a
keep-alive. A later failure is the stream's last event, in its route's format.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.requests import ClientDisconnect

from gateway.answers import models_of
from gateway.asked import Asked
from gateway.body_bytes import body_bytes
from gateway.choices import Choices
from gateway.errors import MODEL_NOT_FOUND, NO_KEY, NO_ROUTE, Refusal, refusal_of_any
from gateway.headers import headers_of, left_s_of, name_request, note_failed_stream, request_id_of
from gateway.messages.errors import error_of, is_of_messages
from gateway.messages.rendering import MessageRendering
from gateway.messages.request import MessageRequest
from gateway.metrics import Metrics
from gateway.models import Models, no_such_model
from gateway.requests import ChatRequest, CompletionRequest
from gateway.responses.rendering import ResponseRendering
from gateway.responses.request import ResponseRequest
from gateway.run import Run
from gateway.streams import Begun, ClientGone, EventStream, to_json, while_connected, while_staying
from gateway.tokens import CountMessagesRequest, CountRequest, DetokenizeRequest, TokenizeRequest
from protos.tandem_inference_pb2 import GenerateResponse
from rpc.errors import DeadlinePassed, InvalidRequest, TandemError
from rpc.keys import bearer_of, is_one_of
from tandem import __version__
from tandem.client import AsyncClient

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=Asked)
_T = TypeVar("_T")

PAGE = Path(__file__).with_name("chat.html")


class Rendering(Protocol):
    """Renders the answer to one request in its route's format."""

    keep_alive: bytes
    """What an event stream sends to keep a silent connection open."""

    async def whole(self) -> bytes:
        """The answer as one JSON object."""

    def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, as the run's `messages` come. Closes `messages`."""


class Gateway:
    """The handlers. Keeps nothing of a request once it is answered."""

    def __init__(
        self,
        models: Models,
        *,
        api_keys: Sequence[str],
        max_body_bytes: int,
        keep_alive_s: float | None,
        leaving: asyncio.Event,
        metrics: Metrics,
        is_alone: bool,
    ) -> None:
        self._models = models
        self._keep_alive_s = keep_alive_s
        self._leaving = leaving
        self._api_keys = api_keys
        self._max_body_bytes = max_body_bytes
        self._started_s = int(time.time())
        self._metrics = metrics
        self._is_alone = is_alone
        self._running: set[Run] = set()
        """Runs that wait for their answers, or whose streams have not ended."""

    # -- generating ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Any:
        return await self._generate(request, "completions", CompletionRequest, Choices)

    async def chat(self, request: Request) -> Any:
        return await self._generate(request, "chat", ChatRequest, Choices)

    async def responses(self, request: Request) -> Any:
        return await self._generate(request, "responses", ResponseRequest, ResponseRendering)

    async def messages(self, request: Request) -> Any:
        return await self._generate(request, "messages", MessageRequest, MessageRendering)

    async def _generate(
        self, request: Request, route: str, body_type: type[_Body], rendering_of: Callable[[Run, _Body, str], Rendering]
    ) -> Any:
        """Answer one request. `rendering_of`: makes the rendering from the run, its body and the model's name."""

        async def answer() -> Response:
            body = body_type.read(await body_bytes(request, self._max_body_bytes))
            if body.request_id:
                name_request(request, body.request_id)
            return await self._ask(
                request, body.model, lambda client: self._respond(request, route, body, client, rendering_of)
            )

        return await self._answer(request, route, answer)

    async def _respond(
        self,
        request: Request,
        route: str,
        body: _Body,
        client: AsyncClient,
        rendering_of: Callable[[Run, _Body, str], Rendering],
    ) -> Response:
        """The whole answer; or a stream, as soon as its first message is there or a keep-alive is due."""
        model = body.model or (await self._in_time(request, client.model_info)).model

        def on_failed(status: int) -> None:
            self._metrics.stream_failed(route, status)
            note_failed_stream(request, status)

        run = Run(client, body, request, self._leaving, self._running, on_failed)
        rendering = rendering_of(run, body, model)
        if not body.stream:
            content = await while_connected(request.receive, rendering.whole())
            return Response(content, headers=run.headers, media_type="application/json")
        messages = Begun(run.messages())
        try:
            await while_connected(request.receive, messages.wait_first(self._keep_alive_s))
        except BaseException:
            await messages.aclose()
            raise
        return EventStream(
            rendering.events(messages),
            run.headers,
            keep_alive=rendering.keep_alive,
            keep_alive_s=self._keep_alive_s,
        )

    # -- tokens -------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Any:
        return await self._tokens(request, "tokenize", TokenizeRequest)

    async def detokenize(self, request: Request) -> Any:
        return await self._tokens(request, "detokenize", DetokenizeRequest)

    async def input_tokens(self, request: Request) -> Any:
        return await self._tokens(request, "input_tokens", CountRequest)

    async def count_tokens(self, request: Request) -> Any:
        return await self._tokens(request, "count_tokens", CountMessagesRequest)

    async def _tokens(
        self,
        request: Request,
        route: str,
        body_type: type[TokenizeRequest] | type[DetokenizeRequest] | type[CountRequest] | type[CountMessagesRequest],
    ) -> Any:
        async def answer() -> Response:
            body = body_type.read(await body_bytes(request, self._max_body_bytes))
            told = await self._ask(
                request, body.model, lambda client: self._in_time(request, partial(body.answer, client))
            )
            content = await asyncio.to_thread(to_json, told)  # may be a million numbers
            return Response(content, headers=headers_of(request_id_of(request)), media_type="application/json")

        return await self._answer(request, route, answer)

    # -- information --------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Any:
        async def answer() -> Response:
            models = models_of(await self._models.infos(), self._started_s)
            return JSONResponse(models, headers=headers_of(request_id_of(request)))

        return await self._answer(request, "models", answer)

    async def model(self, request: Request, model: str) -> Any:
        async def describe(client: AsyncClient) -> dict[str, Any]:
            known = models_of([await client.model_info()], self._started_s)["data"]
            described: dict[str, Any] | None = next((each for each in known if each["id"] == model), None)
            if described is None:
                raise no_such_model(model, [each["id"] for each in known])
            return described

        async def answer() -> Response:
            described = await self._ask(request, model, describe)
            return JSONResponse(described, headers=headers_of(request_id_of(request)))

        return await self._answer(request, "models", answer)

    async def health(self, request: Request) -> Response:
        """200 while requests can be served: a router is there, with a decode worker, and takes our key."""
        try:
            is_serving = await self._models.is_serving()
        except TandemError as error:
            return refuse(request, refusal_of_any(error, request_id_of(request)))
        return Response(status_code=200 if is_serving else 503)

    async def load(self, request: Request) -> Response:
        """vLLM's: how many requests are being answered here."""
        return self._of_this_process(request) or JSONResponse({"server_load": len(self._running)})

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def scrape(self, request: Request) -> Response:
        shown = Response(self._metrics.text(), media_type=self._metrics.content_type)
        return self._of_this_process(request) or shown

    async def page(self) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8")

    def _of_this_process(self, request: Request) -> Response | None:
        """The refusal for a path that shows the counts of this process, if others share the port; None: none does."""
        if self._is_alone:
            return None
        why = (
            f"{request.url.path}: several gateways share this port, and each counts its own requests only. Ask each "
            "for its metrics at its --metrics-listen address (tandem up: --metrics-port)."
        )
        return refuse(request, Refusal(NO_ROUTE, why))

    # -- choosing routers ---------------------------------------------------------------------------------------

    async def _ask(self, request: Request, model: str | None, question: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
        """The result of `question`, called with the client for the routers of `model`. If these routers say that they
        do not have the model, calls `question` again with the client for those that have it now."""
        name = model or ""
        client = self._models.known(name)
        if client is None:
            client = await self._in_time(request, partial(self._models.client_of, name))
        try:
            return await question(client)
        except (InvalidRequest, Refusal) as error:
            if not self._models.are_several or refusal_of_any(error, "").kind != MODEL_NOT_FOUND:
                raise
        return await question(await self._in_time(request, partial(self._models.client_of, name, but=client)))

    async def _in_time(self, request: Request, ask: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of `ask`, which runs until the deadline of `request`, while its client is connected, and until
        this gateway leaves. The request's body must have been read. Raises `DeadlinePassed`, `ClientGone` and
        `Leaving`."""
        try:
            async with asyncio.timeout(left_s_of(request)):
                return await while_connected(request.receive, while_staying(self._leaving, ask()))
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed before a router answered") from None

    # -- errors and keys ----------------------------------------------------------------------------------------

    async def _answer(self, request: Request, route: str, answer: Callable[[], Awaitable[Any]]) -> Any:
        """What `answer` returns, or its error as a response."""
        with self._metrics.counted(route) as outcome:
            try:
                self._check_key(request)
                response = await answer()
            except (ClientGone, ClientDisconnect):
                outcome.status = 499
                return Response(status_code=499)
            except Exception as error:
                request_id = request_id_of(request)
                refusal = refusal_of_any(error, request_id)
                outcome.status = refusal.kind.status
                facts = {"route": route, "status": outcome.status, "request_id": request_id, "why": refusal.message}
                _log.info("refused", extra=facts)
                return refuse(request, refusal)
            outcome.status = 200
            return response

    def _check_key(self, request: Request) -> None:
        given = (bearer_of(request.headers.get("authorization", "")), request.headers.get("x-api-key", ""))
        if self._api_keys and not is_one_of(given, self._api_keys):
            raise Refusal(
                NO_KEY, "the API key is missing or wrong: give it as Authorization: Bearer KEY, or as x-api-key: KEY"
            )


def refuse(request: Request, refusal: Refusal, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The refusal in the format of its route."""
    request_id = request_id_of(request)
    body = error_of(refusal, request_id) if is_of_messages(request.url.path) else refusal.body
    told = {**headers_of(request_id), **refusal.headers, **(headers or {})}
    return JSONResponse(body, status_code=refusal.kind.status, headers=told)
