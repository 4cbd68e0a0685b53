"""The thread that copies into peers' pools: which transfers it joins, in which order, and how each transfer ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_transfer import HostPool, KVLayout, PeerUnreachable, TransferError
from kv_transfer import copy_agent as module
from kv_transfer.copy_agent import CopyAgent, OpenedPool
from kv_transfer.pool import PeerPool, Rows
from kv_transfer.transfer import Terms, Transfer
from protos import tandem_kv_transfer_pb2 as pb

LAYOUT = KVLayout(num_layers=3, num_blocks=10, block_size=4, num_kv_heads=1, head_dim=8, dtype="bfloat16")
NUM_PEER_BLOCKS = 20
DEADLINE_S = 10.0


class Copy:
    """A copy of a device, which is done when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.may_end.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error


@dataclass
class Peer:
    """A peer's pool that records what is copied there."""

    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)
    late_at_s: list[Callable[[], float]] = field(default_factory=list)
    begun: list[Copy] = field(default_factory=list)
    has_begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    refuses: Exception | None = None
    fails: Exception | None = None
    is_closed: threading.Event = field(default_factory=threading.Event)

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copy:
        if self.refuses is not None:
            raise self.refuses
        src_rows, dst_rows = rows_2R.tolist()
        self.copies.append((src_rows, dst_rows))
        self.late_at_s.append(late_at_s)
        self.begun.append(Copy(self.fails))
        self.has_begun.release()
        return self.begun[-1]

    def close(self) -> None:
        self.is_closed.set()

    def until_begun(self, num_copies: int) -> None:
        for _ in range(num_copies):
            assert self.has_begun.acquire(timeout=DEADLINE_S)


class DevicePool(HostPool):
    """Opens peers of the test, whose copies are done when the test says so."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, np.zeros((3, 10, LAYOUT.block_bytes), dtype=np.uint8))
        self.memory = "VRAM"
        self.peers: list[Peer] = []

    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        if endpoint.pool_bytes == 0:
            raise PeerUnreachable("not there")
        self.peers.append(Peer())
        return self.peers[-1]


class Ends:
    """How each transfer ended, by name."""

    def __init__(self) -> None:
        self.of: dict[str, TransferError | None] = {}
        self._changed = threading.Condition()

    def tell(self, name: str, error: TransferError | None) -> None:
        with self._changed:
            assert name not in self.of, "ended twice"
            self.of[name] = error
            self._changed.notify_all()

    def until(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(name in self.of for name in names), DEADLINE_S), self.of


class Stage:
    def __init__(self) -> None:
        self.pool = DevicePool()
        self.agent = CopyAgent(self.pool, 128 << 20)
        self.ends = Ends()
        self.is_cancelled = threading.Event()

    def opening(self, pool_bytes: int) -> Future[OpenedPool]:
        endpoint = pb.IpcEndpoint(pool_bytes=pool_bytes)
        return self.agent.open(lambda: self.pool.open_peer(endpoint, NUM_PEER_BLOCKS), NUM_PEER_BLOCKS)

    def open(self) -> tuple[Peer, OpenedPool]:
        opened = self.opening(1).result(DEADLINE_S)
        return self.pool.peers[-1], opened

    def post(self, name: str, opened: OpenedPool, layer: int, src: list[int], dst: list[int]) -> None:
        terms = Terms(
            remote=opened,
            is_cancelled=self.is_cancelled.is_set,
            late_at_s=lambda: math.inf,
            on_end=lambda _, error: self.ends.tell(name, error),
            patience_s=1.0,
        )
        self.agent.post(Transfer(terms, layer, src, dst))

    def hold_thread(self) -> threading.Event:
        """The agent waits until the event is set, and then finds all that was posted meanwhile at once."""
        may_go_on = threading.Event()
        self.agent._calls.put(lambda: may_go_on.wait(DEADLINE_S))
        return may_go_on


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for peer in stage.pool.peers:
        for copy in peer.begun:
            copy.may_end.set()
    stage.agent.close()


def test_what_waits_for_one_pool_is_one_copy(stage: Stage) -> None:
    peer, opened = stage.open()
    other_peer, other = stage.open()
    may_go_on = stage.hold_thread()
    stage.post("a", opened, 0, [3, 4], [7, 9])
    stage.post("b", opened, 2, [3], [0])
    stage.post("c", other, 1, [5], [6])
    stage.post("d", opened, 1, [1], [2])
    may_go_on.set()
    peer.until_begun(2)
    other_peer.until_begun(1)
    assert peer.copies == [([3, 4, 23], [7, 9, 40]), ([11], [22])]  # a row is layer * blocks + block, in either pool
    assert other_peer.copies == [([15], [26])]
    assert stage.ends.of == {}  # the copies have begun, but are not done
    peer.begun[0].may_end.set()
    stage.ends.until("a", "b")
    assert set(stage.ends.of) == {"a", "b"}
    for copy in (*other_peer.begun, *peer.begun):
        copy.may_end.set()
    stage.ends.until("c", "d")
    assert set(stage.ends.of.values()) == {None}


def test_layers_of_several_prompts_come_in_turn_and_go_together(stage: Stage) -> None:
    peer, opened = stage.open()
    prompts = ([3, 4], [7, 9]), ([0], [1])
    may_go_on = stage.hold_thread()
    for layer in range(3):
        for number, (src, dst) in enumerate(prompts):
            stage.post(f"{number} {layer}", opened, layer, src, dst)
    may_go_on.set()
    peer.until_begun(1)
    peer.begun[0].may_end.set()
    stage.ends.until("0 2", "1 2")
    (rows,) = peer.copies
    num_blocks = LAYOUT.num_blocks, NUM_PEER_BLOCKS
    assert set(zip(*rows, strict=True)) == {
        (layer * num_blocks[0] + src, layer * num_blocks[1] + dst)
        for layer in range(3)
        for ids in prompts
        for src, dst in zip(*ids, strict=True)
    }


def test_a_copy_has_a_largest_size_and_the_device_a_most_to_do(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    block = LAYOUT.block_bytes
    monkeypatch.setattr(stage.agent, "_max_bytes_at_once", 2 * block)
    monkeypatch.setitem(module.MAX_BYTES_IN_FLIGHT, "VRAM", 4 * block)
    peer, opened = stage.open()
    may_go_on = stage.hold_thread()
    for name in "abcdefg":
        stage.post(name, opened, 0, [1], [ord(name) - ord("a")])
    may_go_on.set()
    peer.until_begun(2)
    peer.begun[0].may_end.set()
    peer.until_begun(1)
    assert [dst for _, dst in peer.copies] == [[0, 1], [2, 3], [4, 5]]
    for number in (1, 2):
        peer.begun[number].may_end.set()
    peer.until_begun(1)
    peer.begun[3].may_end.set()
    stage.ends.until(*"abcdefg")
    assert [dst for _, dst in peer.copies] == [[0, 1], [2, 3], [4, 5], [6]]


def test_what_nobody_wants_any_more_is_not_begun(stage: Stage) -> None:
    peer, opened = stage.open()
    stage.is_cancelled.set()
    stage.post("a", opened, 0, [1], [2])
    stage.ends.until("a")
    assert (stage.ends.of["a"], peer.copies) == (None, [])


@pytest.mark.parametrize("when", ["refuses", "fails"])
def test_a_device_that_fails_ends_its_copies_alone(stage: Stage, when: str) -> None:
    bad_peer, bad = stage.open()
    good_peer, good = stage.open()
    setattr(bad_peer, when, RuntimeError("CUDA error"))
    stage.post("bad", bad, 0, [1], [2])
    stage.post("good", good, 0, [1], [2])
    good_peer.until_begun(1)
    for copy in (*bad_peer.begun, *good_peer.begun):
        copy.may_end.set()
    stage.ends.until("bad", "good")
    error = stage.ends.of["bad"]
    assert isinstance(error, PeerUnreachable)
    assert "CUDA error" in str(error)
    assert stage.ends.of["good"] is None


def test_a_pool_is_closed_when_nothing_is_copied_there_any_more(stage: Stage) -> None:
    opening = stage.opening(1)
    opened = opening.result(DEADLINE_S)
    (peer,) = stage.pool.peers
    stage.post("under way", opened, 0, [1], [2])
    peer.until_begun(1)
    may_go_on = stage.hold_thread()
    stage.post("waiting", opened, 0, [3], [4])
    stage.agent.release(opening)
    peer.begun[0].may_end.set()
    assert not peer.is_closed.is_set()
    may_go_on.set()
    assert peer.is_closed.wait(DEADLINE_S)
    stage.ends.until("under way", "waiting")
    assert stage.ends.of["under way"] is None
    assert isinstance(stage.ends.of["waiting"], PeerUnreachable)
    assert peer.copies == [([1], [2])]


def test_a_pool_whose_opener_left_meanwhile_is_closed(stage: Stage) -> None:
    may_go_on = stage.hold_thread()
    never, opened, failed = (stage.opening(number) for number in (1, 1, 0))
    assert never.cancel()
    for opening in (never, opened, failed):
        stage.agent.release(opening)
    may_go_on.set()
    assert isinstance(failed.exception(DEADLINE_S), PeerUnreachable)
    (peer,) = stage.pool.peers  # the cancelled opening was never begun
    assert peer.is_closed.wait(DEADLINE_S)


def test_closing_waits_for_what_is_under_way_and_ends_the_rest() -> None:
    stage = Stage()
    peer, opened = stage.open()
    stage.post("under way", opened, 0, [1], [2])
    peer.until_begun(1)
    may_go_on = stage.hold_thread()
    stage.post("waiting", opened, 0, [3], [4])
    closing = threading.Thread(target=stage.agent.close)
    closing.start()
    may_go_on.set()
    peer.begun[0].may_end.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert stage.ends.of["under way"] is None
    assert isinstance(stage.ends.of["waiting"], PeerUnreachable)


def test_a_copy_is_late_when_the_first_of_its_transfers_has_no_patience_any_more(stage: Stage) -> None:
    """Even while the process is well: over a network a copy may never end."""
    peer, opened = stage.open()
    before_s = time.monotonic()
    stage.post("patient for 1 s", opened, 0, [1], [2])
    peer.until_begun(1)
    assert before_s + 1.0 <= peer.late_at_s[0]() <= time.monotonic() + 1.0
    peer.begun[0].may_end.set()
    stage.ends.until("patient for 1 s")
