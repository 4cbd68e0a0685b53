"""The "ipc" transport: one-sided writes (one_sided.py) into a peer's memory on the same machine, which this process has
opened.

Works for host memory (shared_memory.py) and GPU memory (the pool's own class). A direct copy runs at the machine's full
speed, and nothing has to be installed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from kv_transfer.base import Endpoint, Link
from kv_transfer.control_link import OpenChannel
from kv_transfer.copy_agent import CopyAgent
from kv_transfer.copy_link import CopyLink
from kv_transfer.errors import IncompatiblePeer, InvalidTransfer, TransportMissing
from kv_transfer.layout import KVLayout
from kv_transfer.pool import KVPool
from protos import tandem_kv_transfer_pb2 as pb

MAX_VRAM_BYTES_AT_ONCE = 1 << 30
"""Maximum bytes of one copy. On one GPU that takes less than a millisecond, and a launch takes the host nearly half of
one: an H100 pushed a gigabyte at 219 GB/s in eight launches, and at 384 to 415 in one."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class IpcEndpoint(Endpoint):
    """The receiving side: only describes how to open its memory. Raises `TransportMissing` if others cannot open it."""

    name = "ipc"
    is_one_sided = True

    def __init__(self, pool: KVPool) -> None:
        self._endpoint = pool.describe_memory()
        self._endpoint.machine = machine()

    def describe(self, response: pb.ConnectResponse) -> None:
        response.ipc.CopyFrom(self._endpoint)


class IpcTransport:
    """The sending side."""

    name = "ipc"

    def __init__(self, pool: KVPool, open_channel: OpenChannel) -> None:
        self._pool = pool
        self._open_channel = open_channel
        self._agent = CopyAgent(pool, MAX_VRAM_BYTES_AT_ONCE)

    async def dial(self, address: str) -> Link:
        return IpcLink(self._pool, self._agent, self._open_channel(address))

    async def close(self) -> None:
        await asyncio.to_thread(self._agent.close)


class IpcLink(CopyLink):
    async def adopt(self, response: pb.ConnectResponse) -> None:
        check_endpoint(response)
        num_blocks = response.layout.num_blocks
        await self.open(partial(self._pool.open_peer, response.ipc, num_blocks), num_blocks)


def machine() -> str:
    """An id of this machine: the kernel's boot id.

    Raises `TransportMissing` if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise TransportMissing(f"the ipc transport needs Linux' {_BOOT_ID}: {error.strerror}") from error


def check_endpoint(response: pb.ConnectResponse) -> None:
    """Raise `InvalidTransfer` for an endpoint that does not fit its layout (which the caller has checked), and
    `IncompatiblePeer` for one on another machine."""
    if response.WhichOneof("endpoint") != "ipc":
        raise InvalidTransfer("the receiver described no ipc endpoint")
    pool_bytes = KVLayout.from_proto(response.layout).pool_bytes
    if response.ipc.pool_bytes != pool_bytes:
        raise InvalidTransfer(f"a pool of that layout has {pool_bytes} bytes, not {response.ipc.pool_bytes}")
    if response.ipc.machine != machine():
        raise IncompatiblePeer(
            f"worker {response.worker_id} is on another machine, but the ipc transport works on one machine only; "
            "start both with --transport grpc or nixl"
        )
