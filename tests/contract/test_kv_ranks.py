"""Pools of two ranks over NIXL: the second rank is in another process, and each process has an agent."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Pipe

import kv_rank_process
import numpy as np
import pytest
from device_peers import on_a_device, on_devices
from kv_harness import DEADLINE_S, Cluster, Receiving, make_pool, over, running_cluster, until
from nixl_marks import needs_nixl

from engine.running.executor import RankLost
from kv_transfer import HostPool, InvalidTransfer, KVPool, PeerUnreachable
from worker_service import rank_pool
from worker_service.pool_of_ranks import PoolOfRanks
from worker_service.rank_pool import RankPool

pytestmark = needs_nixl
FORKS = multiprocessing.get_context("forkserver")
"""Forks the ranks' processes from one that has already made the imports, which take seconds."""
FORKS.set_forkserver_preload([rank_pool.__name__])
NUM_LAYERS = 2
"""Layers of each rank."""
LEASE_S = 4.0
NUM_BLOCKS, NUM_PEER_BLOCKS = 30, 40
SRC, DST = [3, 14, 15], [9, 4, 20]


class Ranks:
    """The two ranks of one worker."""

    def __init__(self, num_blocks: int, seed: int | None) -> None:
        ours, theirs = Pipe()
        arguments = (theirs, NUM_LAYERS, num_blocks, None if seed is None else seed + 1, os.environ.get("UCX_TLS"))
        self.process = FORKS.Process(target=kv_rank_process.main, args=arguments)
        self.process.start()
        theirs.close()
        self.lost: list[RankLost] = []
        self.own = make_pool(num_blocks, seed=seed, num_layers=NUM_LAYERS)
        self.other = RankPool(1, ours, self.lost.append)
        self.pool = PoolOfRanks([self.own, self.other])

    def blocks(self, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """uint8 [layer, block, byte]"""
        pool: KVPool = (self.own, self.other)[rank]
        every = range(pool.layout.num_blocks)
        data = b"".join(pool.read(layer, every) for layer in range(NUM_LAYERS))
        return np.frombuffer(data, dtype=np.uint8).reshape(NUM_LAYERS, len(every), -1)

    def wait_until_asked(self) -> None:
        """Waits until the stopped rank has been asked for something."""
        while not self.other._lock.locked():
            time.sleep(0.01)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Stage:
    def __init__(self, cluster: Cluster, source: Ranks, target: Ranks, receiving: Receiving) -> None:
        self.source = source
        self.target = target
        self.receiving = receiving
        self.sender = cluster.make_sender(source.pool)

    def assert_only_these_arrived(self, *ranks: int) -> None:
        for rank in range(2):
            wanted = np.zeros_like(self.target.blocks(rank))
            if rank in ranks:
                wanted[:, DST] = self.source.blocks(rank)[:, SRC]
            np.testing.assert_array_equal(self.target.blocks(rank), wanted)


@pytest.fixture
async def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Over TCP, each rank of a receiver has to take part in a write."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = Ranks(NUM_BLOCKS, 7), Ranks(NUM_PEER_BLOCKS, None)
    try:
        async with running_cluster("nixl") as cluster:
            receiving = await cluster.add_receiving(wrap=lambda _: target.pool, lease_s=LEASE_S)
            yield Stage(cluster, source, target, receiving)
    finally:
        source.end()
        target.end()


@pytest.mark.parametrize("stage", ["any", pytest.param("tcp", marks=pytest.mark.slow)], indirect=True)
async def test_blocks_of_each_rank_arrive_at_the_same_one_of_the_peer_and_nowhere_else(stage: Stage) -> None:
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    for layer in range(2 * NUM_LAYERS):
        push.write(layer, 0, SRC)
    await push.commit(12, 42, SRC)
    stage.assert_only_these_arrived(0, 1)
    np.testing.assert_array_equal(stage.source.pool.digests(SRC), stage.target.pool.digests(DST))
    assert stage.sender.num_repaired_blocks == 0
    assert (stage.source.lost, stage.target.lost) == ([], [])


@pytest.mark.parametrize("stage", ["any"], indirect=True)
async def test_a_rank_that_dies_ends_the_push_and_is_lost(stage: Stage) -> None:
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    push.write(0, 0, SRC)
    await push._writer.drain()
    stage.source.end()
    push.write(NUM_LAYERS, 0, SRC)
    with pytest.raises(PeerUnreachable, match="rank 1 of the engine does not answer"):
        await asyncio.wait_for(push._writer.drain(), DEADLINE_S)
    await push.abandon()
    assert len(stage.source.lost) == 1
    assert not stage.target.blocks(1).any()
    stage.receiving.receiver.drop_owner("router")
    await until(stage.receiving.has_freed)


@pytest.mark.parametrize("stage", ["any"], indirect=True)
async def test_a_rank_that_stands_still_writes_no_more_when_it_goes_on(stage: Stage) -> None:
    """The lease of rank 0 is what counts; the rank that stands still counts as lost only after a minute."""
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    push.write(0, 0, SRC)
    await push._writer.drain()
    stage.source.stop()
    push.write(NUM_LAYERS, 0, SRC)
    await asyncio.sleep(0.85 * LEASE_S)
    stage.source.go_on()
    with pytest.raises(PeerUnreachable, match="rank 1: this rank was stalled"):
        await asyncio.wait_for(push._writer.drain(), DEADLINE_S)
    await push.abandon()
    assert not stage.target.blocks(1).any()
    assert stage.source.lost == []


@pytest.mark.parametrize("stage", ["any"], indirect=True)
async def test_a_rank_that_does_not_go_on_is_lost_and_does_nothing_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "END_S", 0.2)
    monkeypatch.setitem(RankPool._ask.__kwdefaults__ or {}, "patience_s", 0.4)
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    stage.source.stop()
    push.write(NUM_LAYERS, 0, SRC)
    with pytest.raises(PeerUnreachable, match=r"does not answer: no answer within 0\.4 s"):
        await asyncio.wait_for(push._writer.drain(), DEADLINE_S)
    await push.abandon()
    assert len(stage.source.lost) == 1
    stage.source.go_on()
    await asyncio.sleep(0.3)
    assert not stage.target.blocks(1).any()


@pytest.mark.parametrize("stage", ["tcp"], indirect=True)
async def test_a_peers_rank_that_stands_still_ends_the_push_within_a_lease(stage: Stage) -> None:
    """Over TCP, the rank that writes gives up the write that it began, and is not lost."""
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    stage.target.stop()
    begun_s = time.monotonic()
    push.write(NUM_LAYERS, 0, SRC)
    with pytest.raises(PeerUnreachable, match="rank 1: decode/d-1/receiver/1: a write did not end in its time"):
        await asyncio.wait_for(push._writer.drain(), DEADLINE_S)
    assert time.monotonic() - begun_s < 2 * LEASE_S
    stage.target.go_on()
    await push.abandon()
    assert (stage.source.lost, stage.target.lost) == ([], [])


@pytest.mark.parametrize("stage", ["any"], indirect=True)
async def test_a_cancelled_push_writes_nothing_later(stage: Stage) -> None:
    push = await stage.sender.open(stage.receiving.receiver.issue("router", DST, 0))
    stage.source.stop()
    for layer in range(NUM_LAYERS, 2 * NUM_LAYERS):
        push.write(layer, 0, SRC)
    await asyncio.to_thread(stage.source.wait_until_asked)  # for the first layer
    abandoning = asyncio.create_task(push.abandon())
    await asyncio.sleep(0.2)
    assert not abandoning.done(), "that one may have begun"
    stage.source.go_on()
    await asyncio.wait_for(abandoning, DEADLINE_S)
    arrived = stage.target.blocks(1)
    assert not arrived[1].any()
    push.write(0, 0, SRC)
    await asyncio.sleep(0.1)
    np.testing.assert_array_equal(stage.target.blocks(1), arrived)
    assert not stage.target.blocks(0).any()
    assert stage.source.lost == []


@over("nixl")
@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        (on_devices, lambda pool: on_devices(pool, 2), "in the memories of 3 GPUs cannot be copied into one in 2"),
        (on_devices, on_a_device, "in the memories of 3 GPUs cannot be copied into one in 0"),
        (on_a_device, on_devices, "in one memory cannot be copied into one in those of 3 GPUs"),
    ],
)
async def test_a_receiver_of_another_number_of_ranks_is_refused(
    cluster: Cluster, ours: Callable[[HostPool], KVPool], theirs: Callable[[HostPool], KVPool], named: str
) -> None:
    receiving = await cluster.add_receiving(wrap=theirs, num_layers=6)
    sender = cluster.make_sender(ours(make_pool(30, seed=7, num_layers=6)))
    with pytest.raises(InvalidTransfer, match=named):
        await sender.open(receiving.receiver.issue("router", [9, 4], 0))
    assert not receiving.pool.array.any()
