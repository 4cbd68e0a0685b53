"""Two pools and everything between them, for the tests of transports: a receiver behind a real server, and a sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

import kv_transfer
from benchmarks.local_transport import LocalTransport, create_endpoint
from kv_transfer import (
    Grant,
    HostPool,
    Identity,
    KVLayout,
    KVPool,
    KVReceiver,
    KVSender,
    KVTransferServicer,
    SharedMemory,
)
from protos import tandem_kv_transfer_pb2 as pb
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc
from rpc.channel import open_kv_channel

SHAPE: dict[str, Any] = {
    "num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "bfloat16",
}  # fmt: skip
LEASE_S = 5.0
DEADLINE_S = 10.0
"""Longest wait for any expected event."""


def make_pool(num_blocks: int, *, seed: int | None, **shape: Any) -> HostPool:
    """A pool of random bytes, or of zeros without a seed."""
    layout = KVLayout(num_blocks=num_blocks, **{**SHAPE, **shape})
    size = (layout.num_layers, num_blocks, layout.block_bytes)
    shared = SharedMemory(layout.pool_bytes)
    array = np.frombuffer(shared.buffer, dtype=np.uint8).reshape(size)
    if seed is not None:
        array[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return HostPool(layout, array, shared)


class Receiving:
    """The KV part of a decode worker: pool, receiver, server, and a record of the receiver's callbacks."""

    def __init__(
        self,
        transport: str,
        *,
        incarnation: str = "d-1",
        lease_s: float = LEASE_S,
        num_blocks: int = 40,
        compat_digest: str = "same",
        wrap: Callable[[HostPool], KVPool] = lambda pool: pool,
        options: Sequence[tuple[str, Any]] = (),
        **shape: Any,
    ) -> None:
        """`wrap`: makes the pool that the receiver gets. `options`: of the gRPC server."""
        self.pool = make_pool(num_blocks, seed=None, **shape)
        pool = wrap(self.pool)
        self.identity = Identity(worker_id="decode", incarnation=incarnation, compat_digest=compat_digest)
        self.committed: list[tuple[Grant, int, int]] = []
        self.freed: list[Grant] = []
        self.has_freed = asyncio.Event()
        self.is_wanted = True
        self.taking_s = 0.0
        """How long the worker takes to take over a commit."""
        self.receiver = KVReceiver(
            pool=pool,
            identity=self.identity,
            lease_s=lease_s,
            endpoint=create_endpoint(transport, pool=pool, identity=self.identity),
            on_commit=self._on_commit,
            on_freed=self._on_freed,
        )
        self.server = grpc.aio.server(options=options)
        self.address = ""

    async def _on_commit(self, grant: Grant, first_token_id: int, num_prompt_tokens: int) -> bool:
        self.committed.append((grant, first_token_id, num_prompt_tokens))
        await asyncio.sleep(self.taking_s)
        return self.is_wanted

    def _on_freed(self, grants: list[Grant]) -> None:
        self.freed += grants
        self.has_freed.set()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        pb_grpc.add_KVTransferServicer_to_server(KVTransferServicer(self.receiver), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(address)}"
        await self.server.start()
        await self.receiver.start(self.address)

    async def close(self) -> None:
        await self.server.stop(0)
        await self.receiver.close()


class Cluster:
    """One sender and any number of receivers, all with the same transport."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.source = make_pool(30, seed=7)
        self.local_receivers: dict[str, KVReceiver] = {}
        self.receivings: list[Receiving] = []
        self.senders: list[KVSender] = []
        self.sender = self.make_sender(self.source)

    def make_sender(self, pool: KVPool, compat_digest: str = "same") -> KVSender:
        identity = Identity(worker_id="prefill", incarnation=f"p-{len(self.senders)}", compat_digest=compat_digest)
        if self.transport == "local":
            transport = LocalTransport(pool, self.local_receivers)
            sender = KVSender(transport=transport, pool=pool, identity=identity)
        else:
            sender = kv_transfer.create_sender(
                self.transport, pool=pool, identity=identity, open_channel=open_kv_channel
            )
        self.senders.append(sender)
        return sender

    async def add_receiving(self, address: str = "127.0.0.1:0", **options: Any) -> Receiving:
        receiving = Receiving(self.transport, **options)
        await receiving.start(address)
        self.receivings.append(receiving)
        self.local_receivers[receiving.address] = receiving.receiver
        return receiving

    async def push(self, grant: pb.Grant, src_block_ids: list[int]) -> kv_transfer.Push:
        """A push with everything written and nothing committed."""
        push = await self.sender.open(grant)
        for layer in range(self.source.layout.num_layers):
            push.write(layer, 0, src_block_ids)
        return push

    async def push_and_commit(self, grant: pb.Grant, src_block_ids: list[int]) -> None:
        push = await self.push(grant, src_block_ids)
        await push.commit(self.source.layout.block_size * len(src_block_ids), 1, src_block_ids)

    async def close(self) -> None:
        for sender in self.senders:
            await sender.close()
        for receiving in self.receivings:
            await receiving.close()


@asynccontextmanager
async def running_cluster(transport: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(transport)
    try:
        yield cluster
    finally:
        await asyncio.wait_for(cluster.close(), DEADLINE_S)


async def until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), DEADLINE_S)


def over(*transports: object) -> pytest.MarkDecorator:
    """Mark a test that applies to these transports only."""
    return pytest.mark.parametrize("cluster", transports, indirect=True)


def assert_moved(cluster: Cluster, receiving: Receiving, src: list[int], dst: list[int]) -> None:
    """Blocks `dst` hold what `src` hold, and no other block of the receiver was touched."""
    np.testing.assert_array_equal(receiving.pool.array[:, dst], cluster.source.array[:, src])
    others = np.delete(receiving.pool.array, dst, axis=1)
    assert not others.any()
