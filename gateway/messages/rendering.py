"""Answers of /v1/messages on their way out."""

from __future__ import annotations

from gateway.messages.answer import MessageAnswer
from gateway.messages.request import MessageRequest
from gateway.rendering import NamedEvents
from gateway.run import Run
from gateway.streams import named_event


class MessageRendering(NamedEvents):
    """Of one request."""

    keep_alive = named_event({"type": "ping"})

    def __init__(self, run: Run, body: MessageRequest, model: str) -> None:
        """`model`: its name in what is answered."""
        super().__init__(run, MessageAnswer(request_id=run.request_id, model=model))
