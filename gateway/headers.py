"""Reads a request's headers: its id, its deadline, its client."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping

from starlette.requests import Request

from gateway.asked import check_fairness_id
from rpc.errors import InvalidRequest
from rpc.tracing import trace_headers_of

REQUEST_ID_HEADER = "x-request-id"
ANSWERED_ID_HEADER = "request-id"
"""The request's id in an answer, as Anthropic's clients read it."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""The request's deadline; OpenAI's API has no field for it."""
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
"""The request's client, under the name that the Kubernetes Gateway API Inference Extension gives it. It takes
precedence over the body: a proxy that knows the client can set it without changing bodies."""


def name_request(request: Request, name: str) -> None:
    """Set the request's id from its body, which takes precedence over the header."""
    request.state.request_id = name


def request_id_of(request: Request) -> str:
    """The id that the client gave, or a new one, which stays the same for this request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request.state.request_id = given if re.fullmatch(r"[\x21-\x7e]{1,100}", given) else secrets.token_hex(12)
    return str(request.state.request_id)


def headers_of(request_id: str) -> dict[str, str]:
    """The headers of an answer."""
    return {REQUEST_ID_HEADER: request_id, ANSWERED_ID_HEADER: request_id}


def _timeout_of(request: Request) -> float | None:
    """The request's timeout in seconds; None: it has no deadline. Raises `InvalidRequest`."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,11}", given):
        raise InvalidRequest(
            [(TIMEOUT_HEADER, f"must be a whole number of milliseconds from 1 to 999999999999, is {given[:40]!r}")]
        )
    return int(given) / 1000


def left_s_of(request: Request) -> float | None:
    """Seconds until the request's deadline, which counts from the first call of this function; None: it has none.
    Raises `InvalidRequest`."""
    if not hasattr(request.state, "deadline_s"):
        timeout_s = _timeout_of(request)
        request.state.deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    deadline_s: float | None = request.state.deadline_s
    return None if deadline_s is None else max(0.001, deadline_s - time.monotonic())


def fairness_id_of(request: Request) -> str:
    """The client's name; empty: there is no such header. Raises `InvalidRequest`."""
    try:  # Starlette decodes the bytes of a header as Latin-1
        return check_fairness_id(request.headers.get(FAIRNESS_HEADER, "").encode("latin-1").decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, "must be UTF-8")]) from error
    except ValueError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, str(error))]) from error


def note_failed_stream(request: Request, status: int) -> None:
    """Keep the status that a failed stream would have had, for the request's span (`gateway.traced`)."""
    request.state.failed_stream_status = status


def trace_headers_of_request(request: Request) -> Mapping[str, str]:
    """The headers of the trace that the request belongs to: those of this gateway's own span, if there is one
    (`gateway.traced`), else the client's."""
    given: Mapping[str, str] | None = getattr(request.state, "trace_headers", None)
    return trace_headers_of(request.headers.items()) if given is None else given
