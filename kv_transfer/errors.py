"""What can go wrong with a transfer. Each class has one gRPC status, in `STATUS_OF`.

TransferError
├── IncompatiblePeer     FAILED_PRECONDITION  layouts, weights, versions or transports differ; says which
├── TransportMissing     FAILED_PRECONDITION  an optional transport is not installed here
├── PeerUnreachable      UNAVAILABLE          the other side is dead, restarted meanwhile, or cannot be reached
├── GrantGone            ABORTED              revoked, expired, or of a process that is no more
├── InvalidTransfer      INVALID_ARGUMENT     a message that a correct peer never sends; nothing of it was used
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
    """The error that a peer's status stands for. A status that is none of ours means an unreachable or broken peer."""
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
    """Around calls to a peer: what gRPC raises leaves the block as a `TransferError`.

    A call on a channel that somebody closes (the peer was replaced by another at its address) raises
    CancelledError in whoever awaits it: that is the peer's end, and not the cancellation of the running task.
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
    """What a peer answered: gRPC's clients make None of bytes that are no message. Raises `InvalidTransfer`."""
    if answer is None:
        raise InvalidTransfer("the peer answered with bytes that are no message")
    return answer
