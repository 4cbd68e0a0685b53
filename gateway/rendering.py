"""Renders the answers of /v1/responses and /v1/messages: a run's messages as one object, or as server-sent events that
are named by their `type`.

A failure after the first event is an event in the route's format. No [DONE] follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from gateway.errors import Refusal
from gateway.run import Run
from gateway.spoken import Event
from gateway.streams import COMMENT, Begun, named_event, to_json
from protos.tandem_inference_pb2 import GenerateResponse


class RouteAnswer(Protocol):
    """The answer to one request in its route's format, made from the router's messages."""

    def opening(self) -> list[Event]:
        """The events before the first message."""

    def accept(self, message: GenerateResponse) -> list[Event]:
        """The events for `message`; for the last one, with those of the end. Raises `StreamBroken`."""

    def failed(self, refusal: Refusal) -> Event:
        """The last event of an answer that fails."""

    def whole(self) -> dict[str, Any]:
        """The whole answer, after the last message."""


class NamedEvents:
    """Renders the answer to one request."""

    keep_alive = COMMENT

    def __init__(self, run: Run, answer: RouteAnswer, *, has_logprobs: bool = False) -> None:
        """`has_logprobs`: render in a thread, since JSON of logprobs takes milliseconds for every hundred tokens."""
        self._run = run
        self._answer = answer
        self._has_logprobs = has_logprobs

    async def whole(self) -> bytes:
        """The answer as one JSON object."""
        async with aclosing(self._run.messages()) as messages:
            async for _, message in messages:
                self._answer.accept(message)
        whole = self._answer.whole()
        return await asyncio.to_thread(to_json, whole) if self._has_logprobs else to_json(whole)

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """The events of the run's `messages`, which it closes."""
        try:
            if events := self._answer.opening():
                yield _sent(events)
            async for _, message in messages:
                events = self._answer.accept(message)
                if self._has_logprobs and message.HasField("usage"):  # the last events repeat all logprobs four times
                    yield await asyncio.to_thread(_sent, events)
                elif events:
                    yield _sent(events)
        except Exception as error:
            yield _sent([self._answer.failed(self._run.failed(error))])
        finally:
            await messages.aclose()


def _sent(events: list[Event]) -> bytes:
    return b"".join(map(named_event, events))
