"""A router's end of a session, over a real connection: workers that fall silent or send only heartbeats, and pauses of
the router itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from router.request_events import Event, WorkerKey, WorkerLost
from router.worker_session import WorkerSession
from rpc.channel import KEEPALIVE_TIME_MS, open_channel
from rpc.session import BEATS_PER_LEASE

LEASE_S = 0.6
DEADLINE_S = 20


class Worker(DecodeServicer):  # type: ignore[misc]
    """Sends heartbeats from its own thread until it is told to hang, or to end the session."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.ends = threading.Event()
        self.says = ""
        """The reason for which it aborts the session when that ends."""
        self.was_left = threading.Event()

    def Session(self, commands: Any, context: grpc.ServicerContext) -> Iterator[pb.WorkerEvents]:  # noqa: N802
        context.add_callback(self.was_left.set)
        yield pb.WorkerEvents()
        while not self.hangs.wait(LEASE_S / BEATS_PER_LEASE):
            if self.ends.is_set() and self.says:
                context.abort(grpc.StatusCode.ABORTED, self.says)
            if self.ends.is_set():
                return
            yield pb.WorkerEvents(load=pb.WorkerLoad(num_running=1))
        self.was_left.wait(DEADLINE_S)


class Observed:
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.is_open, self.is_lost = asyncio.Event(), asyncio.Event()
        self.heard: list[Event] = []
        self.num_loads = 0
        record = pb.WorkerRecord(
            worker_id="w", incarnation="i", role=pb.ROLE_DECODE, address=address, lease_ms=int(LEASE_S * 1000)
        )
        self.session = WorkerSession(
            record=record,
            router_id="r",
            channel=channel,
            on_load=self._on_load,
            on_open=self.is_open.set,
            on_lost=self.is_lost.set,
        )
        self.session.attach("a", self.heard.append)

    def _on_load(self, load: pb.WorkerLoad) -> None:
        self.num_loads += load.num_running


@asynccontextmanager
async def observed() -> AsyncIterator[tuple[Worker, Observed]]:
    server, worker = grpc.server(ThreadPoolExecutor(2)), Worker()
    add_DecodeServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        async with asyncio.timeout(DEADLINE_S), open_channel(address) as channel:
            seen = Observed(address, channel)
            await seen.is_open.wait()
            yield worker, seen
            await seen.session.close()
    finally:
        worker.hangs.set()
        server.stop(0).wait()


async def test_a_worker_that_falls_silent_is_lost_after_a_lease() -> None:
    async with observed() as (worker, seen):
        worker.hangs.set()
        before_s = time.monotonic()
        await seen.is_lost.wait()
        # However slow a busy machine is, this is long before gRPC would notice by an unanswered ping.
        assert LEASE_S * 0.9 < time.monotonic() - before_s < KEEPALIVE_TIME_MS / 1e3
        assert seen.heard == [WorkerLost(WorkerKey("w", "i"))]
        assert "sent nothing for 600 ms" in seen.session.lost_why
        assert await asyncio.to_thread(worker.was_left.wait, DEADLINE_S), "the worker was not told"


async def test_a_worker_that_only_beats_lives() -> None:
    async with observed() as (_, seen):
        while seen.num_loads < 4 * BEATS_PER_LEASE:
            await asyncio.sleep(0.01)
            assert not seen.is_lost.is_set(), seen.session.lost_why


async def test_a_router_that_was_held_up_itself_does_not_blame_the_worker() -> None:
    async with observed() as (_, seen):
        for _ in range(3):
            time.sleep(3 * LEASE_S)  # noqa: ASYNC251 - the event loop stands still
            num_loads = seen.num_loads
            while seen.num_loads < num_loads + BEATS_PER_LEASE:
                await asyncio.sleep(0.01)
                assert not seen.is_lost.is_set(), seen.session.lost_why


@pytest.mark.parametrize("why", ["ABORTED: no command and no beat for 600 ms", "the worker ended the session"])
async def test_why_a_session_ended_is_known_although_a_command_was_still_to_be_sent(why: str) -> None:
    for _ in range(3):  # now and then the end comes too late to meet the command
        async with observed() as (worker, seen):
            worker.says = why.removeprefix("ABORTED: ") if "ABORTED" in why else ""
            worker.ends.set()
            seen.session.send(pb.DecodeCommand(beat=pb.Beat()))
            # The event loop stands still: the session's end arrives before gRPC is given the command.
            assert worker.was_left.wait(DEADLINE_S)
            await seen.is_lost.wait()
            assert (seen.session.lost_why, seen.session.is_our_fault) == (why, "ABORTED" in why)


async def test_nothing_of_a_session_that_has_ended_goes_on_or_changes_why_it_was_lost() -> None:
    async with observed() as (worker, seen):
        tasks = [task for task in asyncio.all_tasks() if "WorkerSession." in str(task.get_coro())]
        assert len(tasks) > 1, "one reads, and one watches for silence"
        worker.ends.set()
        await asyncio.wait(tasks)
        assert seen.session.lost_why == "the worker ended the session"
