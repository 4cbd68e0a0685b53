"""Errors on /v1/messages, in Anthropic's format. Pure: the statuses are the same as on other routes."""

from __future__ import annotations

import re
from typing import Any

from gateway.errors import CONTEXT_EXCEEDED, Refusal

PATH = "/v1/messages"
"""This path, and those below it, have Anthropic's errors."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by status; "api_error" for all others."""


_TOO_LONG = "(a context of "
"""Occurs in the router's error about a prompt that is too long by itself."""
_BESIDE = re.compile(r"\(the context of (\d+) tokens minus the prompt of (\d+)\), is (\d+)")
"""Occurs in the router's error about an answer for which there is no room beside its prompt."""


def is_of_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def error_of(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """The error as a body, which is also a stream's last event."""
    message = refusal.message if refusal.kind != CONTEXT_EXCEEDED else _out_of_context(refusal.message)
    error = {"type": _TYPES.get(refusal.kind.status, "api_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _out_of_context(message: str) -> str:
    """The message in the wording that Anthropic's clients look for, to ask for a shorter answer or shorten the chat."""
    if found := _BESIDE.search(message):
        context, prompt, answer = found.groups()
        return f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {context}. {message}"
    return f"prompt is too long. {message}" if _TOO_LONG in message else message
