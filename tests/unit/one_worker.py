"""A router's pool with real sessions to one worker. The test decides how and when their streams end. No network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from lifecycle_bench import load

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.policy import PolicyConfig
from router.worker_handle import WorkerHandle
from router.worker_pool import WorkerPool


class Call:
    """A stream that ends when the test says so; cancelling it does nothing."""

    def __init__(self, events: AsyncIterator[pb.WorkerEvents]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[pb.WorkerEvents]:
        return self._events

    def add_done_callback(self, callback: object) -> None: ...

    def cancel(self) -> None: ...


class Channel:
    """A channel whose streams open at once, and end how and when the test says."""

    def __init__(self) -> None:
        self.ends: list[asyncio.Future[grpc.StatusCode | None]] = []
        """One future for each stream: the status the stream ends with, or None for a stream that ends well."""
        self.is_closed = False
        self.details = "broken"
        """Details of the error that a stream ends with."""

    def stream_stream(self, *_: object, **__: object) -> Callable[[object], Call]:
        return lambda _: Call(self._stream())

    async def _stream(self) -> AsyncIterator[pb.WorkerEvents]:
        end: asyncio.Future[grpc.StatusCode | None] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        yield pb.WorkerEvents(load=load(100))
        if (code := await end) is not None:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), self.details)

    def unary_unary(self, *_: object, **__: object) -> None:
        """The constructor of a stub creates all its calls, unary ones included."""

    async def close(self) -> None:
        self.is_closed = True


class OneWorker:
    """A pool with real sessions to one decode worker, which runs in one process after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channels: list[Channel] = []
        """One channel for each process."""
        monkeypatch.setattr("router.known_workers.open_channel", self._open_channel)
        monkeypatch.setattr("router.known_workers._RECONNECT_MIN_S", 0.0)
        self.pool = WorkerPool(
            router_id="r",
            policy=PolicyConfig(),
            on_change=self._on_change,
            now_s=lambda: 1000.0,
        )
        self.is_open = asyncio.Event()
        model = inference_pb.GetModelInfoResponse(block_size=16, max_model_len=2048)
        self.record = pb.WorkerRecord(
            worker_id="d", incarnation="1", role=pb.Role.ROLE_DECODE, model=model, load=load(100), lease_ms=10_000
        )
        self.restart("1")

    def _open_channel(self, _: str, **options: object) -> Channel:
        del options
        self.channels.append(Channel())
        return self.channels[-1]

    def _on_change(self) -> None:
        if any(handle.channel is self.channels[-1] for handle in self.pool.usable(pb.Role.ROLE_DECODE)):
            self.is_open.set()
        else:
            self.is_open.clear()

    def record_of(self, incarnation: str) -> pb.WorkerRecord:
        record = pb.WorkerRecord()
        record.CopyFrom(self.record)
        record.incarnation = incarnation
        return record

    def restart(self, incarnation: str) -> None:
        self.pool.set_records([self.record_of(incarnation)])

    async def lose_session(
        self,
        *,
        num_requests: int,
        code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE,
        is_leaving: bool = False,
    ) -> None:
        """Wait until the session is open, attach requests to it, and end it."""
        handle = await self.open_handle()
        handle.set_load(load(100, is_draining=is_leaving))
        session = handle.session
        assert session is not None
        for index in range(num_requests):
            session.attach(f"r{index}", lambda _: None)
        self.channels[-1].ends[-1].set_result(code)
        await asyncio.wait([session._task])

    async def open_handle(self) -> WorkerHandle:
        async with asyncio.timeout(5):
            await self.is_open.wait()
        return next(h for h in self.pool.usable(pb.Role.ROLE_DECODE) if h.channel is self.channels[-1])
