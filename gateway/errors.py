"""What goes wrong, as OpenAI's clients know it: an HTTP status and a body {"error": {message, type, param, code}}.

Owns the one table from our errors to HTTP, and nothing else. A client that may try again is told when (Retry-After);
OpenAI's own does so by itself for 409, 429 and 5xx. What is no client's business, a bug, is logged.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from gateway.asked import UNKNOWN
from gateway.streams import Leaving
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
    Overloaded,
    RequestCancelled,
    RequestExists,
    TandemError,
    Unauthenticated,
    Unreachable,
)
from tandem.answer import StreamBroken

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_log = logging.getLogger(__name__)


class Kind(NamedTuple):
    status: int
    type: str
    code: str | None


_FORMS = ("json", "regex", "choice", "grammar")
_IS_HERE = {
    **{f"guided_{form}": f'structured_outputs: {{"{form}": ...}}' for form in _FORMS},
    **dict.fromkeys(("enable_thinking", "thinking"), 'chat_template_kwargs: {"enable_thinking": ...}'),
    "extra_body": "its fields, beside the others",
    "max_new_tokens": "max_tokens",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "structural_tag": 'structured_outputs: {"structural_tag": ...}',
}
"""Words of vLLM's of old and of other servers, and what says the same."""
_TELLS_NO_VALUE = (
    "bool_type", "dict_type", "float_type", "greater_than", "greater_than_equal", "int_from_float", "int_type",
    "less_than", "less_than_equal", "list_type", "model_type", "string_type",
)  # fmt: skip
"""Types of pydantic's errors that say what is wanted, and not what is there."""
MAX_NAME_CHARS = 80
"""Of a name that the client has chosen, where it is told what is wrong with it."""
RETRY_AFTER_S = 1.0
"""Where nobody is there to say when: as for a router that is being restarted."""
UNAVAILABLE = Kind(503, "server_error", "unavailable")
KINDS: dict[type[TandemError], Kind] = {
    InvalidRequest: Kind(400, "invalid_request_error", None),
    Unauthenticated: Kind(500, "server_error", "internal_error"),  # the gateway, by the router
    NotFound: Kind(404, "invalid_request_error", "not_found"),
    RequestExists: Kind(409, "invalid_request_error", "request_exists"),
    Overloaded: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    RequestCancelled: Kind(499, "server_error", "cancelled"),
    DeadlinePassed: Kind(504, "server_error", "deadline_exceeded"),
    NoWorker: UNAVAILABLE,
    Draining: UNAVAILABLE,
    Unreachable: UNAVAILABLE,
    LeaseGone: UNAVAILABLE,
    Incompatible: Kind(500, "server_error", "internal_error"),
    CorruptKV: Kind(500, "server_error", "internal_error"),
    InternalError: Kind(500, "server_error", "internal_error"),
}
CONTEXT_EXCEEDED = Kind(400, "invalid_request_error", "context_length_exceeded")
_OUT_OF_CONTEXT = re.compile(r"\((?:a|the) context of (\d+)")
"""In what a router says of a prompt, or of a prompt and its answer, that are too long."""
BUG = Kind(500, "server_error", "internal_error")
MODEL_NOT_FOUND = Kind(404, "invalid_request_error", "model_not_found")
NO_KEY = Kind(401, "invalid_request_error", "invalid_api_key")
TOO_LARGE = Kind(413, "invalid_request_error", "request_too_large")
ENCODED = Kind(415, "invalid_request_error", "unsupported_media_type")
NO_ROUTE = Kind(404, "invalid_request_error", "unknown_url")


class Refusal(Exception):  # noqa: N818 - it is an answer
    """What the client gets instead of an answer."""

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
    """What the client is told. A bug is logged, and named by the request alone."""
    match error:
        case Refusal():
            return error
        case Unauthenticated():
            _log.error("the router asks for another key than --router-api-key", extra={"request_id": request_id})
            return Refusal(KINDS[Unauthenticated], "the router does not take this gateway's key")
        case Unreachable():  # in gRPC's words, with the addresses that it tried
            _log.warning("no router answers", extra={"request_id": request_id, "why": error.message})
            return refusal_of(Unreachable("the service cannot be reached now", retry_after_s=error.retry_after_s))
        case TandemError():
            return refusal_of(error)
        case Leaving():
            return refusal_of(Draining("this gateway is leaving and can wait no longer for the answer"))
        case ValidationError():
            return refusal_of_body(error)
        case ValueError():  # by the client, of what the wire cannot carry: "name: what is wrong with it"
            return Refusal(KINDS[InvalidRequest], str(error), param=str(error).partition(":")[0])
        case StreamBroken():
            _log.error("the router's stream is not exact", extra={"request_id": request_id, "why": str(error)})
        case _:
            _log.error("unexpected error", extra={"request_id": request_id}, exc_info=error)
    return Refusal(BUG, f"a bug of the server; it has logged it with request_id={request_id}")


def refusal_in_stream(error: Exception, request_id: str) -> Refusal:
    """What a stream that has begun ends with. Its status says nothing of it: hence the log does, and a counter
    (`Run.failed`)."""
    refusal = refusal_of_any(error, request_id)
    _log.info("stream failed", extra={"status": refusal.kind.status, "request_id": request_id, "why": refusal.message})
    return refusal


def refusal_of(error: TandemError) -> Refusal:
    """As the table says. A wrong field has the name that it has in the body (`Asked.in_its_words`)."""
    kind, param = KINDS[type(error)], None
    message = error.message
    if isinstance(error, InvalidRequest) and error.violations:
        param = error.violations[0].field or None
        if param == "model":
            kind = MODEL_NOT_FOUND
        named = [(wrong.field, wrong.description) for wrong in error.violations]
        message = "; ".join(f"{name}: {description}" if name else description for name, description in named)
        if param != "model" and (found := _OUT_OF_CONTEXT.search(message)):  # whose name is the client's own words
            # Clients that shorten a chat by themselves look for this code, or for these words of OpenAI's.
            kind = CONTEXT_EXCEEDED
            message = f"This model's maximum context length is {found[1]} tokens. {message}"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and kind.status == UNAVAILABLE.status:
        retry_after_s = RETRY_AFTER_S
    return Refusal(kind, message, param=param, retry_after_s=retry_after_s)


def refusal_of_body(error: ValidationError) -> Refusal:
    """The first thing that is wrong with a body, in one sentence."""
    first, *others = error.errors()
    is_unknown = first["type"] == UNKNOWN
    param = _param_of(first)
    # Of a field that may be of several types, what each of them wants.
    wanted = [first["msg"], *(each["msg"] for each in others if _param_of(each) == param and not is_unknown)]
    message = ", or ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in wanted))
    if is_unknown:
        message += _instead_of(param, first["ctx"]["close"])
    elif first["type"] in _TELLS_NO_VALUE:
        message += f", is {_kind_of(first['input'])}"
    return Refusal(KINDS[InvalidRequest], f"{param}: {message}" if param else message, param=param or None)


def _param_of(wrong: ErrorDetails) -> str:
    """Where it is in the body."""
    # A name that nobody knows may read like a type.
    unknown = wrong["loc"][-1:] if wrong["type"] == UNKNOWN else ()
    known = wrong["loc"][: len(wrong["loc"]) - len(unknown)]
    # Of a field that may be of several types: where in the body, not which of the types was tried.
    place = [part for part in known if not (isinstance(part, str) and (part == "str" or "[" in part))]
    place += unknown
    names = [part if isinstance(part, int) else part[:MAX_NAME_CHARS] for part in place]
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")


def _instead_of(param: str, close: Sequence[str]) -> str:
    """What to say instead of a name that nobody knows."""
    if param in _IS_HERE:
        return f"; here it is {_IS_HERE[param]}"
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _kind_of(value: Any) -> str:
    """What was given: never a text, which may be of a prompt."""
    for kind, name in ((str, "a text"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return json.dumps(value)[:40]
