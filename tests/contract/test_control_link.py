"""The control link to a peer: a caller waits until the peer is connected, but no longer than its timeout."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import lasting_port

from kv_transfer import PeerUnreachable
from kv_transfer.control_link import ControlLink
from rpc import channel
from rpc.channel import open_kv_channel
from rpc.server import Server


async def test_a_peer_that_comes_back_is_waited_for() -> None:
    address = f"127.0.0.1:{lasting_port()}"
    link = ControlLink(open_kv_channel(address))
    waiting = asyncio.create_task(link.wait_connected(30))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    server = grpc.aio.server()
    server.add_insecure_port(address)
    await server.start()
    try:
        await waiting
    finally:
        await link.close()
        await server.stop(0)


async def test_a_peer_that_does_not_come_back_is_given_up() -> None:
    link = ControlLink(open_kv_channel(f"127.0.0.1:{lasting_port()}"))
    begun_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match=r"no connection for 0\.3 s"):
        await link.wait_connected(0.3)
    assert time.monotonic() - begun_s >= 0.3
    await link.close()


async def test_who_waits_for_the_loss_of_a_connection_hears_of_it() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = ControlLink(open_kv_channel(f"127.0.0.1:{port}"))
    await link.wait_connected(30)
    losing = asyncio.create_task(link.lost())
    done, _ = await asyncio.wait([losing], timeout=0.2)
    assert not done
    await server.stop(0)
    async with asyncio.timeout(30):
        await losing
    await link.close()


async def test_a_connection_of_which_nothing_is_asked_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC reads the maximum as forever. With a smaller number it closes the idle connection, and the peer would be
    taken for lost."""
    name, longest = channel.KEPT_WHILE_IDLE
    assert longest == 2**31 - 1
    monkeypatch.setattr(channel, "KEPT_WHILE_IDLE", (name, 1_000))
    server = Server("127.0.0.1:0")
    opened = open_kv_channel(await server.start())
    link = ControlLink(opened)
    await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(30):
        await link.lost()
    await link.close()
    await server.drain(0)
