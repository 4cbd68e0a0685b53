"""The "nixl" transport: one-sided writes (one_sided.py) by NVIDIA's NIXL over UCX (RDMA, NVLink, shared memory, TCP).

A peer sends numbers (base address, length) and NIXL's opaque metadata, limited in size. Descriptors are built here,
because NIXL's own way to send them unpickles data.
"""

from __future__ import annotations

import asyncio

import grpc

from kv_transfer.base import MAX_AGENT_METADATA_BYTES, BlockWriter, Endpoint, Identity, Link
from kv_transfer.control_link import ControlLink, OpenChannel
from kv_transfer.errors import InvalidTransfer
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_agent import NixlAgent, RemotePool
from kv_transfer.one_sided import OneSidedWriter
from kv_transfer.pool import KVPool
from protos import tandem_kv_transfer_pb2 as pb

MAX_DEVICES = 1 << 10


class NixlEndpoint(Endpoint):
    """The receiving side: an agent for the pool, or one for each rank, that makes progress while a sender writes."""

    name = "nixl"
    is_one_sided = True

    def __init__(self, pool: KVPool, identity: Identity) -> None:
        self._agent = pool.start_agent(receiver_name(identity.worker_id, identity.incarnation))
        self._endpoint = self._agent.describe()

    def describe(self, response: pb.ConnectResponse) -> None:
        response.nixl.CopyFrom(self._endpoint)

    def enter_push(self) -> None:
        self._agent.enter_push()

    def leave_push(self) -> None:
        self._agent.leave_push()

    async def close(self) -> None:
        await asyncio.to_thread(self._agent.close)


class NixlTransport:
    """The sending side."""

    name = "nixl"

    def __init__(self, pool: KVPool, identity: Identity, open_channel: OpenChannel) -> None:
        self._pool = pool
        self._open_channel = open_channel
        self._agent = NixlAgent(sender_name(identity), pool)

    async def dial(self, address: str) -> Link:
        return NixlLink(self._pool, self._agent, self._open_channel(address))

    async def close(self) -> None:
        await asyncio.to_thread(self._agent.close)


class NixlLink(ControlLink):
    is_one_sided = True

    def __init__(self, pool: KVPool, agent: NixlAgent, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._pool = pool
        self._agent = agent
        self._remote: RemotePool | None = None
        self._is_broken = False

    @property
    def is_broken(self) -> bool:
        """Also true if the agent has given up the connection."""
        return self._is_broken or (self._remote is not None and self._remote.is_removed)

    @is_broken.setter
    def is_broken(self, is_broken: bool) -> None:
        self._is_broken = is_broken

    async def adopt(self, response: pb.ConnectResponse) -> None:
        check_endpoint(response)
        self.num_blocks = response.layout.num_blocks
        name = receiver_name(response.worker_id, response.incarnation)
        self._remote = await asyncio.wrap_future(self._agent.add_remote(name, response.nixl, self.num_blocks))

    def writer(self, grant: pb.Grant) -> BlockWriter:
        assert self._remote is not None
        return OneSidedWriter(self, self._agent, self._remote, grant, self._pool)

    async def close(self) -> None:
        if self._remote is not None:
            self._agent.remove_remote(self._remote)
        await super().close()


def check_endpoint(response: pb.ConnectResponse) -> None:
    """Raise `InvalidTransfer` for an endpoint that does not fit its layout (which the caller has checked)."""
    if response.WhichOneof("endpoint") != "nixl":
        raise InvalidTransfer("the receiver described no nixl endpoint")
    nixl = response.nixl
    if nixl.ranks:
        raise InvalidTransfer(f"a pool in one memory cannot be copied into one in those of {len(nixl.ranks)} GPUs")
    check_memory(nixl, KVLayout.from_proto(response.layout).pool_bytes)


def check_memory(nixl: pb.NixlEndpoint, pool_bytes: int) -> None:
    """Raise `InvalidTransfer` if this cannot describe a pool of `pool_bytes` in one memory."""
    if nixl.ranks:
        raise InvalidTransfer("a rank has no ranks")
    if not 0 < len(nixl.agent_metadata) <= MAX_AGENT_METADATA_BYTES:
        raise InvalidTransfer(f"NIXL metadata has between 1 and {MAX_AGENT_METADATA_BYTES} bytes")
    if nixl.pool_bytes != pool_bytes:
        raise InvalidTransfer(f"a pool of that layout has {pool_bytes} bytes, not {nixl.pool_bytes}")
    if not 0 < nixl.base_address < 2**64 - pool_bytes:
        raise InvalidTransfer("a pool at that address does not fit the address space")
    if nixl.memory not in ("DRAM", "VRAM") or nixl.device_id >= MAX_DEVICES:
        raise InvalidTransfer(f"memory {nixl.memory[:40]!r} of device {nixl.device_id} is unknown")


def receiver_name(worker_id: str, incarnation: str) -> str:
    return f"{worker_id}/{incarnation}/receiver"


def sender_name(identity: Identity) -> str:
    return f"{identity.worker_id}/{identity.incarnation}/sender"
