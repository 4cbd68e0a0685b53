"""Errors in OpenAI's format: an HTTP status and a body {"error": {message, type, param, code}}.

Owns the one table from our errors to HTTP, and nothing else. A client that may try again is told when (Retry-After);
OpenAI's own clients do so by themselves for 409, 429 and 5xx. Details of bugs are logged and not told to clients.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from gateway.asked import MAX_CHARS_OF_TYPO
from gateway.routes_of_vllm import INSTEAD
from gateway.streams import Leaving
from gateway.wording import in_our_words
from rpc.errors import (
    CorruptKV,
    DeadlinePassed,
    Draining,
    Incompatible,
    InternalError,
    InvalidRequest,
    LeaseGone,
    NotFound,
    NoWorker,
    Outdated,
    Overloaded,
    RequestCancelled,
    RequestExists,
    TandemError,
    Unauthenticated,
    Unreachable,
)
from tandem.answer import StreamBroken

_log = logging.getLogger(__name__)


class Kind(NamedTuple):
    status: int
    type: str
    code: str | None


RETRY_AFTER_S = 1.0
"""For errors without a time to retry, such as those of a router that is restarting."""
UNAVAILABLE = Kind(503, "server_error", "unavailable")
INTERNAL = Kind(500, "server_error", "internal_error")
KINDS: dict[type[TandemError], Kind] = {
    InvalidRequest: Kind(400, "invalid_request_error", None),
    Unauthenticated: INTERNAL,  # the gateway, by the router
    NotFound: Kind(404, "invalid_request_error", "not_found"),
    RequestExists: Kind(409, "invalid_request_error", "request_exists"),
    Overloaded: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    RequestCancelled: Kind(499, "server_error", "cancelled"),
    DeadlinePassed: Kind(504, "server_error", "deadline_exceeded"),
    NoWorker: UNAVAILABLE,
    Draining: UNAVAILABLE,
    Outdated: UNAVAILABLE,
    Unreachable: UNAVAILABLE,
    LeaseGone: UNAVAILABLE,
    Incompatible: INTERNAL,
    CorruptKV: INTERNAL,
    InternalError: INTERNAL,
}
CONTEXT_EXCEEDED = Kind(400, "invalid_request_error", "context_length_exceeded")
_OUT_OF_CONTEXT = re.compile(r"\((?:a|the) context of (\d+)")
"""Occurs in the router's error about a prompt, or a prompt and its answer, that is too long."""
MODEL_NOT_FOUND = Kind(404, "invalid_request_error", "model_not_found")
NO_KEY = Kind(401, "invalid_request_error", "invalid_api_key")
TOO_LARGE = Kind(413, "invalid_request_error", "request_too_large")
UNSUPPORTED_BODY = Kind(415, "invalid_request_error", "unsupported_media_type")
NO_ROUTE = Kind(404, "invalid_request_error", "unknown_url")


class Refusal(Exception):  # noqa: N818 - it is an answer
    """The error response that the client gets instead of an answer."""

    def __init__(
        self, kind: Kind, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}  # whole seconds, by RFC 9110


def refusal_of_any(error: Exception, request_id: str) -> Refusal:
    """The refusal for `error`. A bug is logged; the client only gets the request's id, by which to find it in the
    log."""
    match error:
        case Refusal():
            return error
        case Unauthenticated():
            _log.error("the router does not accept the key of --router-api-key", extra={"request_id": request_id})
            return Refusal(KINDS[Unauthenticated], "the router does not accept this gateway's API key")
        case Unreachable():  # its message is gRPC's, with the addresses that it tried
            _log.warning("no router answers", extra={"request_id": request_id, "why": error.message})
            return refusal_of(
                Unreachable("no router can be reached now; retry later", retry_after_s=error.retry_after_s)
            )
        case TandemError():
            return refusal_of(error)
        case Leaving():
            return refusal_of(Draining("this gateway is shutting down and cannot wait for the answer"))
        case ValidationError():
            return refusal_of_body(error)
        case ValueError():  # from our gRPC client, for what the wire cannot carry: "name: what is wrong with it"
            return Refusal(KINDS[InvalidRequest], str(error), param=str(error).partition(":")[0])
        case StreamBroken():
            _log.error(
                "the router's stream lost, repeated or mixed up messages",
                extra={"request_id": request_id, "why": str(error)},
            )
        case _:
            _log.error("unexpected error", extra={"request_id": request_id}, exc_info=error)
    return Refusal(INTERNAL, f"internal server error; see the server's log for request_id={request_id}")


def refusal_in_stream(error: Exception, request_id: str) -> Refusal:
    """The refusal with which a stream that has begun ends. Its status was 200, so the log, and a counter
    (`Run.failed`), record the failure."""
    refusal = refusal_of_any(error, request_id)
    _log.info("stream failed", extra={"status": refusal.kind.status, "request_id": request_id, "why": refusal.message})
    return refusal


def refusal_of(error: TandemError) -> Refusal:
    """The refusal by the table. Wrong fields already have their names in the body (`Asked.in_its_words`)."""
    kind, param = KINDS[type(error)], None
    message = error.message
    if isinstance(error, InvalidRequest) and error.violations:
        param = error.violations[0].field or None
        if param == "model":
            kind = MODEL_NOT_FOUND
        message = "; ".join(map(str, error.violations))  # the error's own may have been cut
        if param != "model" and (found := _OUT_OF_CONTEXT.search(message)):  # a model's name may contain any text
            # Clients that shorten a chat by themselves look for this code, or for this sentence of OpenAI's.
            kind = CONTEXT_EXCEEDED
            message = f"This model's maximum context length is {found[1]} tokens. {message}"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and kind.status == UNAVAILABLE.status:
        retry_after_s = RETRY_AFTER_S
    return Refusal(kind, message, param=param, retry_after_s=retry_after_s)


def refusal_of_body(error: ValidationError) -> Refusal:
    """The first thing that is wrong with a body, in one sentence."""
    param, message = in_our_words(error.errors())
    return Refusal(KINDS[InvalidRequest], f"{param}: {message}" if param else message, param=param or None)


def refusal_of_route(error: HTTPException, method: str, path: str, paths: Sequence[str]) -> Refusal:
    """The refusal of a request to a path that is none of the served `paths`, or with the wrong method."""
    said = f"{error.detail}: {method} {path:.200}"
    if allowed := (error.headers or {}).get("Allow"):
        said += f"; use {allowed}"
    elif instead := INSTEAD.get(path.rstrip("/")):
        said += f"; {instead}"
    elif len(path) <= MAX_CHARS_OF_TYPO and (close := get_close_matches(path, paths, n=1, cutoff=0.75)):
        said += f"; did you mean {close[0]}?"
    return Refusal(Kind(error.status_code, NO_ROUTE.type, NO_ROUTE.code), said)
