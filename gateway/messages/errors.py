"""What goes wrong on /v1/messages, in Anthropic's words. Pure: statuses are those of all routes."""

from __future__ import annotations

from typing import Any

from gateway.errors import Refusal

PATH = "/v1/messages"
"""And what is below it."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; of all others "api_error"."""


def is_of_messages(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def error_of(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """A body, and a stream's last event."""
    error = {"type": _TYPES.get(refusal.kind.status, "api_error"), "message": refusal.message}
    return {"type": "error", "error": error, "request_id": request_id}
