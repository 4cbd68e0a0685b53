"""The "nixl" transport: one-sided writes by NVIDIA's NIXL over UCX (RDMA, NVLink, shared memory, TCP).

    open    Push stream: chunk without blocks ──> receiver attaches ──> initial metadata   nothing is written before
    write   NIXL writes into the receiver's pool, unseen by it
    end     second chunk without blocks ──> receiver detaches                              nothing is written after

The receiver cannot refuse a write, so the sender keeps the bounds: it writes only to blocks of a grant that is
attached, stops when its stream breaks, and says that it is done only when NIXL has nothing under way. What a peer sends
are numbers (base address, length) and NIXL's opaque metadata, bounded in size; descriptors are built here, because
NIXL's own way to send them unpickles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from kv_transfer.base import ATTACHED, MAX_AGENT_METADATA_BYTES, BlockWriter, Identity, Link
from kv_transfer.errors import InvalidTransfer, PeerUnreachable, TransferError, errors_of_peer
from kv_transfer.grpc_transport import ControlLink, OpenChannel
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_agent import NixlAgent, RemotePool, Transfer
from kv_transfer.pool import KVPool
from protos import tandem_kv_transfer_pb2 as pb

MAX_TRANSFER_BYTES = 4 << 20
"""In one NIXL request: over shared memory, posting one copies it."""
MAX_DEVICES = 1 << 10


class NixlEndpoint:
    """The receiving side: an agent that knows the pool, and makes progress while somebody writes."""

    name = "nixl"
    is_one_sided = True

    def __init__(self, pool: KVPool, identity: Identity) -> None:
        self._pool = pool
        self._agent = NixlAgent(_receiver_name(identity.worker_id, identity.incarnation), pool)

    async def start(self) -> None:
        pass

    def describe(self, response: pb.ConnectResponse) -> None:
        response.nixl.agent_metadata = self._agent.metadata()
        response.nixl.base_address = self._pool.base_address
        response.nixl.pool_bytes = self._pool.layout.pool_bytes
        response.nixl.device_id = self._pool.device_id
        response.nixl.memory = self._pool.memory

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
        self._agent = NixlAgent(f"{identity.worker_id}/{identity.incarnation}/sender", pool)

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

    async def adopt(self, response: pb.ConnectResponse) -> None:
        check_endpoint(response)
        self.num_blocks = response.layout.num_blocks
        self._remote = await asyncio.wrap_future(
            self._agent.add_remote(
                _receiver_name(response.worker_id, response.incarnation),
                response.nixl.agent_metadata,
                response.nixl.base_address,
                response.nixl.device_id,
                response.nixl.memory,
                response.layout.num_blocks,
            )
        )

    def writer(self, grant: pb.Grant) -> BlockWriter:
        assert self._remote is not None
        return NixlWriter(self, self._pool, self._agent, self._remote, grant)

    async def close(self) -> None:
        if self._remote is not None:
            self._agent.remove_remote(self._remote)
        await super().close()


class NixlWriter:
    """One push: a stream that says when we write, and transfers on the agent's thread."""

    def __init__(self, link: NixlLink, pool: KVPool, agent: NixlAgent, remote: RemotePool, grant: pb.Grant) -> None:
        self._link = link
        self._agent = agent
        self._remote = remote
        self._grant = grant
        self._max_blocks = max(1, MAX_TRANSFER_BYTES // pool.layout.block_bytes)
        self._loop = asyncio.get_running_loop()
        self._stream: grpc.aio.StreamUnaryCall[pb.PushChunk, pb.PushSummary] | None = None
        self._num_outstanding = 0
        self._has_none_outstanding = asyncio.Event()
        self._has_none_outstanding.set()
        self._is_stopped = False
        self._error: TransferError | None = None

    async def start(self) -> None:
        with errors_of_peer():
            self._stream = self._link.stub.Push()
            await self._stream.write(self._bare_chunk())
            metadata = await self._stream.initial_metadata()
            if ATTACHED not in tuple(metadata or ()):
                await self._stream
                raise InvalidTransfer("the receiver let a one-sided push in without attaching it")

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        assert self._stream is not None
        if self._stream.done() and self._error is None:
            # The receiver thinks that we are gone: what we wrote now could hit the blocks' next owner.
            self._error = PeerUnreachable(f"the push stream to worker {self._grant.worker_id} broke")
        if self._error is not None or self._is_stopped:
            return
        for start in range(0, len(src_block_ids), self._max_blocks):
            self._num_outstanding += 1
            self._has_none_outstanding.clear()
            self._agent.post(
                Transfer(
                    remote=self._remote,
                    layer=layer,
                    src_block_ids=src_block_ids[start : start + self._max_blocks],
                    dst_block_ids=dst_block_ids[start : start + self._max_blocks],
                    is_cancelled=self._must_not_write,
                    on_end=self._report_end,
                    patience_s=self._grant.lease_ms / 1000,
                )
            )

    async def drain(self) -> None:
        await self._has_none_outstanding.wait()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        self._is_stopped = True
        await self._has_none_outstanding.wait()
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            async with asyncio.timeout(self._grant.lease_ms / 1000):
                with errors_of_peer():
                    await stream.write(self._bare_chunk())
                    await stream.done_writing()
                    await stream
        except (TransferError, TimeoutError):
            pass  # the stream broke before: the receiver waits for Abandon, or until we have been gone for one lease
        finally:
            stream.cancel()

    def _must_not_write(self) -> bool:
        stream = self._stream
        return self._is_stopped or self._error is not None or stream is None or stream.done()

    def _report_end(self, error: TransferError | None) -> None:
        self._loop.call_soon_threadsafe(self._on_end, error)

    def _on_end(self, error: TransferError | None) -> None:
        if error is not None:
            self._error = self._error or error
            self._link.is_broken = True
        self._num_outstanding -= 1
        if self._num_outstanding == 0:
            self._has_none_outstanding.set()

    def _bare_chunk(self) -> pb.PushChunk:
        grant = self._grant
        return pb.PushChunk(grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation)


def check_endpoint(response: pb.ConnectResponse) -> None:
    """Raises `InvalidTransfer` for an endpoint that does not fit the layout beside it (which is checked already)."""
    if response.WhichOneof("endpoint") != "nixl":
        raise InvalidTransfer("the receiver described no nixl endpoint")
    nixl = response.nixl
    if not 0 < len(nixl.agent_metadata) <= MAX_AGENT_METADATA_BYTES:
        raise InvalidTransfer(f"NIXL metadata has between 1 and {MAX_AGENT_METADATA_BYTES} bytes")
    pool_bytes = KVLayout.from_proto(response.layout).pool_bytes
    if nixl.pool_bytes != pool_bytes:
        raise InvalidTransfer(f"a pool of that layout has {pool_bytes} bytes, not {nixl.pool_bytes}")
    if not 0 < nixl.base_address < 2**64 - pool_bytes:
        raise InvalidTransfer("a pool at that address does not fit the address space")
    if nixl.memory not in ("DRAM", "VRAM") or nixl.device_id >= MAX_DEVICES:
        raise InvalidTransfer(f"memory {nixl.memory[:40]!r} of device {nixl.device_id} is unknown")


def _receiver_name(worker_id: str, incarnation: str) -> str:
    return f"{worker_id}/{incarnation}/receiver"
