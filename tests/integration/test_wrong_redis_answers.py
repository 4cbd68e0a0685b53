"""Something else answers in place of Redis: clients of Redis go on with what they know, and recover once Redis answers
again. Neither a heartbeat nor a router's refresh ends because of it, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from protos import tandem_worker_pb2 as pb
from registry.prefix_index import PrefixIndex, PrefixReporter
from registry.workers import WorkerDirectory, WorkerRegistration

TIMEOUT_S = 20.0
HASHES = [bytes([number]) * 16 for number in range(3)]
WORKER = ("w1", "i1")
NUM_ANSWERS = 12
"""Enough for each of the four clients of Redis to get some."""


class Impostor:
    """A relay in front of the Redis at `path`. While `answer` is set, it gives this answer to every request."""

    def __init__(self, path: str) -> None:
        self.answer = b""
        self.num_answers = 0
        self._path = path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(reader, up_writer, writer))
                group.create_task(self._answer(up_reader, writer))
        except* (OSError, EOFError):
            pass
        finally:
            up_writer.close()
            writer.close()

    async def _ask(
        self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> None:
        while asked := await reader.read(65536):
            if self.answer:
                self.num_answers += 1
                writer.write(self.answer)
            else:
                up_writer.write(asked)
        raise EOFError

    async def _answer(self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answer := await up_reader.read(65536):
            writer.write(answer)
        raise EOFError


@dataclass
class Registry:
    """All Redis clients of one worker and one router."""

    impostor: Impostor
    registration: WorkerRegistration
    directory: WorkerDirectory
    reporter: PrefixReporter
    index: PrefixIndex

    async def is_whole(self) -> bool:
        return (
            self.registration.is_reachable
            and self.directory.is_reachable
            and self.reporter.is_reachable
            and [record.worker_id for record in self.directory.records] == ["w1"]
            and await self.index.longest_match(HASHES, [WORKER]) == {"w1": len(HASHES)}
        )


@asynccontextmanager
async def registry_behind(redis_url: str) -> AsyncIterator[Registry]:
    async def snapshot() -> list[bytes]:
        return HASHES

    impostor = Impostor(redis_url.removeprefix("unix://"))
    server = await asyncio.start_server(impostor.serve, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    worker = {"namespace": "test", "worker_id": "w1", "incarnation": "i1"}
    record = pb.WorkerRecord(worker_id="w1", incarnation="i1", address="h:1", role=pb.ROLE_DECODE)
    times = {"ttl_ms": 60_000, "beat_ms": 20}
    registry = Registry(
        impostor,
        WorkerRegistration(url, record=lambda: record, **worker, **times),  # type: ignore[arg-type]
        WorkerDirectory(url, namespace="test", refresh_ms=20),
        PrefixReporter(url, snapshot=snapshot, flush_ms=5, **worker, **times),  # type: ignore[arg-type]
        PrefixIndex(url, namespace="test", timeout_s=5.0),
    )
    async with AsyncExitStack() as stack:
        stack.callback(server.close)
        for each in (registry.registration, registry.directory, registry.reporter, registry.index):
            stack.push_async_callback(each.close)
        registry.registration.start()
        registry.reporter.start()
        await registry.directory.start()
        yield registry


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_so():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


async def has_answered(registry: Registry, num_answers: int) -> bool:
    """Whether the impostor has given that many answers. Looks up a prefix each time, which must never raise."""
    await registry.index.longest_match(HASHES, [WORKER])
    return registry.impostor.num_answers >= num_answers


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "answer",
    [
        b":7\r\n", b"$3\r\nabc\r\n", b"$-1\r\n", b"*0\r\n", b"*2\r\n:1\r\n:2\r\n", b"*1\r\n*-1\r\n", b":x\r\n",
        b"$x\r\n", b"$1\r\n9\r\n", b"*3\r\n$1\r\ng\r\n:1\r\n:2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)  # fmt: skip
async def test_a_wrong_answer_is_an_outage(redis_url: str, answer: bytes) -> None:
    async with registry_behind(redis_url) as registry:
        await until(registry.is_whole)
        registry.impostor.answer = answer
        await until(lambda: has_answered(registry, NUM_ANSWERS))
        assert [record.worker_id for record in registry.directory.records] == ["w1"]
        registry.impostor.answer = b""
        await until(registry.is_whole)
