# ruff: noqa: N802 - gRPC's method names
"""A deadline passes while the handler's status is on its way: the client learns it, and the log shows no error."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import grpc
import pytest

from protos import tandem_worker_pb2 as pb
from protos import tandem_worker_pb2_grpc as worker_grpc
from rpc.channel import open_channel
from rpc.errors import DeadlinePassed
from rpc.server import Server

DEADLINE_S, NUM_CALLS, NUM_AT_ONCE = 0.05, 1000, 50


class LateStatus(worker_grpc.WorkerServicer):  # type: ignore[misc]
    """Raises within 3 ms of the client's deadline, before or after."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    async def GetStatus(self, request: Any, context: Any) -> pb.WorkerStatus:
        await asyncio.sleep(context.time_remaining() + self.random.uniform(-0.003, 0.003))
        raise DeadlinePassed("too late")


async def test_a_status_that_comes_with_the_deadline_is_no_bug_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("127.0.0.1:0")
    server.add(worker_grpc.add_WorkerServicer_to_server, LateStatus(), "tandem.v1.Worker")
    async with open_channel(await server.start()) as channel:
        stub = worker_grpc.WorkerStub(channel)

        async def code_of_one() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetStatus(pb.GetWorkerStatusRequest(), timeout=DEADLINE_S)
            return raised.value.code()

        codes: set[grpc.StatusCode] = set()
        for _ in range(NUM_CALLS // NUM_AT_ONCE):
            codes.update(await asyncio.gather(*(code_of_one() for _ in range(NUM_AT_ONCE))))
    await server.drain(0)
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
