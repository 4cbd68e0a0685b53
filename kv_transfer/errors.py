"""The errors of a transfer. Each class has one gRPC status, in `STATUS_OF`.

TransferError
├── IncompatiblePeer     FAILED_PRECONDITION  layouts, weights, versions or transports differ; says which
├── TransportMissing     FAILED_PRECONDITION  an optional transport is not installed here
├── PeerUnreachable      UNAVAILABLE          the other side is dead, has restarted, or cannot be reached
├── GrantGone            ABORTED              revoked, expired, or made by a process that has ended
├── InvalidTransfer      INVALID_ARGUMENT     a message that a correct peer never sends; it had no effect
└── CorruptTransfer      DATA_LOSS            digests still differ after all repairs
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

_T = TypeVar("_T")


class TransferError(Exception):
    """A transfer failed; `str()` says why, for logs and statuses."""


class IncompatiblePeer(TransferError):  # noqa: N818
    pass


class TransportMissing(TransferError):  # noqa: N818
    pass


class PeerUnreachable(TransferError):  # noqa: N818
    pass


class GrantGone(TransferError):  # noqa: N818
    pass


class InvalidTransfer(TransferError):  # noqa: N818
    pass


class CorruptTransfer(TransferError):  # noqa: N818
    pass


STATUS_OF: dict[type[TransferError], grpc.StatusCode] = {
    IncompatiblePeer: grpc.StatusCode.FAILED_PRECONDITION,
    TransportMissing: grpc.StatusCode.FAILED_PRECONDITION,
    PeerUnreachable: grpc.StatusCode.UNAVAILABLE,
    GrantGone: grpc.StatusCode.ABORTED,
    InvalidTransfer: grpc.StatusCode.INVALID_ARGUMENT,
    CorruptTransfer: grpc.StatusCode.DATA_LOSS,
}
"""The status that stands for each class on the wire; `from_status` is its inverse."""


def from_status(code: grpc.StatusCode, details: str) -> TransferError:
    """The error that a peer's status stands for. A status not listed here means an unreachable or broken peer."""
    match code:
        case grpc.StatusCode.FAILED_PRECONDITION:
            return IncompatiblePeer(details)
        case grpc.StatusCode.ABORTED:
            return GrantGone(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidTransfer(details)
        case grpc.StatusCode.DATA_LOSS:
            return CorruptTransfer(details)
        case grpc.StatusCode.UNAVAILABLE:
            return PeerUnreachable(details)
    return PeerUnreachable(f"{code.name}: {details}")


@contextmanager
def errors_of_peer() -> Iterator[None]:
    """Context for calls to a peer: turns gRPC's exceptions into `TransferError`s.

    If a channel is closed (because another peer has replaced this one at its address), calls on it raise
    CancelledError. That means the peer's end, not the cancellation of the running task.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code(), error.details() or "") from error
    except grpc.aio.UsageError as error:
        raise PeerUnreachable("the connection to the peer is closed") from error
    except asyncio.InvalidStateError as error:
        raise PeerUnreachable("the stream to the peer ended while it was written to") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PeerUnreachable("the connection to the peer was closed") from error


def readable(answer: _T | None) -> _T:
    """Return a peer's answer. gRPC's clients return None for bytes that are no message: raises `InvalidTransfer`."""
    if answer is None:
        raise InvalidTransfer("the peer's answer cannot be parsed")
    return answer
