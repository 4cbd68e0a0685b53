"""The pools of several ranks as one pool, and each rank's pool as another process uses it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe

import numpy as np
import pytest
from device_peers import OneProcess, on_a_device, on_devices, parts_of, served

from engine.running.executor import RankLost
from kv_transfer import (
    HostPool,
    InvalidTransfer,
    KVLayout,
    PeerUnreachable,
    TransportMissing,
)
from kv_transfer.pool import Copying, PeerPool, Rows
from protos import tandem_kv_transfer_pb2 as pb
from worker_service import rank_pool as module
from worker_service.pool_of_ranks import PeerOfRanks, PoolOfRanks
from worker_service.rank_pool import PoolServer, RankPool

LAYOUT = KVLayout(num_layers=6, num_blocks=7, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
NUM_PEER_BLOCKS = 9
PATIENCE_S = 5.0


def host_pool(num_blocks: int = LAYOUT.num_blocks, *, seed: int = 1, num_layers: int = LAYOUT.num_layers) -> HostPool:
    layout = KVLayout(
        num_layers=num_layers, num_blocks=num_blocks, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16"
    )
    size = (layout.num_layers, num_blocks, layout.block_bytes)
    return HostPool(layout, np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.parametrize(("num_ranks", "shared_bytes"), [(2, 2 << 20), (3, 2 << 20), (3, 100)])
def test_it_is_the_same_bytes(num_ranks: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for reads and writes that are too large for the memory that ranks share."""
    monkeypatch.setattr(module, "SHARED_BYTES", shared_bytes)
    host = host_pool()
    pool = on_devices(host, num_ranks)
    assert pool.layout == host.layout
    for layer in range(LAYOUT.num_layers):
        assert pool.read(layer, [6, 2, 3], prefix=b"head") == host.read(layer, [6, 2, 3], prefix=b"head")
        host.array[layer, 5] ^= 0xFF
        pool.write(layer, [1, 4], changed := host.read(layer, [5, 0]))
        assert host.read(layer, [1, 4]) == changed
    np.testing.assert_array_equal(pool.digests([6, 2, 3]), host.digests([6, 2, 3]))


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
def test_what_is_written_lies_in_its_layers_blocks_alone(layer: int) -> None:
    host = host_pool()
    before = host.array.copy()
    data = bytes(reversed(before[layer, [5, 2]].tobytes()))
    on_devices(host).write(layer, [5, 2], memoryview(data))
    assert host.read(layer, [5, 2]) == data
    host.array[layer, [5, 2]] = before[layer, [5, 2]]
    np.testing.assert_array_equal(host.array, before)


def test_pools_that_are_unlike_are_none() -> None:
    with pytest.raises(ValueError, match=r"the pool of rank 1 is unlike rank 0's: .*num_blocks=8"):
        PoolOfRanks([on_a_device(host_pool(7)), on_a_device(host_pool(8))])


# -- agents of NIXL's -----------------------------------------------------------------------------------------------


class Agent:
    """The agent of one rank, which is told what the worker's agent is told."""

    def __init__(self, name: str, error: Exception | None) -> None:
        self.name = name
        self.error = error
        self.opened: list[tuple[str, bytes, Peer]] = []
        self.told = threading.Semaphore(0)
        self.num_pushes = 0
        self.is_closed = False

    def describe(self) -> pb.NixlEndpoint:
        return pb.NixlEndpoint(agent_metadata=self.name.encode(), pool_bytes=10)

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        assert num_blocks == NUM_PEER_BLOCKS
        if self.error is not None:
            raise self.error
        self.opened.append((name, endpoint.agent_metadata, Peer()))
        return self.opened[-1][2]

    def enter_push(self) -> None:
        self.num_pushes += 1
        self.told.release()

    def leave_push(self) -> None:
        self.num_pushes -= 1
        self.told.release()

    def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


class PoolWithAgent(HostPool):
    error: Exception | None = None
    has_nixl = True

    def start_agent(self, name: str) -> Agent:
        if not self.has_nixl:
            raise TransportMissing("no NIXL")
        self.agent = Agent(name, self.error)
        return self.agent


def pools_with_agents() -> list[PoolWithAgent]:
    """Three ranks' pools. The others behave as those in processes of their own."""
    return [PoolWithAgent(part.layout, part.array) for part in parts_of(host_pool(), 3)]


def as_one(pools: list[PoolWithAgent]) -> PoolOfRanks:
    return PoolOfRanks([pools[0], *(served(pool, rank) for rank, pool in enumerate(pools[1:], start=1))])


def test_each_rank_has_an_agent_that_opens_the_peers_of_the_same_number() -> None:
    pools = pools_with_agents()
    agent = as_one(pools).start_agent("sender")
    assert [pool.agent.name for pool in pools] == ["sender/0", "sender/1", "sender/2"]
    described = agent.describe()
    assert (described.pool_bytes, len(described.ranks), described.agent_metadata) == (30, 3, b"")
    theirs = pb.NixlEndpoint(ranks=[pb.NixlEndpoint(agent_metadata=bytes([rank])) for rank in range(3)])
    opened = agent.open_peer("receiver", theirs, NUM_PEER_BLOCKS)
    assert [pool.agent.opened[0][:2] for pool in pools] == [(f"receiver/{rank}", bytes([rank])) for rank in range(3)]
    opened.close()
    assert all(pool.agent.opened[0][2].is_closed for pool in pools)
    agent.close()
    assert all(pool.agent.is_closed for pool in pools)


def test_every_rank_hears_of_a_push_and_of_its_end() -> None:
    pools = pools_with_agents()
    agent = as_one(pools).start_agent("receiver")
    for change, counted in ((agent.enter_push, 1), (agent.enter_push, 2), (agent.leave_push, 1), (agent.leave_push, 0)):
        change()
        assert all(pool.agent.told.acquire(timeout=PATIENCE_S) for pool in pools)
        assert [pool.agent.num_pushes for pool in pools] == [counted] * 3
    agent.close()
    agent.leave_push()  # for a stream that ends after everything else


def test_a_rank_without_nixl_is_heard_of_at_the_start() -> None:
    pools = pools_with_agents()
    pools[2].has_nixl = False
    with pytest.raises(TransportMissing, match="rank 2: no NIXL"):
        as_one(pools).start_agent("sender")
    assert [pool.agent.is_closed for pool in pools[:2]] == [True, True]


def test_a_rank_that_cannot_reach_its_peer_leaves_no_other_open() -> None:
    pools = pools_with_agents()
    pools[2].error = PeerUnreachable("NIXL cannot connect")
    agent = as_one(pools).start_agent("sender")
    theirs = pb.NixlEndpoint(ranks=[pb.NixlEndpoint()] * 3)
    with pytest.raises(PeerUnreachable, match="rank 2: NIXL cannot connect"):
        agent.open_peer("receiver", theirs, NUM_PEER_BLOCKS)
    assert [pool.agent.opened[0][2].is_closed for pool in pools[:2]] == [True, True]


def test_agents_of_a_worker_that_lost_a_rank_are_closed() -> None:
    pools = pools_with_agents()
    pools[0].error = RankLost("it ended")  # what a call of rank 1 would raise
    as_one(pools).start_agent("sender").close()
    assert all(pool.agent.is_closed for pool in pools)


# -- peers' pools ---------------------------------------------------------------------------------------------------


def test_blocks_are_copied_to_the_peers_rank_of_the_same_number() -> None:
    """Whatever one call copies: layers of all ranks or of some, in any order. At the end all pools are closed."""
    ours, theirs, driver = host_pool(), host_pool(NUM_PEER_BLOCKS, seed=2), OneProcess()
    wanted = theirs.array.copy()
    opened = on_devices(ours, driver=driver).open_peer(on_devices(theirs).describe_memory(), NUM_PEER_BLOCKS)
    assert len(driver.opened) == 3
    for copies in ([(0, 3, 8), (1, 4, 2), (2, 1, 0), (3, 3, 8), (5, 6, 1)], [(5, 0, 0)], [(4, 2, 3), (1, 2, 3)]):
        for layer, src, dst in copies:
            wanted[layer, dst] = ours.array[layer, src]
        src_rows = [layer * LAYOUT.num_blocks + src for layer, src, _ in copies]
        dst_rows = [layer * NUM_PEER_BLOCKS + dst for layer, _, dst in copies]
        opened.copy(np.array([src_rows, dst_rows]), lambda: math.inf).synchronize()
        np.testing.assert_array_equal(theirs.array, wanted)
    opened.close()
    assert driver.opened == []


def without_the_last(memories: list[pb.CudaMemory]) -> None:
    del memories[-1]


def with_one_more(memories: list[pb.CudaMemory]) -> None:
    memories.append(memories[-1])


def too_small(memories: list[pb.CudaMemory]) -> None:
    memories[1].num_bytes = memories[1].offset + 2 * NUM_PEER_BLOCKS * LAYOUT.block_bytes - 1


def without_a_handle(memories: list[pb.CudaMemory]) -> None:
    memories[2].handle = b""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_the_last, "in the memories of 3 GPUs cannot be copied into one in 2"),
        (with_one_more, "in the memories of 3 GPUs cannot be copied into one in 4"),
        (too_small, "a pool of 18 rows at 64 does not fit its"),
        (without_a_handle, "has 64 bytes, not 0"),
        (lambda memories: memories.clear(), "cannot be copied into one in 0"),
    ],
)
def test_what_a_peer_says_is_checked_before_anything_is_opened(
    change: Callable[[list[pb.CudaMemory]], None], named: str
) -> None:
    class Opening(OneProcess):
        def open(self, handle: bytes) -> int:
            raise AssertionError("opened")

    memories = list(on_devices(host_pool(NUM_PEER_BLOCKS)).describe_memory().ranks.cuda)
    change(memories)
    endpoint = pb.IpcEndpoint(ranks=pb.MemoryOfRanks(cuda=memories))
    with pytest.raises(InvalidTransfer, match=named):
        on_devices(host_pool(), driver=Opening()).open_peer(endpoint, NUM_PEER_BLOCKS)


def test_a_pool_of_one_gpu_is_none_of_several() -> None:
    one = on_a_device(host_pool(NUM_PEER_BLOCKS))
    with pytest.raises(InvalidTransfer, match="in the memories of 3 GPUs"):
        on_devices(host_pool()).open_peer(one.describe_memory(), NUM_PEER_BLOCKS)
    with pytest.raises(InvalidTransfer, match="cannot be copied into a host's"):
        one.open_peer(on_devices(host_pool(NUM_PEER_BLOCKS)).describe_memory(), NUM_PEER_BLOCKS)


def test_a_rank_that_cannot_open_its_part_closes_those_of_others() -> None:
    class Refusing(OneProcess):
        def open(self, handle: bytes) -> int:
            if len(self.opened) == 2:
                raise RuntimeError("cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
            return super().open(handle)

    driver = Refusing()
    endpoint = on_devices(host_pool(NUM_PEER_BLOCKS)).describe_memory()
    with pytest.raises(PeerUnreachable, match=r"rank 2: .*PEER_ACCESS_UNSUPPORTED"):
        on_devices(host_pool(), driver=driver).open_peer(endpoint, NUM_PEER_BLOCKS)
    assert driver.opened == []


class Peer:
    """The pool of one rank of a peer. Its copies are done when they are waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_begun = self.num_done = 0
        self.is_closed = False

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        if self.error is not None:
            raise self.error
        self.num_begun += 1
        return self

    def synchronize(self) -> None:
        self.num_done += 1

    def close(self) -> None:
        self.is_closed = True
        if self.error is not None:
            raise self.error


def peers_of_ranks(peers: Sequence[PeerPool]) -> PeerOfRanks:
    return PeerOfRanks(peers, 2, 10, 10, on_devices(host_pool()).at_once)


ALL_RANKS = np.array([[0, 20, 40], [0, 20, 40]])


def test_copies_are_done_when_each_rank_has_done_its_own() -> None:
    peers = [Peer(), Peer(), Peer()]
    copying = peers_of_ranks(peers).copy(ALL_RANKS, lambda: math.inf)
    assert [(peer.num_begun, peer.num_done) for peer in peers] == [(1, 0)] * 3
    copying.synchronize()
    assert [peer.num_done for peer in peers] == [1] * 3


@pytest.mark.parametrize("failing", range(3))
def test_where_one_rank_fails_the_others_have_ended_before_anybody_hears_of_it(failing: int) -> None:
    """The caller that gets the error takes the blocks for free."""
    peers = [Peer(RuntimeError("CUDA error") if rank == failing else None) for rank in range(3)]
    opened = peers_of_ranks(peers)
    with pytest.raises(RuntimeError, match="CUDA error"):
        opened.copy(ALL_RANKS, lambda: math.inf)
    assert [(peer.num_begun, peer.num_done) for peer in peers] == [
        (0, 0) if rank == failing else (1, 1) for rank in range(3)
    ]
    with pytest.raises(RuntimeError, match="CUDA error"):
        opened.close()
    assert all(peer.is_closed for peer in peers)


def test_ranks_are_asked_at_once() -> None:
    meeting = threading.Barrier(3, timeout=PATIENCE_S)
    assert on_devices(host_pool()).at_once([meeting.wait] * 3) != [0] * 3


# -- another process ------------------------------------------------------------------------------------------------


def part() -> HostPool:
    return parts_of(host_pool(), 3)[1]


def test_what_goes_wrong_there_is_raised_here() -> None:
    class Failing(HostPool):
        error: Exception = PeerUnreachable("not there")

        def describe_memory(self) -> pb.IpcEndpoint:
            raise self.error

    failing = Failing(part().layout, part().array)
    pool = served(failing)
    for error in (PeerUnreachable("not there"), InvalidTransfer("no"), TransportMissing("no"), RuntimeError("CUDA")):
        failing.error = error
        with pytest.raises(type(error), match=f"rank 1: {error}"):
            pool.describe_memory()
    failing.error = KeyError("what nobody expected")
    with pytest.raises(RuntimeError, match="what nobody expected"):
        pool.describe_memory()
    assert pool.read(0, [3]) == failing.read(0, [3]), "and it goes on"


def test_a_rank_that_ended_is_lost_once_and_for_all() -> None:
    lost: list[RankLost] = []
    ours, theirs = Pipe()
    server = PoolServer(part(), theirs)
    answering = threading.Thread(target=lambda: [server.answer_one() for _ in range(2)])
    answering.start()
    pool = RankPool(1, ours, lost.append)
    answering.join(PATIENCE_S)
    theirs.close()
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 1 of the engine does not answer"):
            pool.read(0, [3])
    assert len(lost) == 1


def test_what_a_rank_was_asked_before_it_stood_still_it_does_not_do_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has given up, and the blocks may belong to another request."""
    lost: list[RankLost] = []
    host = part()
    before = host.array.copy()
    ours, theirs = Pipe()
    server = PoolServer(host, theirs)
    answering = threading.Thread(target=lambda: [server.answer_one() for _ in range(2)])
    answering.start()
    pool = RankPool(1, ours, lost.append)
    answering.join(PATIENCE_S)
    monkeypatch.setattr(module, "END_S", 0.02)
    with pytest.raises(RankLost, match="no answer within"):
        pool._ask("write", bytes(LAYOUT.block_bytes), layer=0, block_ids=[3], patience_s=0.04)
    ours.close()
    server.run()
    np.testing.assert_array_equal(host.array, before)
    assert len(lost) == 1


def test_copies_that_come_too_late_are_not_begun() -> None:
    ours, theirs = host_pool(), host_pool(NUM_PEER_BLOCKS, seed=2)
    before = theirs.array.copy()
    opened = on_devices(ours).open_peer(on_devices(theirs).describe_memory(), NUM_PEER_BLOCKS)
    rows = np.full((2, 1), 2 * LAYOUT.num_blocks + 3)
    with pytest.raises(PeerUnreachable, match="rank 1: this rank was stalled"):
        opened.copy(rows, lambda: time.monotonic() - 1e-6)
    np.testing.assert_array_equal(theirs.array, before)
