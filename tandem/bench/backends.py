"""The servers to measure: Tandem over gRPC, and anything with OpenAI's HTTP API (Tandem, vLLM, SGLang …).

Each backend owns a connection, which is closed when the context is left. An error of the server becomes `NotAnswered`:
*refused* if the server has no room now (RESOURCE_EXHAUSTED, no worker, 429, 503) and nothing has come yet, otherwise
*failed*.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rpc.errors import (
    STATUS_CODES,
    DeadlinePassed,
    Draining,
    NoWorker,
    Outdated,
    Overloaded,
    TandemError,
    Unauthenticated,
)
from rpc.tls import ClientTLS
from tandem.bench.openai_stream import OpenAIStream, ServerError
from tandem.bench.outcome import Usage
from tandem.bench.run import Backend, NotAnswered, Piece
from tandem.bench.workload import Request, Tokens
from tandem.client import AsyncClient

BACKENDS = ("grpc", "openai", "openai-chat")
REFUSALS: tuple[type[TandemError], ...] = (Overloaded, NoWorker, Draining, Outdated)
HTTP_REFUSALS = (429, 503)
CONNECT_TIMEOUT_S = 10.0
TIMEOUT = "timeout"

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body "
    "information back parent face"
)
WORDS = tuple(_WORDS.split())
"""In a chat, each token becomes one of these words, which most vocabularies have as one token."""


class ServerGone(Exception):  # noqa: N818 - named for what happened
    """The server cannot be used at all. The message is one line that says what to do."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How every request is sent."""

    ignores_eos: bool = True
    temperature: float = 0.0
    timeout_s: float | None = None
    """The time after which a client gives up. None: never."""


class GrpcBackend:
    """A Tandem router. The client checks every stream (`tandem.answer`)."""

    def __init__(self, client: AsyncClient, sending: Sending) -> None:
        self.ignores_eos = sending.ignores_eos
        self._client = client
        self._sending = sending

    async def send(self, request: Request) -> AsyncGenerator[Piece, None]:
        has_begun = False
        stream = self._client.stream(
            request.prompt.tolist(),
            max_tokens=request.output_tokens,
            temperature=self._sending.temperature,
            ignore_eos=self._sending.ignores_eos,
            timeout_s=self._sending.timeout_s,
        )
        try:
            async with aclosing(stream) as messages:
                async for message in messages:
                    if message.token_ids:
                        has_begun = True
                        yield Piece(len(message.token_ids))
                    if message.HasField("usage"):
                        usage = message.usage
                        yield Piece(0, Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens))
        except TandemError as error:
            is_refused = isinstance(error, REFUSALS) and not has_begun
            code = TIMEOUT if isinstance(error, DeadlinePassed) else STATUS_CODES[type(error)].name
            raise NotAnswered(code, error.message, is_refused=is_refused) from error


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """The address of an OpenAI-compatible server, and what its requests need."""

    base_url: str
    is_chat: bool = False
    endpoint: str = ""
    """Path of the requests; empty: OpenAI's."""
    model: str = ""
    """Empty: the first one that /v1/models lists."""
    api_key: str = ""
    ssl_ca_certs: str = ""
    """A file of CA certificates; empty: the CAs that the system trusts."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of every body, which override ours."""

    @property
    def path(self) -> str:
        return self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class OpenAIBackend:
    """Completions of token ids, or chats of as many words. Every stream is checked (`tandem.bench.openai_stream`)."""

    def __init__(self, client: Any, server: HttpServer, sending: Sending) -> None:
        """`client`: an httpx2.AsyncClient."""
        self.ignores_eos = sending.ignores_eos
        self._client = client
        self._server = server
        self._timeout_s = sending.timeout_s
        self._headers = server.headers
        if sending.timeout_s is not None:
            # Tandem refuses a request that would be too late; other servers ignore this header.
            self._headers["x-request-timeout-ms"] = str(max(1, round(1000 * sending.timeout_s)))
        self._fields = body_fields(server, sending)

    async def send(self, request: Request) -> AsyncGenerator[Piece, None]:
        body = {**self._fields, "max_tokens": request.output_tokens, **prompt_of(request.prompt, self._server.is_chat)}
        body |= self._server.extra_body
        stream = OpenAIStream(is_chat=self._server.is_chat, prompt_tokens=num_prompt_tokens(body))
        import httpx2

        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._server.path, json=body, headers=self._headers) as response,
            ):
                if response.status_code != 200:
                    raise await _not_answered(response)
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (num_tokens := stream.accept(line[5:].strip())):
                        yield Piece(num_tokens)
        except TimeoutError as error:
            raise NotAnswered(TIMEOUT, f"not complete after {self._timeout_s:g} s") from error
        except ServerError as error:
            raise NotAnswered(error.code, str(error)) from error
        except httpx2.TransportError as error:
            raise NotAnswered(type(error).__name__, str(error)) from error
        yield Piece(0, stream.check_ended())


def body_fields(server: HttpServer, sending: Sending) -> dict[str, Any]:
    """The fields that all bodies share."""
    return {
        "model": server.model,
        "temperature": sending.temperature,
        # Only if requested: this is vLLM's field, which OpenAI itself refuses.
        **({"ignore_eos": True} if sending.ignores_eos else {}),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def prompt_of(prompt: Tokens, is_chat: bool) -> dict[str, Any]:
    if not is_chat:
        return {"prompt": prompt.tolist()}
    text = " ".join(WORDS[token % len(WORDS)] for token in prompt.tolist())
    return {"messages": [{"role": "user", "content": text}]}


def num_prompt_tokens(body: dict[str, Any]) -> int | None:
    """Tokens of the prompt in `body`; None if only the server knows: the prompt is a text, or the server is asked to
    cut it."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or body.get("truncate_prompt_tokens") is not None:
        return None
    return len(prompt) if prompt and isinstance(prompt[0], int) else None


async def _not_answered(response: Any) -> NotAnswered:
    """The error in a response with a status other than 200."""
    text = (await response.aread()).decode("utf-8", "replace")
    try:
        error = json.loads(text)
        error = error.get("error") or error
        text = str(error.get("message") or error)
    except (ValueError, AttributeError):
        pass  # keep the text as it is
    return NotAnswered(
        str(response.status_code), " ".join(text.split())[:300], is_refused=response.status_code in HTTP_REFUSALS
    )


@asynccontextmanager
async def open_grpc(
    address: str, sending: Sending, vocab_size: int, *, api_key: str, tls: ClientTLS | None
) -> AsyncIterator[tuple[Backend, str]]:
    """Open a backend for the router at `address`, or for several in turn; yields it with the name of their model.
    `vocab_size`: prompts will have token ids below this. Raises `ServerGone`."""
    async with AsyncClient(address, api_key=api_key, tls=tls) as client:
        try:
            info = await client.model_info()
        except Unauthenticated as error:
            raise ServerGone(
                f"the router at {address} requires an API key, and got none or a wrong one: give it with "
                "--api-key KEY or TANDEM_API_KEY"
            ) from error
        except TandemError as error:
            raise ServerGone(
                f"no router answers at {address} ({error.message}). Start one with `tandem up`, or name another with "
                "--router HOST:PORT; one that speaks TLS needs --ssl-ca-certs FILE"
            ) from error
        if vocab_size > info.vocab_size:
            raise ServerGone(
                f"--vocab-size must be at most {info.vocab_size}, the vocabulary of {info.model}, is {vocab_size}"
            )
        yield GrpcBackend(client, sending), info.model


@asynccontextmanager
async def open_http(server: HttpServer, sending: Sending) -> AsyncIterator[tuple[Backend, str]]:
    """Open a backend for an OpenAI-compatible server; yields it with the name of the model. Raises `ServerGone`."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
    trusted = ssl.create_default_context(cafile=server.ssl_ca_certs) if server.ssl_ca_certs else True
    async with httpx2.AsyncClient(
        base_url=server.base_url.removesuffix("/").removesuffix("/v1"), timeout=timeout, limits=limits, verify=trusted,
        trust_env=False,
    ) as client:  # fmt: skip
        model = server.model or await _first_model(client, server)
        yield OpenAIBackend(client, replace(server, model=model), sending), model


async def _first_model(client: Any, server: HttpServer) -> str:
    import httpx2

    try:
        response = await client.get("/v1/models", headers=server.headers, timeout=CONNECT_TIMEOUT_S)
        if response.status_code == 200:
            return str(response.json()["data"][0]["id"])
        no = await _not_answered(response)
        why = f"{no.code}: {no.message}"
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        why = str(error) or type(error).__name__
    raise ServerGone(
        f"{server.base_url} does not list its models ({why}). Is it an OpenAI-compatible server? Name it with "
        "--base-url http://HOST:PORT, its model with --model, a key that it asks for with --api-key or OPENAI_API_KEY"
    )
