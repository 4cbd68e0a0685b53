"""Answers of /v1/responses on their way out: a run's messages as one object, or as server-sent events.

What fails after the first event is an event response.failed. No [DONE] follows any stream, as with OpenAI.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.errors import refusal_of_any
from gateway.responses.answer import ResponseAnswer
from gateway.responses.output import Event
from gateway.responses.request import ResponseRequest
from gateway.run import Run
from gateway.streams import COMMENT, Begun, named_event, to_json
from protos.tandem_inference_pb2 import GenerateResponse


class ResponseRendering:
    """Of one request."""

    keep_alive = COMMENT

    def __init__(self, run: Run, body: ResponseRequest, model: str) -> None:
        """`model`: its name in what is answered."""
        self._run = run
        self._wants_logprobs = body.wants_logprobs
        self._answer = ResponseAnswer(body, request_id=run.request_id, created_s=int(time.time()), model=model)

    async def whole(self) -> bytes:
        """The Response object, in JSON."""
        async with aclosing(self._run.messages()) as messages:
            async for _, message in messages:
                self._answer.accept(message)
        # Logprobs take milliseconds for every hundred tokens: others go on meanwhile.
        if self._wants_logprobs:
            return await asyncio.to_thread(to_json, self._answer.whole())
        return to_json(self._answer.whole())

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """Of the run's `messages`, which it closes."""
        try:
            yield _sent(self._answer.opening())
            async for _, message in messages:
                events = self._answer.accept(message)
                if self._wants_logprobs and message.HasField("usage"):  # the end tells all of them, four times
                    yield await asyncio.to_thread(_sent, events)
                elif events:
                    yield _sent(events)
        except Exception as error:
            yield _sent([self._answer.failed(refusal_of_any(error, self._run.request_id))])
        finally:
            await messages.aclose()


def _sent(events: list[Event]) -> bytes:
    return b"".join(map(named_event, events))
