"""A peer dies in the middle of a push: the other side notices, nothing hangs, and the blocks are freed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kv_harness import Receiving, make_pool
from nixl_marks import NIXL
from standstill import hold_up

import kv_transfer
from kv_transfer import Identity, TransferError
from protos import tandem_kv_transfer_pb2 as pb
from rpc.channel import open_kv_channel

HERE = Path(__file__).parent
NUM_BLOCKS = 400


@pytest.fixture(params=["grpc", "ipc", NIXL])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def process(transport: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "kv_receiver_process.py"),
        transport,
        str(NUM_BLOCKS),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}"},
        limit=1 << 20,
    )
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


async def grant_of(process: asyncio.subprocess.Process) -> pb.Grant:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return pb.Grant.FromString(bytes.fromhex(line.decode()))


async def test_receiver_dies(transport: str, process: asyncio.subprocess.Process) -> None:
    grant = await grant_of(process)
    grant.lease_ms = 1000
    pool = make_pool(NUM_BLOCKS, seed=3, num_kv_heads=8, head_dim=64, block_size=16)
    identity = Identity(worker_id="prefill", incarnation="p-1", compat_digest="same")
    sender = kv_transfer.create_sender(transport, pool=pool, identity=identity, open_channel=open_kv_channel)
    push = await sender.open(grant)
    push.write(0, 0, range(NUM_BLOCKS))
    await push._writer.drain()
    push.write(1, 0, range(NUM_BLOCKS))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    push.write(2, 0, range(NUM_BLOCKS))
    with pytest.raises(TransferError):
        await asyncio.wait_for(push.commit(NUM_BLOCKS * 16, 1, range(NUM_BLOCKS)), 10)
    await asyncio.wait_for(sender.close(), 10)


@pytest.mark.parametrize("transport", ["grpc"])
async def test_receiver_that_stands_still_is_not_dead(transport: str, process: asyncio.subprocess.Process) -> None:
    """A receiver's machine may freeze for longer than a second, which is what other peers get to connect. The sender
    waits for the receiver, since a prompt was computed for it."""
    grant = await grant_of(process)
    pool = make_pool(NUM_BLOCKS, seed=3, num_kv_heads=8, head_dim=64, block_size=16)
    identity = Identity(worker_id="prefill", incarnation="p-1", compat_digest="same")
    sender = kv_transfer.create_sender(transport, pool=pool, identity=identity, open_channel=open_kv_channel)
    hold_up(process.pid)
    opening = asyncio.create_task(sender.open(grant))
    done, _ = await asyncio.wait([opening], timeout=1.5)
    assert not done
    process.send_signal(signal.SIGCONT)
    await (await opening).abandon()
    await asyncio.wait_for(sender.close(), 10)


async def test_sender_goes_without_a_word(transport: str) -> None:
    receiving = Receiving(transport, lease_s=0.5)
    await receiving.start()
    pool = make_pool(40, seed=3)
    identity = Identity(worker_id="prefill", incarnation="p-1", compat_digest="same")
    sender = kv_transfer.create_sender(transport, pool=pool, identity=identity, open_channel=open_kv_channel)
    push = await sender.open(receiving.receiver.issue("router", [1, 2], 0))
    push.write(0, 0, [3, 4])
    await asyncio.sleep(0)
    await push._link.close()
    receiving.receiver.drop_owner("router")
    await asyncio.wait_for(receiving.has_freed.wait(), 10)
    assert [freed.block_ids for freed in receiving.freed] == [(1, 2)]
    await sender.close()
    await receiving.close()
