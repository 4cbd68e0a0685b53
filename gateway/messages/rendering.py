"""Renders the answers of /v1/messages."""

from __future__ import annotations

from gateway.messages.answer import MessageAnswer
from gateway.messages.request import MessageRequest
from gateway.rendering import NamedEvents
from gateway.run import Run
from gateway.streams import named_event


class MessageRendering(NamedEvents):
    """Renders the answer to one request."""

    keep_alive = named_event({"type": "ping"})

    def __init__(self, run: Run, body: MessageRequest, model: str) -> None:
        """`model`: the model's name in the answer."""
        super().__init__(run, MessageAnswer(request_id=run.request_id, model=model))
