"""A link to a peer whose pool this process opens, and a `CopyAgent` copies into: "ipc", and "nixl" with several GPUs.

Owns the opened pool: `close` releases it, even if opening it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import grpc

from kv_transfer.base import BlockWriter
from kv_transfer.control_link import ControlLink
from kv_transfer.copy_agent import CopyAgent, OpenedPool
from kv_transfer.errors import PeerUnreachable
from kv_transfer.one_sided import OneSidedWriter
from kv_transfer.pool import KVPool, PeerPool
from protos import tandem_kv_transfer_pb2 as pb


class CopyLink(ControlLink):
    is_one_sided = True

    def __init__(self, pool: KVPool, agent: CopyAgent, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self._pool = pool
        self._agent = agent
        self._opening: Future[OpenedPool] | None = None

    async def open(self, open_peer: Callable[[], PeerPool], num_blocks: int) -> None:
        """Open a pool with `num_blocks` blocks: the agent's thread calls `open_peer`. Raises what that raises."""
        self.num_blocks = num_blocks
        self._opening = self._agent.open(open_peer, num_blocks)
        await asyncio.wrap_future(self._opening)

    def writer(self, grant: pb.Grant) -> BlockWriter:
        if self._opening is None:
            raise PeerUnreachable(f"the connection to worker {grant.worker_id} is closed")
        return OneSidedWriter(self, self._agent, self._opening.result(), grant, self._pool)

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            self._agent.release(opening)
        await super().close()
