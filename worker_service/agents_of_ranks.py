"""The NIXL agents of all ranks of a worker, presented to transfers as one. Each rank's process has an agent for its
pool.

    NAME/0 ── rank 0's pool, in this process         NAME/1 ── rank 1's, asked for (rank_pool.py)        …

Our rank 1's agent only talks to the peer's rank 1, and so on. A thread of its own tells other ranks, in order, that a
push begins or ends: such calls may take time, and must not block the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from engine.running.executor import RankLost
from kv_transfer import InvalidTransfer, KVPool
from kv_transfer.pool import PeerPool, PoolAgent
from protos import tandem_kv_transfer_pb2 as pb

OpenEach = Callable[[Sequence[Callable[[], PeerPool]], int], PeerPool]
"""`PoolOfRanks.open_each`"""


class AgentsOfRanks:
    """See `kv_transfer.pool.PoolAgent`. The owner of the pools notices itself when a rank is lost."""

    def __init__(self, name: str, pools: Sequence[KVPool], open_each: OpenEach) -> None:
        self._open_each = open_each
        self._agents: list[PoolAgent] = []
        self._is_closed = False
        self._told = ThreadPoolExecutor(1, thread_name_prefix="kv-pushes")
        try:
            for rank, pool in enumerate(pools):
                self._agents.append(pool.start_agent(f"{name}/{rank}"))
        except BaseException:
            self.close()
            raise

    def describe(self) -> pb.NixlEndpoint:
        ranks = [agent.describe() for agent in self._agents]
        return pb.NixlEndpoint(pool_bytes=sum(rank.pool_bytes for rank in ranks), ranks=ranks)

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        if len(endpoint.ranks) != len(self._agents):
            raise InvalidTransfer(
                f"a pool in the memories of {len(self._agents)} GPUs cannot be copied into one in {len(endpoint.ranks)}"
            )
        ranks = enumerate(zip(self._agents, endpoint.ranks, strict=True))
        openings = [partial(agent.open_peer, f"{name}/{rank}", part, num_blocks) for rank, (agent, part) in ranks]
        return self._open_each(openings, num_blocks)

    def enter_push(self) -> None:
        self._tell(lambda agent: agent.enter_push())

    def leave_push(self) -> None:
        self._tell(lambda agent: agent.leave_push())

    def close(self) -> None:
        self._is_closed = True
        self._told.shutdown()
        for agent in self._agents:
            with suppress(RankLost):  # its agent has ended with it
                agent.close()

    def _tell(self, call: Callable[[PoolAgent], None]) -> None:
        if self._is_closed:
            return
        own, *others = self._agents
        call(own)
        for agent in others:
            self._told.submit(call, agent)
