"""Senders that stand still, and connections that end during a push, over every transport where this matters."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from kv_harness import DEADLINE_S, Cluster, Receiving, assert_moved, over, until
from nixl_marks import NIXL

from kv_transfer import PeerUnreachable, TransferError
from kv_transfer.transfer import Transfer
from protos import tandem_kv_transfer_pb2 as pb


@over("grpc", "ipc", NIXL)  # the local one has no connection
@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_connection_that_is_closed_under_a_push_is_an_unreachable_peer(
    cluster: Cluster, receiving: Receiving, is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when another process has taken the peer's address. The commit must not look as if its caller had
    been cancelled."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow_commit(*_: object) -> bool:
        has_begun.set()
        await may_end.wait()
        return True

    monkeypatch.setattr(receiving.receiver, "_on_commit", slow_commit)
    push = await cluster.push(receiving.receiver.issue("router", [6], 0), [3])
    commit = asyncio.create_task(push.commit(4, 1, [3]))
    if is_waiting:
        await until(has_begun)
    await push._link.close()
    await asyncio.wait([commit], timeout=DEADLINE_S)
    may_end.set()
    assert commit.done()
    assert not commit.cancelled()
    assert isinstance(commit.exception(), PeerUnreachable)


@over("ipc", NIXL)  # over the others, the receiver checks every write
async def test_a_sender_that_stood_still_writes_no_more(cluster: Cluster) -> None:
    """When a sender goes on after three quarters of a lease, it still has writes to make and its stream looks intact,
    but the receiver may have taken it for dead and given the blocks to others."""
    receiving = await cluster.add_receiving(lease_s=0.8)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 7], 0))
    push.write(0, 0, [3, 4])
    await push._writer.drain()
    assert receiving.pool.array[0].any()
    may_go_on = threading.Event()
    calls = cluster.sender._transport._agent._calls  # type: ignore[attr-defined]
    calls.put(lambda: may_go_on.wait(DEADLINE_S))
    push.write(1, 0, [3, 4])
    time.sleep(0.7)  # noqa: ASYNC251 - stops the whole process, the event loop included
    may_go_on.set()
    for _ in range(2):  # lets the agent's thread go on: between two calls it begins the writes that wait
        has_come = threading.Event()
        calls.put(has_come.set)
        assert has_come.wait(DEADLINE_S)
    assert not receiving.pool.array[1].any()
    push.write(2, 0, [3, 4])
    with pytest.raises(PeerUnreachable, match=r"was stalled for more than 0\.75 of a lease of 800 ms"):
        await push.commit(8, 1, [3, 4])
    assert not receiving.pool.array[1:].any()
    receiving.receiver.drop_owner("router")
    await until(receiving.has_freed)
    await cluster.push_and_commit(receiving.receiver.issue("router", [6, 7], 0), [3, 4])  # the next one is good again


@over("ipc", NIXL)
async def test_blocks_are_not_free_when_a_write_to_them_failed_that_may_still_arrive(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a write that was given up may still be in a socket: the sender does not tell the receiver that the
    push has ended, so the receiver waits, and keeps reading meanwhile."""
    receiving = await cluster.add_receiving(lease_s=0.8)
    has_left = asyncio.Event()
    leave_push = receiving.receiver._endpoint.leave_push

    def leave_and_say() -> None:
        leave_push()
        has_left.set()

    monkeypatch.setattr(receiving.receiver._endpoint, "leave_push", leave_and_say)
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.sender.open(grant)

    def fail(transfer: Transfer) -> None:
        transfer.terms.on_end(1, PeerUnreachable("a write took too long"))

    monkeypatch.setattr(push._writer, "_writer", SimpleNamespace(post=fail))
    push.write(0, 0, [3])
    with pytest.raises(PeerUnreachable, match="a write took too long"):
        await push.commit(4, 1, [3])
    receiving.receiver.revoke(grant.grant_id)
    await push.abandon()
    while cluster.sender._background:
        await asyncio.wait(cluster.sender._background)
    assert not receiving.freed
    assert not has_left.is_set()
    await until(receiving.has_freed)
    await until(has_left)


@over("ipc", NIXL)
async def test_a_sender_that_stood_still_while_it_was_let_in_does_not_begin(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender may be stopped right after the receiver let it in, and learn of it only a lease later, when its blocks
    belong to somebody else."""
    grant = receiving.receiver.issue("router", [6, 7], 0)
    grant.lease_ms = 2400
    await (await cluster.sender.open(grant)).abandon()  # connected
    attach = receiving.receiver.attach

    def attach_and_stop(chunk: pb.PushChunk) -> int:
        attachment_id = attach(chunk)
        time.sleep(2.1)  # stops both sides; a busy machine may need the rest of the lease
        return attachment_id

    monkeypatch.setattr(receiving.receiver, "attach", attach_and_stop)
    with pytest.raises(PeerUnreachable, match="was stalled"):
        await cluster.sender.open(grant)
    receiving.receiver.drop_owner("router")
    await until(receiving.has_freed)


@pytest.mark.one_in(2)
@over("ipc", NIXL)
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
async def test_a_connection_closed_while_a_push_begins_is_no_wait_for_ever(
    cluster: Cluster, receiving: Receiving, num_turns: int
) -> None:
    grant = receiving.receiver.issue("router", [6, 7], 0)
    grant.lease_ms = 500
    push = await cluster.sender.open(grant)
    opening = asyncio.create_task(cluster.sender.open(grant))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await push._link.close()
    await push.abandon()
    (result,) = await asyncio.wait_for(asyncio.gather(opening, return_exceptions=True), DEADLINE_S)
    if not isinstance(result, TransferError):  # it had connected again before the close
        await result.abandon()


@over("ipc", NIXL)
async def test_a_receiver_that_is_gone_is_forgotten_though_nobody_pushes(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's memory stays mapped as long as the sender keeps the connection."""
    await cluster.push_and_commit(receiving.receiver.issue("router", [6], 0), [3])
    (kept,) = cluster.sender.links._kept.values()
    has_closed = asyncio.Event()
    close = kept.link.close

    async def close_and_say() -> None:
        await close()
        has_closed.set()

    monkeypatch.setattr(kept.link, "close", close_and_say)
    await receiving.server.stop(0)
    await until(has_closed)
    assert not cluster.sender.links._kept


@over(pytest.param("ipc", marks=pytest.mark.slow), NIXL)
async def test_a_push_may_last_longer_than_a_lease(cluster: Cluster) -> None:
    """The lease is long enough that a busy machine does not stand still for three quarters of it."""
    receiving = await cluster.add_receiving(lease_s=1.6)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 7], 0))
    for layer in range(3):
        push.write(layer, 0, [3, 4])
        await asyncio.sleep(0.6)  # the prompt's next layer is computed
        receiving.receiver.renew("router")
    await push.commit(8, 1, [3, 4])
    assert_moved(cluster, receiving, [3, 4], [6, 7])


@over("ipc")  # nobody knows how far a write over NIXL has come
async def test_a_write_that_a_standstill_interrupts_is_not_finished(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.host_pool.MAX_PIECE_BYTES", 1)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 20, 9], 0))
    writer = push._writer
    asked = iter([False])  # before the first of three pieces; then always True

    def has_stood_still() -> bool:
        return threading.current_thread() is not threading.main_thread() and next(asked, True)

    monkeypatch.setattr(writer, "_terms", replace(writer._terms, is_cancelled=lambda: False))
    monkeypatch.setattr(writer, "_has_stood_still", has_stood_still)
    push.write(0, 0, [3, 14, 27])
    await writer.drain()
    np.testing.assert_array_equal(receiving.pool.array[0, 6], cluster.source.array[0, 3])
    assert not receiving.pool.array[0, [20, 9]].any()
    await push.abandon()
