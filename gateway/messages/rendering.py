"""Answers of /v1/messages on their way out: a run's messages as one object, or as server-sent events.

What fails after the first event is an event `error`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway.errors import refusal_of_any
from gateway.messages.answer import Event, MessageAnswer
from gateway.messages.errors import error_of
from gateway.messages.request import MessageRequest
from gateway.run import Run
from gateway.streams import Begun, named_event, to_json
from protos.tandem_inference_pb2 import GenerateResponse


class MessageRendering:
    """Of one request."""

    keep_alive = named_event({"type": "ping"})

    def __init__(self, run: Run, body: MessageRequest, model: str) -> None:
        """`model`: its name in what is answered."""
        self._run = run
        self._answer = MessageAnswer(request_id=run.request_id, model=model)

    async def whole(self) -> bytes:
        """The Message object, in JSON."""
        async with aclosing(self._run.messages()) as messages:
            async for _, message in messages:
                self._answer.accept(message)
        return to_json(self._answer.whole())

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """Of the run's `messages`, which it closes."""
        try:
            async for _, message in messages:
                if events := self._answer.accept(message):
                    yield _sent(events)
        except Exception as error:
            request_id = self._run.request_id
            yield _sent([error_of(refusal_of_any(error, request_id), request_id)])
        finally:
            await messages.aclose()


def _sent(events: list[Event]) -> bytes:
    return b"".join(map(named_event, events))
