"""Runs one HTTP request at the router: sends its prompts, and merges the router's messages.

body, headers ──> Run ── messages() ──> of all prompts, as they come ── until the gateway leaves
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from starlette.requests import Request

from gateway.asked import Asked
from gateway.echo import without_answer
from gateway.errors import Refusal, refusal_in_stream
from gateway.headers import (
    fairness_id_of,
    headers_of,
    left_s_of,
    request_id_of,
    trace_headers_of_request,
)
from gateway.requests import MAX_CHOICES, CompletionRequest
from gateway.streams import until_leaving
from protos.tandem_inference_pb2 import GenerateResponse
from rpc.errors import InvalidRequest, RequestExists
from rpc.merge import merged
from tandem.client import AsyncClient

MAX_PROMPT_NUMBERS = 262_144
"""Maximum number of prompt logprobs in all choices of a request: 16 MB of JSON, half a second of a thread."""
MAX_PROMPT_TOKEN_IDS = 2_097_152
"""Likewise for token ids of prompts: 14 MB of JSON."""


class Run:
    """One HTTP request's prompts at the router. Raises what `AsyncClient` raises."""

    def __init__(
        self,
        client: AsyncClient,
        body: Asked,
        request: Request,
        leaving: asyncio.Event,
        running: set[Run],
        on_failed: Callable[[int], None],
    ) -> None:
        """`running`: contains this run while its messages are read. `on_failed`: gets the status that a failed stream
        would have had. Raises `InvalidRequest` for a wrong header, and for too many choices."""
        self._client = client
        self._leaving = leaving
        self._running = running
        self._on_failed = on_failed
        self._body = body
        self.request_id = request_id_of(request)
        self.prompts = body.prompts()
        self.n = body.num_answers
        """Answers per prompt. Those to the first prompt come first."""
        self.sampling = body.sampling()
        self.sampling["fairness_id"] = fairness_id_of(request) or body.fairness_id
        self._num_told = 0
        """Prompt logprobs so far, in all choices."""
        self._num_ids_told = 0
        self._is_echo_alone = isinstance(body, CompletionRequest) and body.is_echo_alone
        if len(self.prompts) * self.n > MAX_CHOICES:
            most = MAX_CHOICES // len(self.prompts)
            bound = (
                f"must be at most {most} with {len(self.prompts)} prompts ({MAX_CHOICES} choices in all), is {self.n}"
            )
            raise InvalidRequest([("n", bound)])
        self._timeout_s = left_s_of(request)
        self._trace_headers = trace_headers_of_request(request)
        self.headers = headers_of(self.request_id)

    def messages(self) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """The messages of all choices, each with its choice's number, as they come. `AsyncClient` checks that each
        choice is contiguous and ends once."""
        ids = [self.request_id]
        if len(self.prompts) > 1:
            ids = [f"{self.request_id}-{index}" for index in range(len(self.prompts))]
        streams = []
        for prompt, request_id in zip(self.prompts, ids, strict=True):
            ask = partial(
                self._client.stream,
                prompt,
                model=self._body.model or "",
                timeout_s=self._timeout_s,
                n=self.n,
                trace_headers=self._trace_headers,
                **self.sampling,
            )
            other_id = f"{request_id}-{secrets.token_hex(4)}"
            streams.append(_under_free_name(ask(request_id=request_id), partial(ask, request_id=other_id)))
        return until_leaving(self._by_choice(streams), self._leaving)

    def failed(self, error: Exception) -> Refusal:
        """Record the failure of a stream that has begun. Returns the refusal that ends it."""
        refusal = refusal_in_stream(error, self.request_id)
        self._on_failed(refusal.kind.status)
        return refusal

    async def _by_choice(
        self, streams: list[AsyncGenerator[GenerateResponse, None]]
    ) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """Merge the streams, one for each prompt, and number their messages by choice."""
        self._running.add(self)
        try:
            async with aclosing(merged(streams)) as messages:
                async for prompt, message in messages:
                    choice = prompt * self.n + message.sequence
                    if message.prompt_logprobs or message.prompt_token_ids:
                        self._count(message)
                    yield choice, without_answer(message) if self._is_echo_alone else message
        except InvalidRequest as error:
            raise self._body.in_its_words(error) from error
        finally:
            self._running.discard(self)

    def _count(self, message: GenerateResponse) -> None:
        """Count the prompt's logprobs and token ids in `message`. Raises `InvalidRequest` if the answer becomes too
        large."""
        self._num_told += self.n * sum(1 + len(each.top) for each in message.prompt_logprobs)
        if self._num_told > MAX_PROMPT_NUMBERS:
            bound = f"makes more than {MAX_PROMPT_NUMBERS} numbers for the prompts of all choices; ask for fewer"
            raise InvalidRequest([("prompt_logprobs", bound)])
        self._num_ids_told += self.n * len(message.prompt_token_ids)
        if self._num_ids_told > MAX_PROMPT_TOKEN_IDS:
            bound = f"would return more than {MAX_PROMPT_TOKEN_IDS} prompt token ids in all choices; leave it out"
            raise InvalidRequest([("return_token_ids", bound)])


async def _under_free_name(
    stream: AsyncGenerator[GenerateResponse, None], again: Callable[[], AsyncGenerator[GenerateResponse, None]]
) -> AsyncGenerator[GenerateResponse, None]:
    """Yield from `stream`, or, if its request id is in use, from `again()`, which uses another id. HTTP clients use one
    id for all requests of one purpose, and for repeated ones; a router needs unique ids."""
    has_begun = False
    try:
        async with aclosing(stream):
            async for message in stream:
                has_begun = True
                yield message
        return
    except RequestExists:
        if has_begun:
            raise
    async with aclosing(again()) as other:
        async for message in other:
            yield message
