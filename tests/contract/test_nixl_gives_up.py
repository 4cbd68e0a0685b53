"""What NIXL does with a write that is given up: with the real library, over TCP, where bytes wait in sockets."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import pytest
from nixl_marks import needs_nixl

from kv_transfer import HostPool, KVLayout, PeerUnreachable
from kv_transfer.errors import TransferError
from kv_transfer.nixl_agent import NixlAgent, RemotePool
from kv_transfer.transfer import Terms, Transfer

LAYOUT = KVLayout(num_layers=1, num_blocks=33, block_size=256, num_kv_heads=8, head_dim=128, dtype="bfloat16")
"""Blocks of a megabyte each."""
MANY = list(range(32))
"""More blocks than the sockets' buffers hold."""


def agent_of(name: str, byte: int) -> tuple[NixlAgent, npt.NDArray[np.uint8]]:
    array = np.full((1, LAYOUT.num_blocks, LAYOUT.block_bytes), byte, dtype=np.uint8)
    return NixlAgent(name, HostPool(LAYOUT, array)), array


def write(
    agent: NixlAgent,
    remote: RemotePool,
    blocks: list[int],
    *,
    patience_s: float = 30.0,
    late_at_s: Callable[[], float] = lambda: math.inf,
) -> TransferError | None:
    ended: Future[TransferError | None] = Future()
    terms = Terms(
        remote=remote, is_cancelled=lambda: False, late_at_s=late_at_s,
        on_end=lambda _, error: ended.set_result(error), patience_s=patience_s,
    )  # fmt: skip
    agent.post(Transfer(terms, 0, blocks, blocks))
    return ended.result(60)


def num_arrived(receiver: NixlAgent, theirs: npt.NDArray[np.uint8]) -> int:
    """How many bytes have arrived once the receiver has emptied its sockets."""
    before, now = -1, 0
    while now != before:
        for _ in range(200):  # each call makes the agent progress
            receiver.call(int).result(30)
        before, now = now, int(np.count_nonzero(theirs))
    return now


@needs_nixl
def test_what_was_not_sent_of_a_write_that_is_given_up_never_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A receiver that stands still reads nothing from its sockets, so the write waits at the sender. When the receiver
    goes on, the sender's next write must not first send what waited. UCX warns of what it had to forget, but not on
    stdout: who starts a worker may stop reading it after the first line, and a full pipe would stop the worker."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    receiver, theirs = agent_of("receiver", 0)
    sender, _ = agent_of("sender", 1)
    try:
        remote = sender.add_remote("receiver", receiver.describe(), LAYOUT.num_blocks).result(30)
        error = write(sender, remote, MANY, patience_s=0.5)
        assert isinstance(error, PeerUnreachable)
        receiver.enter_push()
        anew = sender.add_remote("receiver", receiver.describe(), LAYOUT.num_blocks).result(30)
        assert write(sender, anew, [32]) is None
        assert theirs[0, 32].all()
        assert np.count_nonzero(theirs[0, :32]) < 16 * LAYOUT.block_bytes
        printed = capfd.readouterr()
        assert "UCX" not in printed.out
        assert "UCX  WARN" in printed.err
    finally:
        sender.close()
        receiver.close()


@needs_nixl
def test_a_write_of_which_nothing_may_come_any_more_is_not_sent_on_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender stands still while the receiver reads all that has arrived and gives the blocks to others. The
    receiver reads only then: while the sender runs, it might read the whole write."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    receiver, theirs = agent_of("receiver", 0)
    sender, _ = agent_of("sender", 1)
    arrived: list[int] = []

    def stand_still() -> float:
        receiver.enter_push()
        arrived.append(num_arrived(receiver, theirs))
        return -math.inf

    try:
        receiver.enter_push()
        remote = sender.add_remote("receiver", receiver.describe(), LAYOUT.num_blocks).result(30)
        assert write(sender, remote, [32]) is None  # connected
        receiver.leave_push()
        receiver.call(int).result(30)  # it has taken note
        assert isinstance(write(sender, remote, MANY, late_at_s=stand_still), PeerUnreachable)
        assert [num_arrived(receiver, theirs)] == arrived
    finally:
        sender.close()
        receiver.close()
