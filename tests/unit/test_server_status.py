"""The status with which a server ended a call is the one that the caller sees, whatever grpc.aio makes of a write that
failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from rpc.server_status import server_status_kept

OK, ABORTED, INTERNAL = grpc.StatusCode.OK, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL
REPLACED = "Internal error from Core"


class Call:
    """A call that the server ended with `code`, if that is not None."""

    def __init__(self, code: grpc.StatusCode | None) -> None:
        self._code = code

    def add_done_callback(self, callback: Callable[[Call], None]) -> None:
        if self._code is not None:
            callback(self)

    async def code(self) -> grpc.StatusCode | None:
        return self._code

    async def details(self) -> str:
        return "by the server"

    async def initial_metadata(self) -> Metadata:
        return Metadata()

    trailing_metadata = initial_metadata


@pytest.mark.parametrize(
    ("ended", "read", "details", "seen"),
    [
        (ABORTED, INTERNAL, REPLACED, (ABORTED, "by the server")),
        (OK, INTERNAL, REPLACED, None),
        (None, INTERNAL, REPLACED, (INTERNAL, REPLACED)),
        (ABORTED, INTERNAL, "a bug", (INTERNAL, "a bug")),
    ],
)
def test_which_status_is_seen(
    ended: grpc.StatusCode | None, read: grpc.StatusCode, details: str, seen: tuple[grpc.StatusCode, str] | None
) -> None:
    call = cast(Any, Call(ended))
    with nullcontext() if seen is None else pytest.raises(AioRpcError) as raised:
        with server_status_kept(call):
            raise AioRpcError(read, Metadata(), Metadata(), details=details)
    if seen is not None:
        assert raised is not None
        assert (raised.value.code(), raised.value.details()) == seen
