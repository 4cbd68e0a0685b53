"""The "grpc" transport: sends blocks as messages of a Push stream. Works wherever gRPC works.

One stream carries one round of a push. `drain` waits for its answer, which comes once the receiver has read everything.
Blocks are read from the pool when their message is written, and HTTP/2 flow control delays writing, so that at most a
few messages exist at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from grpc.aio import Metadata

from kv_transfer.base import GONE, MAX_CHUNK_BYTES, BlockWriter, Endpoint, Link
from kv_transfer.control_link import ControlLink, OpenChannel
from kv_transfer.errors import GrantGone, InvalidTransfer, errors_of_peer, readable
from kv_transfer.pool import KVPool
from protos import tandem_kv_transfer_pb2 as pb

OpenPush = Callable[[], "grpc.aio.StreamUnaryCall[bytes, pb.PushSummary]"]
"""Opens a Push stream that takes serialised messages."""
_DATA_TAG = bytes([pb.PushChunk.DATA_FIELD_NUMBER << 3 | 2])
MAX_BLOCK_MESSAGE_BYTES = 12 << 20
"""A block of one layer must fit into one message."""


class GrpcEndpoint(Endpoint):
    """The receiving side: only the RPCs. Raises `ValueError` if a block does not fit into one message."""

    name = "grpc"
    is_one_sided = False

    def __init__(self, pool: KVPool) -> None:
        if pool.layout.block_bytes > MAX_BLOCK_MESSAGE_BYTES:
            raise ValueError(
                f"the grpc transport takes blocks of at most {MAX_BLOCK_MESSAGE_BYTES} bytes per layer, "
                f"not {pool.layout.block_bytes}"
            )
        self._max_chunk_bytes = max(MAX_CHUNK_BYTES, pool.layout.block_bytes)

    def describe(self, response: pb.ConnectResponse) -> None:
        response.grpc.max_chunk_bytes = self._max_chunk_bytes


class GrpcTransport:
    """The sending side."""

    name = "grpc"

    def __init__(self, pool: KVPool, open_channel: OpenChannel) -> None:
        self._pool = pool
        self._open_channel = open_channel

    async def dial(self, address: str) -> Link:
        return GrpcLink(self._pool, self._open_channel(address))

    async def close(self) -> None:
        pass


class GrpcLink(ControlLink):
    is_one_sided = False

    def __init__(self, pool: KVPool, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._pool = pool
        self._max_chunk_blocks = 1
        # The stub's own Push would copy each message two more times: into a PushChunk, and out of it.
        self._push: OpenPush = channel.stream_unary(
            "/tandem.v1.KVTransfer/Push", response_deserializer=pb.PushSummary.FromString
        )

    async def adopt(self, response: pb.ConnectResponse) -> None:
        if response.WhichOneof("endpoint") != "grpc":
            raise InvalidTransfer("the receiver described no grpc endpoint")
        self.num_blocks = response.layout.num_blocks
        max_bytes = min(response.grpc.max_chunk_bytes, MAX_CHUNK_BYTES)
        self._max_chunk_blocks = max(1, max_bytes // self._pool.layout.block_bytes)

    def writer(self, grant: pb.Grant) -> BlockWriter:
        return GrpcWriter(self._pool, self._push, grant, self._max_chunk_blocks)


class GrpcWriter:
    """One push: a task that turns posts into messages of a stream, one stream per round (push, repair, repair)."""

    may_still_write = False

    def __init__(self, pool: KVPool, push: OpenPush, grant: pb.Grant, max_chunk_blocks: int) -> None:
        self._pool = pool
        self._push = push
        self._grant = grant
        self._max_chunk_blocks = max_chunk_blocks
        self._posts: asyncio.Queue[tuple[int, Sequence[int], Sequence[int]] | None] = asyncio.Queue()
        self._round: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pass

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        if self._round is None:
            self._round = asyncio.create_task(self._send_round(), name=f"kv-push-{self._grant.grant_id}")
        step = self._max_chunk_blocks
        for start in range(0, len(src_block_ids), step):
            self._posts.put_nowait((layer, src_block_ids[start : start + step], dst_block_ids[start : start + step]))

    async def drain(self) -> None:
        if self._round is not None:
            self._posts.put_nowait(None)
            await asyncio.shield(self._round)
            self._round = None

    async def stop(self) -> None:
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait([self._round])
            if not self._round.cancelled():
                self._round.exception()  # marks it as retrieved: the caller stops for another reason
            self._round = None

    async def close(self) -> None:
        """Nothing to do: the receiver checks every write and waits for no notice."""

    async def _send_round(self) -> None:
        with errors_of_peer():
            call = self._push()
        told = asyncio.create_task(call.initial_metadata())
        try:
            with errors_of_peer():
                while (post := await self._posts.get()) is not None and not _is_told_to_stop(told):
                    await call.write(self._message(*post))
                await call.done_writing()
                summary: pb.PushSummary | None = await call
        finally:
            call.cancel()
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)
        if readable(summary).num_late:
            raise GrantGone(f"grant {self._grant.grant_id} of worker {self._grant.worker_id} is gone")

    def _message(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> bytes:
        """Serialize a PushChunk by hand, so that blocks are copied only once, from the pool into the message."""
        head = pb.PushChunk(
            grant_id=self._grant.grant_id,
            epoch=self._grant.epoch,
            incarnation=self._grant.incarnation,
            layer=layer,
            block_ids=dst_block_ids,
        ).SerializeToString()
        num_bytes = len(src_block_ids) * self._pool.layout.block_bytes
        return self._pool.read(layer, src_block_ids, prefix=head + _DATA_TAG + _varint(num_bytes))


def _is_told_to_stop(told: asyncio.Task[Metadata]) -> bool:
    return told.done() and not told.cancelled() and told.exception() is None and GONE in tuple(told.result() or ())


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
