"""All errors that cross a process boundary, and the table of their gRPC statuses.

Translates in both directions: handlers raise a `TandemError`, `to_status` makes the gRPC status, and `from_rpc_error`
makes the same class again on the other side. The interceptor that calls `to_status` is in `interceptors`.

    TandemError
    ├── InvalidRequest      INVALID_ARGUMENT     a parameter is wrong; names each field
    ├── Unauthenticated     UNAUTHENTICATED      none of the keys that the server accepts
    ├── NotFound            NOT_FOUND            no such request or service
    ├── RequestExists       ALREADY_EXISTS       the request id is in use
    ├── Overloaded          RESOURCE_EXHAUSTED   a bounded queue is full; says when to retry
    ├── Incompatible        FAILED_PRECONDITION  wrong role, other incarnation, other weights or layout
    ├── LeaseGone           ABORTED              the grant or session behind the request has ended
    ├── RequestCancelled    CANCELLED            its owner dropped it
    ├── DeadlinePassed      DEADLINE_EXCEEDED    the client's deadline has passed
    ├── NoWorker            UNAVAILABLE          no worker can serve it now; says when to retry
    ├── Draining            UNAVAILABLE          this process is leaving; says when to retry
    ├── Outdated            UNAVAILABLE          this process does not know all fields of the request
    ├── Unreachable         UNAVAILABLE          the peer's connection failed (made by clients, from gRPC's own status)
    ├── CorruptKV           DATA_LOSS            KV failed verification and every repair
    └── InternalError       INTERNAL             a bug

    handler raises E -> to_status(E): code, message, ErrorInfo(reason) [+ BadRequest] [+ RetryInfo]
                     ~~ trailing metadata grpc-status-details-bin ~~>
    from_rpc_error(AioRpcError): the class that `reason` names, or the code's class if the status is not ours
"""

# ruff: noqa: N818 - the classes are named for what happened, as the table above reads
from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rpc import tls

DOMAIN = "tandem.v1"
"""ErrorInfo.domain of our statuses."""
DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key of a serialised google.rpc.Status, by gRPC's convention."""

# Trailing metadata beyond 8 KiB is dropped by peers, and with it the whole status. Percent encoding can triple the
# message, base64 adds a third to the details, and the message travels in both.
MAX_MESSAGE_BYTES = 512
MAX_VIOLATIONS_BYTES = 3072
MAX_VIOLATION_BYTES = 512


class Violation(NamedTuple):
    """One wrong field of a request: its name (as a path, "sampling_params.top_p") and what is wrong with it."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class TandemError(Exception):
    """Base of all errors with a gRPC status. `message` is one sentence for the person at the client.

    `retry_after_s`: when the same request may succeed; None if unknown.
    """

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        assert retry_after_s is None or retry_after_s >= 0
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(TandemError):
    """A request that can never succeed as it is. `violations` names each wrong field."""

    def __init__(
        self,
        violations: Sequence[tuple[str, str]] = (),
        message: str = "",
        *,
        retry_after_s: float | None = None,
    ) -> None:
        self.violations = [Violation(field, description) for field, description in violations]
        message = message or "; ".join(map(str, self.violations)) or "the request is not valid"
        super().__init__(message, retry_after_s=retry_after_s)


class Unauthenticated(TandemError):
    """The server requires a key, and the call had none that it accepts."""


class NotFound(TandemError):
    """No such request, worker or service."""


class RequestExists(TandemError):
    """A running request already has this id."""


class Overloaded(TandemError):
    """A bounded queue is full."""


class Incompatible(TandemError):
    """The peer has another role, incarnation, protocol, model or layout than the caller expects."""


class LeaseGone(TandemError):
    """The grant or session behind the request has ended."""


class RequestCancelled(TandemError):
    """The request's owner has cancelled it."""


class DeadlinePassed(TandemError):
    """The deadline that the client set has passed."""


class NoWorker(TandemError):
    """No worker can serve the request now."""


class Draining(TandemError):
    """This process takes no new work."""


class Outdated(TandemError):
    """This process is older than the client: it does not know all fields of the request."""


class Unreachable(TandemError):
    """The connection to the peer failed or broke. It is unknown what the peer did."""


class CorruptKV(TandemError):
    """KV blocks failed their digests, and pushing and prefilling them again did not help."""


class InternalError(TandemError):
    """A bug. The message carries the id under which the process that failed has logged it."""


STATUS_CODES: dict[type[TandemError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    RequestExists: grpc.StatusCode.ALREADY_EXISTS,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Incompatible: grpc.StatusCode.FAILED_PRECONDITION,
    LeaseGone: grpc.StatusCode.ABORTED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    NoWorker: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Outdated: grpc.StatusCode.UNAVAILABLE,
    Unreachable: grpc.StatusCode.UNAVAILABLE,
    CorruptKV: grpc.StatusCode.DATA_LOSS,
    InternalError: grpc.StatusCode.INTERNAL,
}
"""Error class -> gRPC status code, for all classes."""

_STATUS_LINE = "got frame type 80)"
"""gRPC's message when it reads "HTTP/1.1" instead of a frame: the fourth letter is taken for the frame's type."""
_TOO_LARGE = "message larger than max"
"""gRPC's message with RESOURCE_EXHAUSTED for a message beyond the transport's limit."""

FOREIGN_CODES: dict[grpc.StatusCode, type[TandemError]] = {
    # A call that its caller cancels raises CancelledError, not AioRpcError: this status comes from a stopping server.
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.UNKNOWN: InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: RequestExists,
    grpc.StatusCode.PERMISSION_DENIED: Incompatible,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.FAILED_PRECONDITION: Incompatible,
    grpc.StatusCode.ABORTED: LeaseGone,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: Incompatible,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.DATA_LOSS: CorruptKV,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
"""Error classes of statuses that gRPC itself or a proxy made, which carry no ErrorInfo of ours."""
_CLASS_OF_CODE = {status.value[0]: error_class for status, error_class in FOREIGN_CODES.items()}
_CLASS_OF_CODE[grpc.StatusCode.CANCELLED.value[0]] = RequestCancelled  # sent by a service, not by a stopping server


def reason_of(error_class: type[TandemError]) -> str:
    """ErrorInfo.reason of a class, in the upper snake case that google.rpc requires: NoWorker -> NO_WORKER."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error_class.__name__).upper()


_CLASS_OF_REASON = {reason_of(error_class): error_class for error_class in STATUS_CODES}


def clip(text: str, max_bytes: int) -> str:
    """`text` cut to at most `max_bytes` of UTF-8, never inside a character; lone surrogates become "?"."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def to_status(error: TandemError) -> status_pb2.Status:
    """The google.rpc.Status of `error`, small enough for trailing metadata.

    Long texts are cut; violations beyond MAX_VIOLATIONS_BYTES are left out.
    Details: always ErrorInfo; BadRequest for `InvalidRequest`; RetryInfo if `retry_after_s` is set.
    """
    status = status_pb2.Status(
        code=STATUS_CODES[type(error)].value[0],
        message=clip(error.message, MAX_MESSAGE_BYTES),
    )
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason_of(type(error)), domain=DOMAIN))
    if isinstance(error, InvalidRequest):
        status.details.add().Pack(_bad_request(error.violations))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        bad_request.field_violations.add(
            field=clip(violation.field, MAX_VIOLATION_BYTES),
            description=clip(violation.description, MAX_VIOLATION_BYTES),
        )
        if bad_request.ByteSize() > MAX_VIOLATIONS_BYTES:
            del bad_request.field_violations[-1]
            break
    return bad_request


def from_status(status: status_pb2.Status) -> TandemError | None:
    """The error that `to_status` packed, or None if the status is not one of ours."""
    reason = ""
    violations: list[tuple[str, str]] = []
    retry_after_s: float | None = None
    for detail in status.details:
        info, bad_request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            reason = info.reason if info.domain == DOMAIN else ""
        elif detail.Unpack(bad_request):
            violations = [(violation.field, violation.description) for violation in bad_request.field_violations]
        elif detail.Unpack(retry):
            retry_after_s = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    error_class = _CLASS_OF_REASON.get(reason)
    if error_class is None:
        return None
    if error_class is InvalidRequest:
        return InvalidRequest(violations, status.message, retry_after_s=retry_after_s)
    return error_class(status.message, retry_after_s=retry_after_s)


def from_rpc_error(error: grpc.aio.AioRpcError) -> TandemError:
    """The `TandemError` of a gRPC call's error: the class that the server raised, or the code's class if the status
    came from gRPC itself (a broken connection, an expired deadline, a method that the peer does not have).
    """
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                ours = from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break  # not made by this project: the code still counts
            if ours is not None:
                return ours
    error_class = FOREIGN_CODES.get(error.code(), InternalError)
    message = error.details() or str(error.code())
    if error_class is DeadlinePassed:
        message = "the deadline passed before the answer was complete"  # gRPC's own message talks of streams
    if advice := tls.hint(message) or _hint_of_http(message) or _hint_of_role(error.code()):
        message = f"{message} ({advice})"
    if error_class is Overloaded and _TOO_LARGE in message:
        error_class = InvalidRequest  # gRPC gives both the same status, but retrying only helps with the other
    if error_class is InvalidRequest:
        return InvalidRequest((), message)
    return error_class(message)


def _hint_of_http(details: str) -> str:
    """Advice for a connection that failed with these details from gRPC; "" if HTTP is not the reason."""
    if "http1.x server" in details or _STATUS_LINE in details:
        return "an HTTP server answers there, not a router: the router's gRPC port is another one, by default 50051"
    return ""


def _hint_of_role(code: grpc.StatusCode) -> str:
    """Advice if the answering server has no such method; "" for other statuses."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "the server there is not a router, but perhaps a worker, or has another version: check the address"
    return ""


@contextmanager
def rpc_errors_as_tandem_errors() -> Iterator[None]:
    """Context for calls of a stub: turns what they raise into `TandemError`.

    A call on a channel that is closed meanwhile raises CancelledError in its awaiter, which becomes `Unreachable`.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except grpc.aio.UsageError as error:
        raise Unreachable("its connection is closed") from error
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise Unreachable("its connection was closed") from error


def is_being_cancelled() -> bool:
    """Whether a CancelledError is meant for the running task, and does not come from something that the task awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def code_of(error: TandemError) -> int:
    """The google.rpc.Code of `error`, for messages between services."""
    return int(STATUS_CODES[type(error)].value[0])


def error_of_code(code: int, message: str) -> TandemError:
    """The error of a google.rpc.Code that a peer sent in a message; `InternalError` for an unknown code."""
    error_class = _CLASS_OF_CODE.get(code, InternalError)
    return InvalidRequest((), message) if error_class is InvalidRequest else error_class(message)
