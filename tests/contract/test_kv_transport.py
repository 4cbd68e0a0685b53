"""What every transport keeps: one suite over all of them, with real servers and real memory."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_peers import on_a_device, on_devices
from kv_harness import DEADLINE_S, LEASE_S, Cluster, Receiving, assert_moved, make_pool, over, until
from nixl_marks import NIXL

from kv_transfer import (
    CorruptTransfer,
    GrantGone,
    PeerUnreachable,
    TransferError,
)
from kv_transfer.transfer import Transfer
from protos import tandem_kv_transfer_pb2 as pb


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([3], [17]),
        (list(range(30)), list(range(5, 35))),
        ([9, 2, 3, 4, 28], [39, 0, 20, 21, 7]),
    ],
    ids=["single", "neighbours", "scattered"],
)
async def test_blocks_arrive(cluster: Cluster, receiving: Receiving, src: list[int], dst: list[int]) -> None:
    grant = receiving.receiver.issue("router", dst, 0)
    push = await cluster.push(grant, src)
    stats = await push.commit(4 * len(src) - 1, 42, src)
    assert_moved(cluster, receiving, src, dst)
    (committed,) = receiving.committed
    assert (committed[0].grant_id, committed[0].block_ids, committed[1:]) == (
        grant.grant_id, tuple(dst), (42, 4 * len(src) - 1),
    )  # fmt: skip
    assert receiving.freed == []
    assert receiving.receiver.num_grants == 0
    layout = cluster.source.layout
    assert stats.transport == cluster.transport
    assert stats.num_bytes == len(src) * layout.block_bytes * layout.num_layers
    assert (stats.num_blocks, stats.num_cached_blocks) == (len(src), 0)
    assert stats.push_ms >= stats.commit_ms > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
async def test_blocks_travel_between_devices(cluster: Cluster, dtype: str) -> None:
    cluster.source = make_pool(30, seed=7, dtype=dtype)
    receiving = await cluster.add_receiving(wrap=on_a_device, dtype=dtype)
    push = await cluster.make_sender(on_a_device(cluster.source)).open(receiving.receiver.issue("router", [9, 4], 0))
    for layer in range(cluster.source.layout.num_layers):
        push.write(layer, 0, [3, 7])
    await push.commit(8, 42, [3, 7])
    assert_moved(cluster, receiving, [3, 7], [9, 4])


@over("grpc", "ipc", "local", NIXL)
async def test_blocks_travel_between_as_many_devices(cluster: Cluster) -> None:
    """Two layers on each of three. What is damaged in a block of the second one is noticed, and pushed again."""
    cluster.source = make_pool(30, seed=7, num_layers=6)
    receiving = await cluster.add_receiving(wrap=on_devices, num_layers=6)
    sender = cluster.make_sender(on_devices(cluster.source))
    push = await sender.open(receiving.receiver.issue("router", [9, 4], 0))
    for layer in range(6):
        push.write(layer, 0, [3, 7])
    await push._writer.drain()
    assert_moved(cluster, receiving, [3, 7], [9, 4])
    receiving.pool.array[3, 4, 17] ^= 1
    await push.commit(8, 42, [3, 7])
    assert sender.num_repaired_blocks == 1
    assert_moved(cluster, receiving, [3, 7], [9, 4])


async def test_cached_prefix_stays_untouched(cluster: Cluster, receiving: Receiving) -> None:
    src, dst = [4, 5, 6, 7], [10, 3, 30, 31]
    grant = receiving.receiver.issue("router", dst, 2)
    push = await cluster.push(grant, src)
    stats = await push.commit(16, 1, src)
    assert_moved(cluster, receiving, src[2:], dst[2:])
    assert (stats.num_blocks, stats.num_cached_blocks) == (2, 2)


@over("grpc", NIXL, *(pytest.param(each, marks=pytest.mark.slow) for each in ("ipc", "local")))
async def test_a_receiver_with_much_to_do_is_late_and_not_dead(cluster: Cluster) -> None:
    """It takes over after three leases: the sender waits as long as the connection lives."""
    receiving = await cluster.add_receiving(lease_s=1.0)
    receiving.taking_s = 3.0
    await cluster.push_and_commit(receiving.receiver.issue("router", [4, 9], 0), [3, 1])
    assert [grant.block_ids for grant, _, _ in receiving.committed] == [(4, 9)]


async def test_all_cached_needs_no_push(cluster: Cluster, receiving: Receiving) -> None:
    push = await cluster.push(receiving.receiver.issue("router", [1, 2], 2), [1, 2])
    stats = await push.commit(8, 1, [1, 2])
    assert stats.num_bytes == 0
    assert len(receiving.committed) == 1


async def test_layers_and_chunks_in_any_order(cluster: Cluster, receiving: Receiving) -> None:
    src, dst = [1, 8, 5, 6, 20], [2, 4, 6, 8, 10]
    push = await cluster.sender.open(receiving.receiver.issue("router", dst, 1))
    for layer in (2, 0, 1):
        push.write(layer, 3, src[3:])
        await asyncio.sleep(0)
        push.write(layer, 0, src[:3])
    await push.commit(20, 1, src)
    assert_moved(cluster, receiving, src[1:], dst[1:])


async def test_two_grants_at_once(cluster: Cluster, receiving: Receiving) -> None:
    pairs = [([1, 2, 3], [4, 5, 6]), ([7, 8, 9], [1, 3, 2])]
    grants = [receiving.receiver.issue("router", dst, 0) for _, dst in pairs]
    pushes = [await cluster.sender.open(grant) for grant in grants]
    for layer in range(3):
        for push, (src, _) in zip(pushes, pairs, strict=True):
            push.write(layer, 0, src)
    await asyncio.gather(*(push.commit(12, 1, src) for push, (src, _) in zip(pushes, pairs, strict=True)))
    assert_moved(cluster, receiving, pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1])
    assert len(receiving.committed) == 2


async def test_two_receivers(cluster: Cluster, receiving: Receiving) -> None:
    other = await cluster.add_receiving(incarnation="d-2", num_blocks=12)
    for each in (receiving, other):
        push = await cluster.push(each.receiver.issue("router", [11], 0), [3])
        await push.commit(4, 1, [3])
        assert_moved(cluster, each, [3], [11])


async def test_damaged_block_is_repaired(cluster: Cluster, receiving: Receiving) -> None:
    src, dst = [3, 4], [7, 9]
    push = await cluster.push(receiving.receiver.issue("router", dst, 0), src)
    await push._writer.drain()
    receiving.pool.array[1, 9, 5] ^= 0x10
    await push.commit(8, 1, src)
    assert_moved(cluster, receiving, src, dst)
    assert receiving.receiver.counters.num_mismatched_blocks == 1
    assert cluster.sender.num_repaired_blocks == 1
    assert len(receiving.committed) == 1


async def test_block_sent_before_it_was_final_is_repaired(cluster: Cluster, receiving: Receiving) -> None:
    push = await cluster.push(receiving.receiver.issue("router", [7], 0), [3])
    await push._writer.drain()
    cluster.source.array[2, 3, 0] ^= 0xFF
    await push.commit(4, 1, [3])
    assert_moved(cluster, receiving, [3], [7])
    assert cluster.sender.num_repaired_blocks == 1


async def test_damage_beyond_repair(cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = receiving.pool.digests

    def damaging_digests(block_ids: Any) -> Any:
        receiving.pool.array[0, 7, 0] ^= 1  # a memory cell that never keeps what it is given
        return digests(block_ids)

    monkeypatch.setattr(receiving.pool, "digests", damaging_digests)
    grant = receiving.receiver.issue("router", [6, 7], 0)
    push = await cluster.push(grant, [3, 4])
    with pytest.raises(CorruptTransfer, match="1 blocks"):
        await push.commit(8, 1, [3, 4])
    assert receiving.receiver.counters.num_mismatched_blocks == 3
    assert receiving.committed == []
    receiving.receiver.revoke(grant.grant_id)
    await until(receiving.has_freed)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


async def test_commit_is_idempotent(cluster: Cluster, receiving: Receiving) -> None:
    push = await cluster.push(receiving.receiver.issue("router", [6, 7], 0), [3, 4])
    digests = await cluster.sender.digests([3, 4])
    await push._writer.drain()
    answers = await asyncio.gather(*(push._send_commit(8, 1, digests) for _ in range(5)))
    answers.append(await push._send_commit(8, 1, digests))
    assert {answer.outcome for answer in answers} == {answers[0].COMMITTED}
    assert len(receiving.committed) == 1
    await push.commit(8, 1, [3, 4])
    assert len(receiving.committed) == 1


async def test_request_that_is_not_wanted_any_more(cluster: Cluster, receiving: Receiving) -> None:
    receiving.is_wanted = False
    push = await cluster.push(receiving.receiver.issue("router", [6], 0), [3])
    with pytest.raises(GrantGone):
        await push.commit(4, 1, [3])
    assert len(receiving.committed) == 1
    assert receiving.freed == []  # on_commit took the blocks


async def test_commit_after_revoke(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.push(grant, [3])
    await push._writer.drain()
    receiving.receiver.revoke(grant.grant_id)
    with pytest.raises(GrantGone):
        await push.commit(4, 1, [3])
    assert receiving.committed == []
    await until(receiving.has_freed)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


async def test_revoke_while_it_is_verified(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = receiving.pool.digests
    grant = receiving.receiver.issue("router", [6], 0)
    loop = asyncio.get_running_loop()

    def revoking_digests(block_ids: Any) -> Any:
        found = digests(block_ids)
        revoked = asyncio.run_coroutine_threadsafe(revoke(), loop)
        revoked.result(DEADLINE_S)
        return found

    async def revoke() -> None:
        receiving.receiver.revoke(grant.grant_id)

    monkeypatch.setattr(receiving.pool, "digests", revoking_digests)
    push = await cluster.push(grant, [3])
    with pytest.raises(GrantGone):
        await push.commit(4, 1, [3])
    assert receiving.committed == []
    await until(receiving.has_freed)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


@over("grpc", "local")  # one-sided writes are held off by quarantine, not dropped
async def test_late_write_is_dropped_and_counted(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6, 8], 0)
    push = await cluster.sender.open(grant)
    receiving.receiver.revoke(grant.grant_id)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]
    again = receiving.receiver.issue("router", [8, 6], 0)  # the same blocks, to somebody else
    push.write(0, 0, [3, 4])
    with pytest.raises(GrantGone):
        await push.commit(8, 1, [3, 4])
    assert not receiving.pool.array.any()
    assert receiving.receiver.counters.num_late_writes == 2
    assert receiving.committed == []
    other = await cluster.push(again, [10, 11])
    await other.commit(8, 1, [10, 11])
    assert_moved(cluster, receiving, [10, 11], [8, 6])


@over("grpc")  # others have no writes on their way when the grant ends
async def test_sender_stops_when_it_is_told(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6, 8], 0)
    push = await cluster.sender.open(grant)
    receiving.receiver.revoke(grant.grant_id)
    push.write(0, 0, [3, 4])
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while receiving.receiver.counters.num_late_writes < 2:
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the word travels; if it came later, more would be counted than is sent below
    for _ in range(20):
        push.write(1, 0, [3, 4])
    with pytest.raises(GrantGone):
        await push.commit(8, 1, [3, 4])
    assert receiving.receiver.counters.num_late_writes == 2


async def test_open_after_revoke(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    receiving.receiver.revoke(grant.grant_id)
    assert len(receiving.freed) == 1  # nobody could have begun to write
    if cluster.transport in ("ipc", "nixl"):
        with pytest.raises(GrantGone):  # before anything could be written
            await cluster.sender.open(grant)
    else:
        with pytest.raises(GrantGone):
            await cluster.push_and_commit(grant, [3])
    assert not receiving.pool.array.any()


async def test_abandon_ends_a_push(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.push(grant, [3])
    await push._writer.drain()
    receiving.receiver.revoke(grant.grant_id)
    assert len(receiving.freed) == (0 if cluster.transport in ("ipc", "nixl") else 1)
    await push.abandon()
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]
    push.write(0, 0, [3])
    await push.abandon()


@over("ipc", NIXL)  # only one-sided pushes are waited for
async def test_abandon_reaches_a_receiver_that_lost_the_stream(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.push(grant, [3])
    await push._writer.drain()
    push._writer._stream.cancel()  # type: ignore[attr-defined]
    receiving.receiver.revoke(grant.grant_id)
    push.write(1, 0, [3])
    with pytest.raises(PeerUnreachable, match=r"stream .* broke"):
        await push._writer.drain()
    await asyncio.wait_for(push.abandon(), LEASE_S / 2)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


@over("ipc")
async def test_a_commit_does_not_wait_for_the_end_of_its_stream(cluster: Cluster, receiving: Receiving) -> None:
    await cluster.push_and_commit(receiving.receiver.issue("router", [6], 0), [3])
    (kept,) = cluster.sender.links._kept.values()
    assert kept.num_users == 1
    await asyncio.wait(cluster.sender._background)
    assert kept.num_users == 0


@over(NIXL)
async def test_whoever_has_not_failed_is_pushed_to_after_an_agent_was_let_go(
    cluster: Cluster, receiving: Receiving
) -> None:
    await cluster.push_and_commit(receiving.receiver.issue("router", [6], 0), [3])
    agent = cluster.sender._transport._agent  # type: ignore[attr-defined]
    await asyncio.wrap_future(agent.call(lambda: agent._let_go_of_agent("another peer hangs")))
    await cluster.push_and_commit(receiving.receiver.issue("router", [7], 0), [5])
    assert_moved(cluster, receiving, [3, 5], [6, 7])


@over(NIXL)  # the others never poll
async def test_nothing_polls_once_pushes_have_ended(cluster: Cluster, receiving: Receiving) -> None:
    for _ in range(3):
        await cluster.push_and_commit(receiving.receiver.issue("router", [6], 0), [3])
    if cluster.sender._background:  # their streams end when they are committed already
        await asyncio.wait(cluster.sender._background)
    for owner in (cluster.sender._transport, receiving.receiver._endpoint):
        agent = owner._agent  # type: ignore[attr-defined]
        assert await asyncio.wrap_future(agent.call(agent._patience_s)) is None


@over("grpc", "ipc", NIXL)  # the local one has no connection
@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_connection_that_is_closed_under_a_push_is_an_unreachable_peer(
    cluster: Cluster, receiving: Receiving, is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process has taken the peer's address. It must not pass for a cancellation of the caller."""
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


async def test_abandoned_grant_takes_another_sender(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    await (await cluster.push(grant, [3])).abandon()
    assert receiving.freed == []
    push = await cluster.push(grant, [5])
    await push.commit(4, 1, [5])
    assert_moved(cluster, receiving, [5], [6])


async def test_lease_ends_with_its_owners_silence(cluster: Cluster) -> None:
    receiving = await cluster.add_receiving(lease_s=0.4)
    silent = receiving.receiver.issue("silent", [1], 0)
    receiving.receiver.issue("alive", [2], 0)
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not receiving.has_freed.is_set():
        assert asyncio.get_running_loop().time() < deadline_s
        receiving.receiver.renew("alive")
        await asyncio.sleep(0.05)
    assert [freed.grant_id for freed in receiving.freed] == [silent.grant_id]
    assert receiving.receiver.counters.num_expired_leases == 1
    receiving.receiver.drop_owner("alive")
    assert [freed.block_ids for freed in receiving.freed] == [(1,), (2,)]
    assert receiving.receiver.counters.num_expired_leases == 1


@over("ipc", NIXL)  # others ask the receiver with every write
async def test_a_sender_that_stood_still_writes_no_more(cluster: Cluster) -> None:
    """Stopped for three quarters of a lease, it finds writes to be made and a stream that it thinks is whole, while the
    receiver has taken it for dead and given the blocks to others."""
    receiving = await cluster.add_receiving(lease_s=0.8)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 7], 0))
    push.write(0, 0, [3, 4])
    await push._writer.drain()
    assert receiving.pool.array[0].any()
    may_go_on = threading.Event()
    calls = cluster.sender._transport._agent._calls  # type: ignore[attr-defined]
    calls.put(lambda: may_go_on.wait(DEADLINE_S))
    push.write(1, 0, [3, 4])
    time.sleep(0.7)  # noqa: ASYNC251 - all of the process, the event loop included
    may_go_on.set()
    for _ in range(2):  # the agent's thread goes on first; between two calls it begins what waits
        has_come = threading.Event()
        calls.put(has_come.set)
        assert has_come.wait(DEADLINE_S)
    assert not receiving.pool.array[1].any()
    push.write(2, 0, [3, 4])
    with pytest.raises(PeerUnreachable, match=r"stood still for more than 0\.75 of a lease of 800 ms"):
        await push.commit(8, 1, [3, 4])
    assert not receiving.pool.array[1:].any()
    receiving.receiver.drop_owner("router")
    await until(receiving.has_freed)
    await cluster.push_and_commit(receiving.receiver.issue("router", [6, 7], 0), [3, 4])  # the next one is good again


@over("ipc", NIXL)
async def test_blocks_are_not_free_when_a_write_to_them_failed_that_may_still_arrive(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that was to take a write back may have it in a socket: the receiver is told nothing, and waits, and
    reads on meanwhile."""
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
    """It may be let in, be stopped, and read so a lease later, when its blocks are somebody else's."""
    grant = receiving.receiver.issue("router", [6, 7], 0)
    grant.lease_ms = 800
    await (await cluster.sender.open(grant)).abandon()  # connected
    attach = receiving.receiver.attach

    def attach_and_stop(chunk: pb.PushChunk) -> int:
        attachment_id = attach(chunk)
        time.sleep(0.7)  # both are in this process
        return attachment_id

    monkeypatch.setattr(receiving.receiver, "attach", attach_and_stop)
    with pytest.raises(PeerUnreachable, match="stood still"):
        await cluster.sender.open(grant)
    receiving.receiver.drop_owner("router")
    await until(receiving.has_freed)


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
    if not isinstance(result, TransferError):  # it connected again before
        await result.abandon()


@over("ipc", NIXL)
async def test_a_receiver_that_is_gone_is_forgotten_though_nobody_pushes(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays mapped as long as the connection is kept."""
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
    """A lease long enough that a busy machine does not stand still for three quarters of it."""
    receiving = await cluster.add_receiving(lease_s=1.6)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 7], 0))
    for layer in range(3):
        push.write(layer, 0, [3, 4])
        await asyncio.sleep(0.6)  # the prompt's next layer is computed
        receiving.receiver.renew("router")
    await push.commit(8, 1, [3, 4])
    assert_moved(cluster, receiving, [3, 4], [6, 7])


@over("ipc")  # of NIXL's nobody knows how far it has come
async def test_a_write_that_a_standstill_interrupts_is_not_finished(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.host_pool.MAX_PIECE_BYTES", 1)
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 20, 9], 0))
    writer = push._writer
    asked = iter([False])  # before the first of three pieces; then the clock has gone on

    def has_stood_still() -> bool:
        return threading.current_thread() is not threading.main_thread() and next(asked, True)

    monkeypatch.setattr(writer, "_terms", replace(writer._terms, is_cancelled=lambda: False))
    monkeypatch.setattr(writer, "_has_stood_still", has_stood_still)
    push.write(0, 0, [3, 14, 27])
    await writer.drain()
    np.testing.assert_array_equal(receiving.pool.array[0, 6], cluster.source.array[0, 3])
    assert not receiving.pool.array[0, [20, 9]].any()
    await push.abandon()
