"""The sending side of the "nixl" transport in a worker with several GPUs: each rank's process has an agent for its own
pool. (The receiving side differs only in its pool: nixl_transport.py.)

    CopyAgent's thread ──copy──> the pool's agent ┬─ rank 0's, in this process ──NIXL──> the peer's rank 0
                                                  └─ rank 1's, in its process ───NIXL──> the peer's rank 1

This module sees them as one agent (`KVPool.start_agent`), and pushes as over "ipc": by copies into an opened pool. It
checks a peer's description of each rank as for a worker with one GPU.
"""

from __future__ import annotations

import asyncio
from functools import partial

import grpc

from kv_transfer.base import Identity, Link
from kv_transfer.control_link import OpenChannel
from kv_transfer.copy_agent import CopyAgent
from kv_transfer.copy_link import CopyLink
from kv_transfer.errors import InvalidTransfer
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_transport import check_memory, receiver_name, sender_name
from kv_transfer.pool import KVPool, PoolAgent
from protos import tandem_kv_transfer_pb2 as pb

MAX_VRAM_BYTES_AT_ONCE = 128 << 20
"""Maximum bytes of one copy: if the network is late, the whole copy is given up."""


class NixlTransportOfRanks:
    """The sending side."""

    name = "nixl"

    def __init__(self, pool: KVPool, identity: Identity, open_channel: OpenChannel) -> None:
        self._pool = pool
        self._open_channel = open_channel
        self._pool_agent = pool.start_agent(sender_name(identity))
        self._agent = CopyAgent(pool, MAX_VRAM_BYTES_AT_ONCE)

    async def dial(self, address: str) -> Link:
        return NixlLinkOfRanks(self._pool, self._pool_agent, self._agent, self._open_channel(address))

    async def close(self) -> None:
        await asyncio.to_thread(self._agent.close)
        await asyncio.to_thread(self._pool_agent.close)


class NixlLinkOfRanks(CopyLink):
    def __init__(self, pool: KVPool, pool_agent: PoolAgent, agent: CopyAgent, channel: grpc.aio.Channel) -> None:
        super().__init__(pool, agent, channel)
        self._pool_agent = pool_agent

    async def adopt(self, response: pb.ConnectResponse) -> None:
        check_endpoint(response)
        num_blocks = response.layout.num_blocks
        name = receiver_name(response.worker_id, response.incarnation)
        await self.open(partial(self._pool_agent.open_peer, name, response.nixl, num_blocks), num_blocks)


def check_endpoint(response: pb.ConnectResponse) -> None:
    """Raise `InvalidTransfer` for an endpoint that does not fit its layout (which the caller has checked). Assumes as
    many ranks as we have, which the owner of the ranks checks."""
    if response.WhichOneof("endpoint") != "nixl":
        raise InvalidTransfer("the receiver described no nixl endpoint")
    pool_bytes = KVLayout.from_proto(response.layout).pool_bytes
    if response.nixl.pool_bytes != pool_bytes:
        raise InvalidTransfer(f"a pool of that layout has {pool_bytes} bytes, not {response.nixl.pool_bytes}")
    for rank in response.nixl.ranks:
        check_memory(rank, pool_bytes // len(response.nixl.ranks))
