# ruff: noqa: N802 - gRPC's method names
"""gRPC pings: a hanging peer is noticed, and an idle connection stays open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import rpc.channel
import rpc.server
from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_inference_pb2_grpc as inference_grpc
from rpc.errors import Unreachable, rpc_errors_as_tandem_errors

ROOT = Path(__file__).parents[2]
PING_MS = 300
TIMEOUT_S = 15.0

SERVER = f"""
import asyncio, sys
import rpc.channel
rpc.channel.KEEPALIVE_TIME_MS = rpc.channel.KEEPALIVE_TIMEOUT_MS = {PING_MS}
from rpc.entrypoint import announce, run_until_signal
from rpc.server import Server

async def main(stop):
    server = Server("127.0.0.1:0")
    announce(await server.start())
    await stop.wait()
    await server.drain(0)

sys.exit(run_until_signal(main))
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip().removeprefix("listening grpc=")
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rpc.channel, rpc.server):
        monkeypatch.setattr(module, "KEEPALIVE_TIME_MS", PING_MS)
    monkeypatch.setattr(rpc.channel, "KEEPALIVE_TIMEOUT_MS", PING_MS)


@pytest.mark.usefixtures("quick_pings")
async def test_peer_that_hangs_is_noticed(server: tuple[subprocess.Popen[str], str]) -> None:
    """A stopped process keeps its connections open: only unanswered pings reveal it."""
    process, address = server
    channel = rpc.channel.open_channel(address)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(Unreachable), rpc_errors_as_tandem_errors():
            await watch.read()
    assert time.monotonic() - started < 10
    os.kill(process.pid, signal.SIGCONT)
    await channel.close()


@pytest.mark.usefixtures("quick_pings")
async def test_idle_connection_may_ping(server: tuple[subprocess.Popen[str], str]) -> None:
    """By default a gRPC server answers the third ping on a connection without calls with GOAWAY too_many_pings."""
    _, address = server
    channel = rpc.channel.open_channel(address)
    await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4.5):  # gRPC pings no more than once a second: the third would be answered after 3
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    watch.cancel()
    await channel.close()


CLIENT = """
import asyncio, sys
from protos import tandem_inference_pb2, tandem_inference_pb2_grpc
from rpc.channel import open_channel

async def main():
    stub = tandem_inference_pb2_grpc.InferenceStub(open_channel(sys.argv[1]))
    async for _ in stub.Generate(tandem_inference_pb2.GenerateRequest()):
        print("reading", flush=True)

asyncio.run(main())
"""


@pytest.mark.usefixtures("quick_pings")
async def test_client_that_hangs_is_dropped_and_its_stream_freed() -> None:
    is_freed = asyncio.Event()

    class Handlers(inference_grpc.InferenceServicer):
        async def Generate(self, request: object, context: object) -> AsyncIterator[inference_pb.GenerateResponse]:
            try:
                yield inference_pb.GenerateResponse()
                await asyncio.Event().wait()
            finally:
                is_freed.set()

    server = rpc.server.Server("127.0.0.1:0")
    server.add(inference_grpc.add_InferenceServicer_to_server, Handlers(), "tandem.v1.Inference")
    address = await server.start()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, stdout=subprocess.PIPE, env=env, cwd=ROOT
    )
    assert client.stdout is not None
    await client.stdout.readline()
    client.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(is_freed.wait(), TIMEOUT_S)
    client.kill()
    await client.wait()
    await server.drain(0)
