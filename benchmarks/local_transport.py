"""The "local" transport calls receivers in the same process directly. For tests and benchmarks: it shows what all
transports have in common; no worker uses it.

Two-sided: every write passes the receiver's checks, in the order of posting, at the next drain or turn of the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import kv_transfer
from kv_transfer.base import BlockWriter, Endpoint, Identity, Link
from kv_transfer.errors import GrantGone, PeerUnreachable
from kv_transfer.pool import KVPool
from kv_transfer.receiver import KVReceiver
from protos import tandem_kv_transfer_pb2 as pb


def create_endpoint(transport: str, *, pool: KVPool, identity: Identity) -> Endpoint:
    """Like `kv_transfer.create_endpoint`, but also creates "local" endpoints."""
    if transport == LocalEndpoint.name:
        return LocalEndpoint()
    return kv_transfer.create_endpoint(transport, pool=pool, identity=identity)


class LocalEndpoint(Endpoint):
    """The receiving side."""

    name = "local"
    is_one_sided = False

    def describe(self, response: pb.ConnectResponse) -> None:
        """Adds nothing: a sender in the same process needs no description."""


class LocalTransport:
    """The sending side. receivers: by address; looked up at every call, so removing one simulates its death."""

    name = "local"

    def __init__(self, pool: KVPool, receivers: Mapping[str, KVReceiver]) -> None:
        self._pool = pool
        self._receivers = receivers

    async def dial(self, address: str) -> Link:
        return LocalLink(self._pool, self._receivers, address)

    async def close(self) -> None:
        pass


class LocalLink:
    is_one_sided = False
    is_broken = False
    num_blocks = 0

    def __init__(self, pool: KVPool, receivers: Mapping[str, KVReceiver], address: str) -> None:
        self._pool = pool
        self._receivers = receivers
        self._address = address

    async def lost(self) -> None:
        await asyncio.Event().wait()  # there is no connection

    def receiver(self) -> KVReceiver:
        if self._address not in self._receivers:
            raise PeerUnreachable(f"nobody is at {self._address}")
        return self._receivers[self._address]

    async def connect(self, request: pb.ConnectRequest, timeout_s: float) -> pb.ConnectResponse:
        return self.receiver().connect(request)

    async def adopt(self, response: pb.ConnectResponse) -> None:
        self.num_blocks = response.layout.num_blocks

    def writer(self, grant: pb.Grant) -> BlockWriter:
        return LocalWriter(self._pool, self, grant)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        return await self.receiver().commit(request)

    async def wait_connected(self, timeout_s: float) -> None:
        self.receiver()

    async def abandon(self, request: pb.AbandonRequest, timeout_s: float) -> None:
        self.receiver().abandon(request)

    async def close(self) -> None:
        pass


class LocalWriter:
    may_still_write = False

    def __init__(self, pool: KVPool, link: LocalLink, grant: pb.Grant) -> None:
        self._pool = pool
        self._link = link
        self._grant = grant
        self._posts: list[tuple[int, Sequence[int], Sequence[int]]] = []

    async def start(self) -> None:
        pass

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        self._posts.append((layer, src_block_ids, dst_block_ids))

    async def drain(self) -> None:
        while self._posts:
            layer, src_block_ids, dst_block_ids = self._posts.pop(0)
            chunk = pb.PushChunk(
                grant_id=self._grant.grant_id,
                epoch=self._grant.epoch,
                incarnation=self._grant.incarnation,
                layer=layer,
                block_ids=dst_block_ids,
                data=self._pool.read(layer, src_block_ids),
            )
            if not self._link.receiver().write(chunk):
                raise GrantGone(f"grant {self._grant.grant_id} of worker {self._grant.worker_id} is gone")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._posts.clear()

    async def close(self) -> None:
        pass
