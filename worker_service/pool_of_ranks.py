"""Presents the KV pools of all ranks of a worker, each on its own GPU, to transfers as one pool with that many times
more layers. (On a CPU all ranks' pools are in one memory, with the same layout.)

    layer 0 … L-1: rank 0's | L … 2L-1: rank 1's | …       each rank has L layers of equally many blocks

A call for one layer goes to the rank that has the layer; a call for all layers goes to all ranks in parallel. Blocks of
a rank go to the peer's rank of the same number: only workers with equally many ranks are peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from kv_transfer import InvalidTransfer, KVPool
from kv_transfer.pool import Copying, Digests, PeerPool, PoolAgent, Rows
from protos import tandem_kv_transfer_pb2 as pb
from worker_service.agents_of_ranks import AgentsOfRanks
from worker_service.cuda_ipc import check_memory

Result = TypeVar("Result")


class PoolOfRanks(KVPool):
    """`pools`: of two or more ranks, in order. The first is in this process. Raises `ValueError` if they are not
    alike."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        layout = pools[0].layout
        for rank, pool in enumerate(pools):
            if pool.layout != layout:
                raise ValueError(f"the pool of rank {rank} is unlike rank 0's: {pool.layout} and {layout}")
        super().__init__(replace(layout, num_layers=len(pools) * layout.num_layers), None)
        self.memory = pools[0].memory
        self._pools = pools
        self._threads = ThreadPoolExecutor(len(pools) - 1, thread_name_prefix="kv-ranks")

    def describe_memory(self) -> pb.IpcEndpoint:
        memories = [described.cuda for described in self._of_each(lambda pool: pool.describe_memory())]
        return pb.IpcEndpoint(pool_bytes=self.layout.pool_bytes, ranks=pb.MemoryOfRanks(cuda=memories))

    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        memories = endpoint.ranks.cuda
        if endpoint.WhichOneof("memory") != "ranks" or len(memories) != len(self._pools):
            raise InvalidTransfer(
                f"a pool in the memories of {len(self._pools)} GPUs cannot be copied into one in {len(memories)}"
            )
        num_rows = self._pools[0].layout.num_layers * num_blocks
        for memory in memories:  # before any is opened
            check_memory(memory, num_rows, self.layout.block_bytes)
        parts = [pb.IpcEndpoint(pool_bytes=num_rows * self.layout.block_bytes, cuda=memory) for memory in memories]
        return self.open_each(
            [partial(pool.open_peer, part, num_blocks) for pool, part in zip(self._pools, parts, strict=True)],
            num_blocks,
        )

    def open_each(self, openings: Sequence[Callable[[], PeerPool]], num_blocks: int) -> PeerPool:
        """Call `openings`, which open one peer's pool of `num_blocks` blocks per rank, and present these as one. If one
        raises, none stays open."""
        opened: list[PeerPool] = []
        try:
            for opening in openings:
                opened.append(opening())
        except BaseException:
            _close_all(opened)
            raise
        return PeerOfRanks(opened, self._pools[0].layout.num_layers, self.layout.num_blocks, num_blocks, self.at_once)

    def start_agent(self, name: str) -> PoolAgent:
        return AgentsOfRanks(name, self._pools, self.open_each)

    def bind_thread(self) -> None:
        self._pools[0].bind_thread()

    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        rank, layer = divmod(layer, self._pools[0].layout.num_layers)
        return self._pools[rank].read(layer, block_ids, prefix=prefix)

    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        rank, layer = divmod(layer, self._pools[0].layout.num_layers)
        self._pools[rank].write(layer, block_ids, data)

    def digests(self, block_ids: Sequence[int]) -> Digests:
        return np.concatenate(self._of_each(lambda pool: pool.digests(block_ids)))

    def at_once(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run the calls in parallel and return their results in order. This thread runs the first call, as rank 0's
        requires. If a call raises, raises that once all have ended."""
        others = [self._threads.submit(call) for call in calls[1:]]
        try:
            first = [call() for call in calls[:1]]
        finally:
            wait(others)
        return first + [other.result() for other in others]

    def _of_each(self, call: Callable[[KVPool], Result]) -> list[Result]:
        return self.at_once([partial(call, pool) for pool in self._pools])


class PeerOfRanks:
    """See `kv_transfer.pool.PeerPool`."""

    def __init__(
        self,
        peers: Sequence[PeerPool],
        num_layers: int,
        num_blocks: int,
        num_peer_blocks: int,
        at_once: Callable[[Sequence[Callable[[], None]]], object],
    ) -> None:
        """num_layers: of each rank."""
        self._peers = peers
        self._num_rows = num_layers * num_blocks
        self._num_peer_rows = num_layers * num_peer_blocks
        self._at_once = at_once

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        ranks = rows_2R[0] // self._num_rows
        rows_of_ranks_21 = np.array([[self._num_rows], [self._num_peer_rows]])
        begun: list[Copying] = []

        def begin(rank: int) -> None:
            own_2R = np.compress(ranks == rank, rows_2R, axis=1) - rank * rows_of_ranks_21
            begun.append(self._peers[rank].copy(own_2R, late_at_s))

        copying = CopyingOfRanks(begun)
        try:
            self._at_once([partial(begin, rank) for rank in np.unique(ranks).tolist()])
        except BaseException:
            copying.synchronize()  # the blocks may be reused once the failure is reported
            raise
        return copying

    def close(self) -> None:
        _close_all(self._peers)


class CopyingOfRanks:
    def __init__(self, begun: Sequence[Copying]) -> None:
        self._begun = begun

    def synchronize(self) -> None:
        _all_of(copying.synchronize for copying in self._begun)


def _close_all(peers: Sequence[PeerPool]) -> None:
    _all_of(peer.close for peer in peers)


def _all_of(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, even if some raise. Then raises the first error."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
