"""The HTTP routes. Each reads its body (bounded), asks the router, and answers in OpenAI's words.

    body ──requests──> prompts, sampling ──client──> one stream for each prompt ──answers──> JSON, or server-sent events

A stream's status is known before its first byte: headers are sent with the first token, so that whoever is refused
(429, 503 …) hears of it as of any other request. What fails later is an event {"error": …}, and no [DONE] follows.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.answers import Style, models_of, usage_of
from gateway.echo import Echo, without_answer
from gateway.errors import BUG, KINDS, NO_KEY, NO_ROUTE, TOO_LARGE, Kind, Refusal, refusal_of, refusal_of_body
from gateway.metrics import Metrics
from gateway.requests import MAX_CHOICES, Asked, Body, ChatRequest, CompletionRequest, check_fairness_id
from gateway.streams import (
    DONE,
    ClientGone,
    EventStream,
    Leaving,
    event,
    to_json,
    until_leaving,
    while_connected,
    with_first,
)
from gateway.tokens import DetokenizeRequest, TokenizeRequest
from protos.tandem_inference_pb2 import GenerateResponse, TokenLogprobs, Usage
from rpc.errors import Draining, InvalidRequest, TandemError
from rpc.merge import merged
from tandem import __version__
from tandem.answer import AnswersStream, StreamBroken
from tandem.client import AsyncClient
from tandem.messages import Prompt

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", bound=Asked)

PAGE = Path(__file__).with_name("chat.html")
REQUEST_ID_HEADER = "x-request-id"
MAX_PROMPT_NUMBERS = 262_144
"""How likely tokens of prompts were, in all choices of a request: as JSON 16 MB, half a second of a thread."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""The request's deadline, which OpenAI's API has no word for."""
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
"""Whose request it is, as the Kubernetes Gateway API Inference Extension names it: before what the body says, since a
proxy that knows who asks can set it, and leaves bodies alone."""


def create_app(
    client: AsyncClient,
    *,
    api_key: str = "",
    allowed_origins: Sequence[str] = (),
    max_body_bytes: int = 4 * 1024 * 1024,
    leaving: asyncio.Event | None = None,
) -> FastAPI:
    """The gateway's ASGI application over `client`, which its caller closes. `allowed_origins`: whose pages may read
    the answers in a browser. `leaving`: set when answers that still run are to end, and say why."""
    gateway = Gateway(client, api_key=api_key, max_body_bytes=max_body_bytes, leaving=leaving or asyncio.Event())
    app = FastAPI(title="Tandem", version=__version__, docs_url=None, redoc_url=None)
    posting: list[tuple[str, Any, type[Body]]] = [
        ("/v1/completions", gateway.completions, CompletionRequest),
        ("/v1/chat/completions", gateway.chat, ChatRequest),
        ("/tokenize", gateway.tokenize, TokenizeRequest),
        ("/detokenize", gateway.detokenize, DetokenizeRequest),
    ]
    for path, handler, body in posting:
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=_schema_of(body))
    asking: list[tuple[str, Any]] = [
        ("/v1/models", gateway.models),
        ("/v1/models/{model:path}", gateway.model),
        ("/health", gateway.health),
        ("/version", gateway.version),
        ("/metrics", gateway.scrape),
        ("/", gateway.page),
    ]
    for path, handler in asking:
        app.add_api_route(path, handler, response_model=None, include_in_schema=path != "/")
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_exception)  # type: ignore[arg-type]
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "retry-after"],
        )
    return app


def _schema_of(body: type[Body]) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """No such route, or not with this method."""
    kind = Kind(error.status_code, NO_ROUTE.type, NO_ROUTE.code)
    return _refuse(Refusal(kind, f"{error.detail}: {request.method} {request.url.path}"), dict(error.headers or {}))


class Gateway:
    """The handlers. Keeps nothing of a request beyond its answer."""

    def __init__(self, client: AsyncClient, *, api_key: str, max_body_bytes: int, leaving: asyncio.Event) -> None:
        self._client = client
        self._leaving = leaving
        self._api_key = api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._started_s = int(time.time())
        self._metrics = Metrics()

    # -- generating ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Any:
        return await self._answer(request, "completions", lambda: self._generate(request, CompletionRequest))

    async def chat(self, request: Request) -> Any:
        return await self._answer(request, "chat", lambda: self._generate(request, ChatRequest))

    async def _generate(self, request: Request, body_type: type[_Body]) -> Any:
        body = body_type.read(await self._read(request))
        model = body.model or (await self._client.model_info()).model
        run = Run(self._client, body, model, request, self._leaving)
        if not body.stream:
            content = await while_connected(request.receive, run.whole())
            return Response(content, headers=run.headers, media_type="application/json")
        messages = run.messages()
        try:
            first = await while_connected(request.receive, anext(messages))
        except BaseException:
            await messages.aclose()
            raise
        return EventStream(run.events(with_first(first, messages)), run.headers)

    async def _read(self, request: Request) -> bytes:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body_bytes:
                raise Refusal(TOO_LARGE, f"the body may have {self._max_body_bytes} bytes, and has more")
        return bytes(data)

    # -- tokens -------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Any:
        return await self._answer(request, "tokenize", lambda: self._tokens(request, TokenizeRequest))

    async def detokenize(self, request: Request) -> Any:
        return await self._answer(request, "detokenize", lambda: self._tokens(request, DetokenizeRequest))

    async def _tokens(self, request: Request, body_type: type[TokenizeRequest] | type[DetokenizeRequest]) -> Any:
        body = body_type.read(await self._read(request))
        answer = await while_connected(request.receive, body.answer(self._client))
        content = await asyncio.to_thread(to_json, answer)  # a million numbers, maybe
        return Response(content, headers={REQUEST_ID_HEADER: request_id_of(request)}, media_type="application/json")

    # -- asking -------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Any:
        async def answer() -> Response:
            models = models_of(await self._client.model_info(), self._started_s)
            return JSONResponse(models, headers={REQUEST_ID_HEADER: request_id_of(request)})

        return await self._answer(request, "models", answer)

    async def model(self, request: Request, model: str) -> Any:
        async def answer() -> Response:
            known = models_of(await self._client.model_info(), self._started_s)["data"]
            described = next((each for each in known if each["id"] == model), None)
            if described is None:
                names = ", ".join(repr(each["id"]) for each in known)
                raise InvalidRequest([("model", f"there is no model {model[:128]!r}; there is {names}")])
            return JSONResponse(described, headers={REQUEST_ID_HEADER: request_id_of(request)})

        return await self._answer(request, "models", answer)

    async def health(self) -> Response:
        """200 while requests can be served: the router is there, and a decode worker with it."""
        try:
            is_serving = await self._client.is_serving()
        except TandemError as error:
            return _refuse(refusal_of(error), {})
        return Response(status_code=200 if is_serving else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def scrape(self) -> Response:
        return Response(self._metrics.text(), media_type=self._metrics.content_type)

    async def page(self) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8")

    # -- whatever happens ---------------------------------------------------------------------------------------

    async def _answer(self, request: Request, route: str, answer: Callable[[], Awaitable[Any]]) -> Any:
        """What `answer` returns, or its error as a response."""
        request_id = request_id_of(request)
        headers = {REQUEST_ID_HEADER: request_id}
        with self._metrics.counted(route) as outcome:
            try:
                self._check_key(request)
                response = await answer()
            except (ClientGone, ClientDisconnect):
                outcome.status = 499
                return Response(status_code=499)
            except Exception as error:
                refusal = refusal_of_any(error, request_id)
                outcome.status = refusal.kind.status
                return _refuse(refusal, headers)
            outcome.status = 200
            return response

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._api_key)
        if self._api_key and not is_right:
            raise Refusal(NO_KEY, "the API key is missing or wrong: give it as Authorization: Bearer KEY")


class Run:
    """One HTTP request's prompts at the router. Raises what the client raises."""

    def __init__(self, client: AsyncClient, body: Asked, model: str, request: Request, leaving: asyncio.Event) -> None:
        """`model`: the one that is served, where the body names none. Raises `InvalidRequest` for a useless header."""
        self._client = client
        self._leaving = leaving
        self._body = body
        self._prompts = body.prompts()
        self._n = body.n or 1
        """Choices to each prompt. Those to the first come first."""
        self._sampling = body.sampling()
        self._sampling["fairness_id"] = _fairness_id_of(request) or body.fairness_id
        self._num_told = 0
        """Numbers of prompts' tokens, in all choices."""
        self._is_echo_alone = isinstance(body, CompletionRequest) and body.is_echo_alone
        self._num_choices = len(self._prompts) * self._n
        if self._num_choices > MAX_CHOICES:
            bound = f"may be {MAX_CHOICES} choices in all, is {self._n} to each of {len(self._prompts)} prompts"
            raise InvalidRequest([("n", bound)])
        self._request_id = body.request_id or request_id_of(request)
        self._timeout_s = _timeout_of(request)
        prefix = "chatcmpl" if isinstance(body, ChatRequest) else "cmpl"
        self._style = Style(
            is_chat=isinstance(body, ChatRequest),
            answer_id=f"{prefix}-{self._request_id}",
            created_s=int(time.time()),
            model=body.model or model,
            echo=_echo_of(body, self._prompts),
            names_tool=isinstance(body, ChatRequest) and body.names_tool,
        )
        self.headers = {REQUEST_ID_HEADER: self._request_id}

    async def whole(self) -> bytes:
        """All answers as one object, in JSON."""
        streams = [AnswersStream(self._n) for _ in self._prompts]
        async for choice, message in self.messages():
            streams[choice // self._n].accept(message)
        answers = [answer for stream in streams for answer in stream.answers()]

        def render() -> bytes:
            return to_json(self._style.whole(answers, self._n, self._body.prompt_logprobs))

        # Logprobs take milliseconds for every hundred tokens: others go on meanwhile.
        if any(answer.logprobs or answer.prompt_logprobs for answer in answers):
            return await asyncio.to_thread(render)
        return render()

    def messages(self) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """Of all choices, by number, as they come. Checked by the client: contiguous, and ended once."""
        ids = [self._request_id]
        if len(self._prompts) > 1:
            ids = [f"{self._request_id}-{index}" for index in range(len(self._prompts))]
        streams = [
            self._client.stream(
                prompt,
                request_id=request_id,
                model=self._body.model or "",
                timeout_s=self._timeout_s,
                n=self._n,
                **self._sampling,
            )
            for prompt, request_id in zip(self._prompts, ids, strict=True)
        ]
        return until_leaving(self._by_choice(streams), self._leaving)

    async def _by_choice(
        self, streams: list[AsyncGenerator[GenerateResponse, None]]
    ) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """Of one stream for each prompt."""
        try:
            async with aclosing(merged(streams)) as messages:
                async for prompt, message in messages:
                    choice = prompt * self._n + message.sequence
                    self._count(message.prompt_logprobs)
                    yield choice, without_answer(message) if self._is_echo_alone else message
        except InvalidRequest as error:
            raise self._body.in_its_words(error) from error

    def _count(self, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        """Raises `InvalidRequest` where an object, or its events, would be larger than anybody wants to wait for."""
        self._num_told += self._n * sum(1 + len(each.top) for each in prompt_logprobs)
        if self._num_told > MAX_PROMPT_NUMBERS:
            bound = f"may be {MAX_PROMPT_NUMBERS} numbers of prompts' tokens in all choices, is more: ask for fewer"
            raise InvalidRequest([("prompt_logprobs", bound)])

    async def events(self, messages: AsyncGenerator[tuple[int, GenerateResponse], None]) -> AsyncGenerator[bytes, None]:
        """Of `messages`, which it closes."""
        is_chat = isinstance(self._body, ChatRequest)
        usages = [Usage() for _ in range(self._num_choices)]
        opened: set[int] = set()
        try:
            async for index, message in messages:
                is_first = index not in opened
                opened.add(index)
                if is_chat and is_first:
                    yield event(self._style.opening(index))
                usage = usages[index]
                usage.completion_tokens += len(message.token_ids)
                if message.HasField("usage"):
                    usage.CopyFrom(message.usage)
                is_news = (
                    message.text
                    or message.reasoning
                    or message.finish_reason
                    or message.tool_calls
                    or message.logprobs
                    or message.prompt_logprobs
                )
                if is_news or self._body.includes_usage_always:
                    render = partial(self._event, index, message, usage)
                    # A prompt's numbers, in front of each choice, may take long.
                    yield (
                        await asyncio.to_thread(render)
                        if is_first and "prompt_logprobs" in self._sampling
                        else render()
                    )
        except Exception as error:
            yield event(refusal_of_any(error, self._request_id).body)
            return
        finally:
            await messages.aclose()
        if self._body.includes_usage:
            yield event(self._style.usage(usages, self._n))
        yield DONE

    def _event(self, choice: int, message: GenerateResponse, usage: Usage) -> bytes:
        piece = self._style.piece(choice, message)
        if self._body.includes_usage_always:
            piece["usage"] = usage_of([usage])
        return event(piece)


def _echo_of(body: Asked, prompts: Sequence[Prompt]) -> Echo | None:
    if isinstance(body, CompletionRequest) and body.echo:
        return Echo(prompts, body.n or 1, body.logprobs)
    return None


def refusal_of_any(error: Exception, request_id: str) -> Refusal:
    """What the client is told. A bug is logged, and named by the request alone."""
    match error:
        case Refusal():
            return error
        case TandemError():
            return refusal_of(error)
        case Leaving():
            return refusal_of(Draining("this gateway is leaving and can wait no longer for the answer"))
        case ValidationError():
            return refusal_of_body(error)
        case ValueError():  # by the client, of what the wire cannot carry: "name: what is wrong with it"
            return Refusal(KINDS[InvalidRequest], str(error), param=str(error).partition(":")[0])
        case StreamBroken():
            _log.error("the router's stream is not exact", extra={"request_id": request_id, "why": str(error)})
        case _:
            _log.error("unexpected error", extra={"request_id": request_id}, exc_info=error)
    return Refusal(BUG, f"a bug of the server; it has logged it with request_id={request_id}")


def request_id_of(request: Request) -> str:
    """As the client named it, or a new name, the same for one request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request.state.request_id = given if re.fullmatch(r"[\x21-\x7e]{1,100}", given) else secrets.token_hex(12)
    return str(request.state.request_id)


def _timeout_of(request: Request) -> float | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,11}", given):
        raise InvalidRequest(
            [(TIMEOUT_HEADER, f"must be a whole number of milliseconds from 1 to 999999999999, is {given[:40]!r}")]
        )
    return int(given) / 1000


def _fairness_id_of(request: Request) -> str:
    """Empty: no header says."""
    try:  # the bytes of a header are read as Latin-1
        return check_fairness_id(request.headers.get(FAIRNESS_HEADER, "").encode("latin-1").decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, "must be UTF-8")]) from error
    except ValueError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, str(error))]) from error


def _refuse(refusal: Refusal, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse(refusal.body, status_code=refusal.kind.status, headers={**headers, **refusal.headers})
