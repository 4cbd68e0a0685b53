"""A copy is done when every rank has done it, and nothing waits for a rank that has ended. The ranks are threads
here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe

import pytest
import torch
from clusters import wait_until

from engine.running.executor import RankLost
from engine.running.host_copies import HostCopies
from engine.scheduling.offloading import BlockCopy
from engine.tensor_parallel.rank_copies import RankCopies, _to_bytes, follow_copies

SHAPE = (3, 40, 2, 2, 4, 8)
"""[layer, block, part, head, slot, dim]"""
NUM_HOST_BLOCKS = 40
END_S = 60.0


def pool_of(rank: int) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(rank))


class Ranks:
    """Three ranks: the copies of the first, and the other ranks' ends of its connections."""

    def __init__(self) -> None:
        pipes = [Pipe() for _ in range(2)]
        self.connections: list[Connection[bytes, bytes]] = [theirs for _, theirs in pipes]
        self.pools = [pool_of(rank) for rank in range(3)]
        self.copies = RankCopies(self.pools[0], NUM_HOST_BLOCKS, [ours for ours, _ in pipes])
        self.told = threading.Event()
        self.copies.on_done = self.told.set
        self.followers: list[HostCopies] = []

    def follow(self, rank: int, num_host_blocks: int = NUM_HOST_BLOCKS) -> None:
        follower = HostCopies(self.pools[rank], num_host_blocks)
        self.followers.append(follower)
        follow_copies(follower, self.connections[rank - 1])

    def done(self, number: int) -> list[BlockCopy]:
        taken: list[BlockCopy] = []
        while len(taken) < number:
            assert self.told.wait(END_S)
            self.told.clear()
            taken += self.copies.take_done()
        assert not self.copies.wait()
        return taken

    def close(self) -> None:
        self.copies.close()
        for each in self.followers:
            each.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with closing(Ranks()) as ranks:
        yield ranks
    assert not ranks.copies._reader.is_alive()
    assert not ranks.copies._thread.is_alive()


def save(block_id: int) -> BlockCopy:
    return BlockCopy(False, block_id, NUM_HOST_BLOCKS - 1 - block_id)


def load(block_id: int, saved: BlockCopy) -> BlockCopy:
    return BlockCopy(True, block_id, saved.host_block_id)


def test_each_rank_copies_its_own(ranks: Ranks) -> None:
    for rank in (1, 2):
        ranks.follow(rank)
    saves = [save(block_id) for block_id in range(20)]
    ranks.copies.begin(saves)
    assert sorted(ranks.done(20)) == saves
    loads = [load(39 - each.block_id, each) for each in saves]
    ranks.copies.begin(loads)
    assert sorted(ranks.done(20)) == sorted(loads)
    for rank, pool in enumerate(ranks.pools):
        assert torch.equal(pool[:, :20], pool_of(rank)[:, :20])
        assert torch.equal(pool[:, 20:], pool_of(rank)[:, :20].flip(1))


def test_a_copy_is_done_when_it_is_done_on_every_rank(ranks: Ranks) -> None:
    ranks.follow(1)
    ranks.copies.begin([save(0), save(1)])
    missing = {save(0): 1, save(1): 1}
    wait_until(lambda: ranks.copies._nums_missing == missing, END_S, "all but one have done it")
    assert not ranks.told.is_set()
    assert ranks.copies.take_done() == []
    ranks.follow(2)
    assert ranks.told.wait(END_S)
    assert sorted(ranks.done(2)) == [save(0), save(1)]


def test_nobody_waits_for_a_rank_that_has_ended(ranks: Ranks) -> None:
    ranks.follow(1)
    ranks.copies.begin([save(0)])
    ranks.connections[1].close()
    assert ranks.told.wait(END_S)
    for ask in (ranks.copies.wait, ranks.copies.take_done, lambda: ranks.copies.begin([save(1)])):
        with pytest.raises(RankLost):
            ask()


def test_what_is_done_afterwards_hides_no_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    monkeypatch.setattr(ranks.copies, "_copy", lambda copy: may_copy.wait(END_S))
    ranks.copies.begin([save(0)])
    for connection in ranks.connections:
        connection.send_bytes(_to_bytes([save(0)]))
    wait_until(lambda: ranks.copies._nums_missing == {save(0): 1}, END_S, "the others have done it")
    ranks.connections[0].close()
    assert ranks.told.wait(END_S)
    ranks.told.clear()
    may_copy.set()
    assert ranks.told.wait(END_S)
    with pytest.raises(RankLost):
        ranks.copies.take_done()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_cannot_copy_ends(when: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        assert status == 1
        with socket.socket(fileno=os.dup(ranks.connections[0].fileno())) as theirs:
            theirs.shutdown(socket.SHUT_RDWR)  # `close` would not end it: a thread reads
        raise SystemExit(status)  # ends this thread only: it shares rank 0's process

    monkeypatch.setattr(os, "_exit", end)
    ranks.follow(2)
    if when == "before":
        monkeypatch.setattr(HostCopies, "_beside_steps", fail)
        with suppress(SystemExit):
            ranks.follow(1)
    else:
        ranks.follow(1, num_host_blocks=4)
        ranks.copies.begin([save(0)])  # to a host block that this rank lacks
    assert ranks.told.wait(END_S)
    for ask in (ranks.copies.wait, ranks.copies.take_done):
        with pytest.raises(RankLost):
            ask()


def fail(_: object) -> None:
    raise RuntimeError("no stream")
