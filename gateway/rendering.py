"""Answers of /v1/responses and /v1/messages on their way out: a run's messages as one object, or as server-sent events
whose names their `type` says.

What fails after the first event is an event, too, in the route's words. No [DONE] follows.
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
    """The answer to one request in its route's words: both forms of it, made of the same messages."""

    def opening(self) -> list[Event]:
        """Before any message has come."""

    def accept(self, message: GenerateResponse) -> list[Event]:
        """What is new with `message`; with the last one, the end. Raises `StreamBroken`."""

    def failed(self, refusal: Refusal) -> Event:
        """The last event where there is no end."""

    def whole(self) -> dict[str, Any]:
        """After the last message."""


class NamedEvents:
    """Of one request."""

    keep_alive = COMMENT

    def __init__(self, run: Run, answer: RouteAnswer, *, has_logprobs: bool = False) -> None:
        """`has_logprobs`: their JSON takes milliseconds for every hundred tokens: others go on meanwhile."""
        self._run = run
        self._answer = answer
        self._has_logprobs = has_logprobs

    async def whole(self) -> bytes:
        """The answer as one object, in JSON."""
        async with aclosing(self._run.messages()) as messages:
            async for _, message in messages:
                self._answer.accept(message)
        whole = self._answer.whole()
        return await asyncio.to_thread(to_json, whole) if self._has_logprobs else to_json(whole)

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """Of the run's `messages`, which it closes."""
        try:
            if events := self._answer.opening():
                yield _sent(events)
            async for _, message in messages:
                events = self._answer.accept(message)
                if self._has_logprobs and message.HasField("usage"):  # the end tells all of them, four times
                    yield await asyncio.to_thread(_sent, events)
                elif events:
                    yield _sent(events)
        except Exception as error:
            yield _sent([self._answer.failed(self._run.failed(error))])
        finally:
            await messages.aclose()


def _sent(events: list[Event]) -> bytes:
    return b"".join(map(named_event, events))
