"""A Session over a real loopback server: handshake, merging of events, lease, and the three ways it ends."""
# ruff: noqa: N802 - gRPC's method names

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import grpc
import pytest

from protos import tandem_worker_pb2 as pb
from protos import tandem_worker_pb2_grpc as worker_grpc
from rpc.channel import SESSION_READ_AHEAD_BYTES, open_channel
from rpc.errors import Incompatible, InvalidRequest, LeaseGone, rpc_errors_as_tandem_errors
from rpc.server import Server
from rpc.session import PROTOCOL_VERSION, EventOutbox, check_hello, run_session

TIMEOUT_S = 10.0


class Worker:
    """Answers every reserve with a Busy for the same request id."""

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self.outbox = EventOutbox(lambda: pb.WorkerLoad(num_running=5))
        self.has_begun = False
        self.is_freed = asyncio.Event()

    def handle(self, command: pb.DecodeCommand) -> None:
        if command.WhichOneof("command") is None:
            raise InvalidRequest([("command", "must be given")])
        if command.HasField("reserve"):
            self.outbox.post([pb.WorkerEvent(request_id=command.reserve.request_id, busy=pb.Busy())])

    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Any) -> None:
        try:
            check_hello(await anext(request_iterator), incarnation="i1")
            self.has_begun = True
            await run_session(request_iterator, context, self.outbox, self.handle, lease_ms=self.lease_ms)
        finally:
            self.is_freed.set()


@asynccontextmanager
async def session(lease_ms: int = 60_000) -> AsyncIterator[tuple[Worker, Any]]:
    worker, server = Worker(lease_ms), Server("127.0.0.1:0")
    server.add(worker_grpc.add_DecodeServicer_to_server, worker, "tandem.v1.Decode")
    channel = open_channel(await server.start(), read_ahead_bytes=SESSION_READ_AHEAD_BYTES)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield worker, worker_grpc.DecodeStub(channel).Session()
            await worker.is_freed.wait()
            assert worker.outbox.is_closed == worker.has_begun
    finally:
        await channel.close()
        await server.drain(0)


def hello(incarnation: str = "i1", version: int = PROTOCOL_VERSION) -> pb.DecodeCommand:
    return pb.DecodeCommand(hello=pb.Hello(protocol_version=version, router_id="r", incarnation=incarnation))


def reserve(request_id: str) -> pb.DecodeCommand:
    return pb.DecodeCommand(reserve=pb.EngineRequest(request_id=request_id))


async def test_a_router_that_reads_slowly_is_not_far_behind() -> None:
    """Unread events wait in the worker's outbox, which merges them into fewer messages. gRPC's buffers, which would
    otherwise grow to megabytes, keep one message per step, and a slow router would fall behind for seconds."""
    num_steps, num_seqs = 500, 64
    async with session() as (worker, stream):
        await stream.write(hello())
        num_read = 0
        for step in range(num_steps):
            worker.outbox.post(
                pb.WorkerEvent(request_id=f"{seq:040}", tokens=pb.Tokens(index=step, token_ids=[7]))
                for seq in range(num_seqs)
            )
            await asyncio.sleep(0.002)  # a step's time
            if step % 4 == 3:
                num_read += len((await stream.read()).events)
        # The router asked for 125 messages and left 375; on an idle machine it is some ten steps behind.
        assert num_steps - num_read / num_seqs < 100
        while num_read < num_steps * num_seqs:
            num_read += len((await stream.read()).events)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_events_come_while_commands_go() -> None:
    async with session() as (_, stream):
        await stream.write(hello())
        for request_id in ("a", "b"):
            await stream.write(reserve(request_id))
            message = await stream.read()
            assert [event.request_id for event in message.events] == [request_id]
            assert message.load.num_running == 5
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_what_is_pending_is_sent_before_the_end() -> None:
    async with session() as (_, stream):
        await stream.write(hello())
        for i in range(100):
            await stream.write(reserve(str(i)))
        await stream.done_writing()
        events = [event.request_id async for message in stream for event in message.events]
        assert events == [str(i) for i in range(100)]


async def test_worker_may_end_it() -> None:
    async with session() as (worker, stream):
        await stream.write(hello())
        await stream.write(reserve("a"))
        await stream.read()
        worker.outbox.close()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_dropping_the_stream_frees() -> None:
    async with session() as (worker, stream):
        await stream.write(hello())
        await stream.write(reserve("a"))
        await stream.read()
        assert not worker.is_freed.is_set()
        stream.cancel()
        await worker.is_freed.wait()


async def test_silent_router_loses_its_lease_and_beats_keep_it() -> None:
    async with session(lease_ms=900) as (worker, stream):
        await stream.write(hello())
        for _ in range(4):  # longer than the lease, in all
            await asyncio.sleep(0.3)
            await stream.write(pb.DecodeCommand(beat=pb.Beat()))
        assert not worker.is_freed.is_set()
        with pytest.raises(LeaseGone), rpc_errors_as_tandem_errors():
            [message async for message in stream]


async def test_the_worker_beats_when_it_has_nothing_to_say() -> None:
    async with session(lease_ms=400) as (_, stream):
        await stream.write(hello())
        for _ in range(3):
            message = await stream.read()
            assert (list(message.events), message.load.num_running) == ([], 5)
            await stream.write(pb.DecodeCommand(beat=pb.Beat()))  # the worker's three beats take almost a lease
        await stream.done_writing()


@pytest.mark.parametrize("how", ["silent", "has ended"])
async def test_a_router_that_does_not_read_is_freed_too(how: str) -> None:
    """Flow control blocks the worker's write; the lease ends the session all the same."""
    async with session(lease_ms=300) as (worker, stream):
        await stream.write(hello())
        await stream.write(reserve("a"))
        await stream.read()
        big = pb.WorkerEvent(failed=pb.Failed(message="x" * 1_000_000))
        for _ in range(64):
            worker.outbox.post([big])
        if how == "has ended":
            await stream.done_writing()
        await worker.is_freed.wait()
        stream.cancel()


@pytest.mark.parametrize("first", [reserve("a"), hello(incarnation="i0"), hello(version=PROTOCOL_VERSION + 1)])
async def test_wrong_handshake_is_refused(first: pb.DecodeCommand) -> None:
    async with session() as (_, stream):
        await stream.write(first)
        with pytest.raises(Incompatible), rpc_errors_as_tandem_errors():
            await stream.read()


async def test_the_status_of_a_refusal_is_not_lost_behind_a_first_write() -> None:
    """The worker refuses a command while it writes the first event. Many sessions run at once, so that they
    interleave."""
    server = Server("127.0.0.1:0")
    servicer = _OnePerSession()
    server.add(worker_grpc.add_DecodeServicer_to_server, servicer, "tandem.v1.Decode")
    address = await server.start()

    async def refused(stub: worker_grpc.DecodeStub) -> None:
        stream = stub.Session(iter([hello(), reserve("a"), pb.DecodeCommand()]), timeout=TIMEOUT_S)
        with pytest.raises(InvalidRequest), rpc_errors_as_tandem_errors():
            async for _ in stream:
                pass

    async with open_channel(address) as channel:
        stub = worker_grpc.DecodeStub(channel)
        for _ in range(40):
            await asyncio.gather(*(refused(stub) for _ in range(8)))
    await server.drain(0)


class _OnePerSession:
    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Any) -> None:
        await Worker(60_000).Session(request_iterator, context)


def test_a_router_s_id_may_be_of_256_characters() -> None:
    for length in (1, 256, 257):
        command = hello()
        command.hello.router_id = "x" * length
        with pytest.raises(InvalidRequest, match="may have 256 characters, has 257") if length > 256 else nullcontext():
            check_hello(command, incarnation="i1")


async def test_a_message_that_cannot_be_written_ends_the_session_with_its_error() -> None:
    class Broken:
        async def write(self, message: pb.WorkerEvents) -> None:
            raise BrokenPipeError("nobody reads")

    async def commands() -> AsyncIterator[pb.DecodeCommand]:
        await asyncio.Event().wait()
        yield hello()

    outbox = EventOutbox(pb.WorkerLoad)
    outbox.post()
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        async with asyncio.timeout(TIMEOUT_S):
            await run_session(commands(), Broken(), outbox, lambda _: None, lease_ms=60_000)
    assert outbox.is_closed
