"""What a request's headers say: its name, its deadline, whose it is."""

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
"""The same in an answer, as Anthropic's clients read it."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""The request's deadline, which OpenAI's API has no word for."""
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
"""Whose request it is, as the Kubernetes Gateway API Inference Extension names it: before what the body says, since a
proxy that knows who asks can set it, and leaves bodies alone."""


def name_request(request: Request, name: str) -> None:
    """By its body, whatever a header says: from here on."""
    request.state.request_id = name


def request_id_of(request: Request) -> str:
    """As the client named it, or a new name, the same for one request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request.state.request_id = given if re.fullmatch(r"[\x21-\x7e]{1,100}", given) else secrets.token_hex(12)
    return str(request.state.request_id)


def headers_of(request_id: str) -> dict[str, str]:
    """Of an answer."""
    return {REQUEST_ID_HEADER: request_id, ANSWERED_ID_HEADER: request_id}


def _timeout_of(request: Request) -> float | None:
    """In seconds; None: the request has no deadline. Raises `InvalidRequest`."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,11}", given):
        raise InvalidRequest(
            [(TIMEOUT_HEADER, f"must be a whole number of milliseconds from 1 to 999999999999, is {given[:40]!r}")]
        )
    return int(given) / 1000


def left_s_of(request: Request) -> float | None:
    """Until its deadline, which counts from when this is asked first; None: it has none. Raises `InvalidRequest`."""
    if not hasattr(request.state, "deadline_s"):
        timeout_s = _timeout_of(request)
        request.state.deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    deadline_s: float | None = request.state.deadline_s
    return None if deadline_s is None else max(0.001, deadline_s - time.monotonic())


def fairness_id_of(request: Request) -> str:
    """Whose request it is; empty: no header says. Raises `InvalidRequest`."""
    try:  # the bytes of a header are read as Latin-1
        return check_fairness_id(request.headers.get(FAIRNESS_HEADER, "").encode("latin-1").decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, "must be UTF-8")]) from error
    except ValueError as error:
        raise InvalidRequest([(FAIRNESS_HEADER, str(error))]) from error


def note_failed_stream(request: Request, status: int) -> None:
    """For the request's span (`gateway.traced`): what its status would have been."""
    request.state.failed_stream_status = status


def trace_headers_of_request(request: Request) -> Mapping[str, str]:
    """The trace that it is a part of: that of this gateway's span of it, where there is one (`gateway.traced`)."""
    given: Mapping[str, str] | None = getattr(request.state, "trace_headers", None)
    return trace_headers_of(request.headers.items()) if given is None else given
