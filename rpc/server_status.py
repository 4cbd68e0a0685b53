"""Keeps the status with which a server ended a stream to which the client was still writing.

If a write fails because the server has just ended the call, grpc.aio replaces the server's status by its own INTERNAL
"Internal error from Core", if the reader has not seen the server's yet: https://github.com/grpc/grpc/issues/36066. This
happens to a process whose event loop is busy. The server's status is what the caller must act on.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

T = TypeVar("T")

_REPLACED = (grpc.StatusCode.INTERNAL, "Internal error from Core")


@contextmanager
def server_status_kept(call: grpc.aio.Call) -> Iterator[None]:
    """Context for reading `call` to its end. If grpc.aio has replaced the server's status, raises the server's; raises
    nothing if the server ended the call properly."""
    first: list[grpc.aio.AioRpcError] = []
    call.add_done_callback(lambda call: first.append(_status_of(call)))
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if (error.code(), error.details()) != _REPLACED or not first:
            raise
        if first[0].code() is not grpc.StatusCode.OK:
            raise first[0] from None


def _status_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """The present status of a call that has one."""
    code, details = _result_of(call.code()), _result_of(call.details())
    initial, trailing = _result_of(call.initial_metadata()), _result_of(call.trailing_metadata())
    return grpc.aio.AioRpcError(code, initial, trailing, details=details)


def _result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that need not wait: in the event loop's next turn, the status may be another."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the call has no status yet")
