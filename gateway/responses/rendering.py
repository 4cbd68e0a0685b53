"""Renders the answers of /v1/responses."""

from __future__ import annotations

import time

from gateway.rendering import NamedEvents
from gateway.responses.answer import ResponseAnswer
from gateway.responses.request import ResponseRequest
from gateway.run import Run


class ResponseRendering(NamedEvents):
    """Renders the answer to one request."""

    def __init__(self, run: Run, body: ResponseRequest, model: str) -> None:
        """`model`: the model's name in the answer."""
        answer = ResponseAnswer(body, request_id=run.request_id, created_s=int(time.time()), model=model)
        super().__init__(run, answer, has_logprobs=body.wants_logprobs)
