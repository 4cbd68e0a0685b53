"""Grants that end before their blocks are committed, over every transport: nothing more is written to these blocks, and
they are freed as soon as nothing can be written any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kv_harness import DEADLINE_S, LEASE_S, Cluster, Receiving, assert_moved, over, until
from nixl_marks import NIXL

from kv_transfer import GrantGone, InvalidTransfer, PeerUnreachable
from kv_transfer.transfer import Transfer
from protos import tandem_kv_transfer_pb2 as pb


async def test_request_that_is_not_wanted_any_more(cluster: Cluster, receiving: Receiving) -> None:
    receiving.is_wanted = False
    push = await cluster.push(receiving.receiver.issue("router", [6], 0), [3])
    with pytest.raises(GrantGone):
        await push.commit(4, 1, [3])
    assert len(receiving.committed) == 1
    assert receiving.freed == []  # on_commit took the blocks


async def test_who_asks_again_is_told_again_that_the_request_is_not_wanted(receiving: Receiving) -> None:
    """The first answer may have been lost."""
    receiving.is_wanted = False
    receiver = receiving.receiver
    grant = receiver.issue("router", [6], 1)
    commit = pb.CommitRequest(
        grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation, num_prompt_tokens=4, first_token_id=1
    )
    for _ in range(2):
        assert (await receiver.commit(commit)).outcome == pb.CommitResponse.GRANT_GONE
    assert len(receiving.committed) == 1


async def test_an_abandoned_push_gives_its_connection_back(cluster: Cluster, receiving: Receiving) -> None:
    """Once, however often it is abandoned. Else a connection to a worker that has gone would be kept for ever."""
    push = await cluster.push(receiving.receiver.issue("router", [6], 0), [3])
    assert push._kept.num_users == 1
    for _ in range(2):
        await push.abandon()
    assert push._kept.num_users == 0


async def test_a_receiver_that_misses_blocks_of_others_is_not_believed(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = await cluster.push(receiving.receiver.issue("router", [5, 6], 1), [2, 3])

    async def commit(_: pb.CommitRequest) -> pb.CommitResponse:
        return pb.CommitResponse(outcome=pb.CommitResponse.MISMATCH, mismatched_blocks=[6, 5])

    monkeypatch.setattr(receiving.receiver, "commit", commit)
    with pytest.raises(InvalidTransfer, match="answered a commit with"):
        await push.commit(8, 1, [2, 3])


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
    again = receiving.receiver.issue("router", [8, 6], 0)  # the same blocks, granted to somebody else
    push.write(0, 0, [3, 4])
    with pytest.raises(GrantGone):
        await push.commit(8, 1, [3, 4])
    assert not receiving.pool.array.any()
    assert receiving.receiver.table.counters.num_late_writes == 2
    assert receiving.committed == []
    other = await cluster.push(again, [10, 11])
    await other.commit(8, 1, [10, 11])
    assert_moved(cluster, receiving, [10, 11], [8, 6])


@over("grpc")  # over the others, no writes are in flight when the grant ends
async def test_sender_stops_when_it_is_told(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6, 8], 0)
    push = await cluster.sender.open(grant)
    receiving.receiver.revoke(grant.grant_id)
    push.write(0, 0, [3, 4])
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while receiving.receiver.table.counters.num_late_writes < 2:
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.01)
    # The notice reaches the sender meanwhile. If it came later, some of the writes below would be sent and counted.
    await asyncio.sleep(0.1)
    for _ in range(20):
        push.write(1, 0, [3, 4])
    with pytest.raises(GrantGone):
        await push.commit(8, 1, [3, 4])
    assert receiving.receiver.table.counters.num_late_writes == 2


async def test_open_after_revoke(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    receiving.receiver.revoke(grant.grant_id)
    assert len(receiving.freed) == 1  # at once, as no sender can have begun to write
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


@over("ipc", NIXL)
async def test_a_push_has_not_ended_before_each_of_its_transfers_has(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the transfers may still read our blocks and write the receiver's."""
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.sender.open(grant)
    transfers: list[Transfer] = []
    monkeypatch.setattr(push._writer, "_writer", SimpleNamespace(post=transfers.append))
    for layer in range(2):
        push.write(layer, 0, [3])
    receiving.receiver.revoke(grant.grant_id)
    abandon = asyncio.create_task(push.abandon())
    transfers[0].terms.on_end(1, None)
    await asyncio.wait([abandon], timeout=0.1)
    assert not abandon.done()
    assert not receiving.freed
    transfers[1].terms.on_end(1, None)
    await abandon
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


@over("ipc", NIXL)
async def test_a_transfer_that_waits_is_not_begun_once_the_stream_is_lost(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lease after the loss, the receiver gives the blocks to others."""
    push = await cluster.sender.open(receiving.receiver.issue("router", [6], 0))
    transfers: list[Transfer] = []
    monkeypatch.setattr(push._writer, "_writer", SimpleNamespace(post=transfers.append))
    push.write(0, 0, [3])
    [transfer] = transfers
    assert not transfer.terms.is_cancelled()
    push._writer._stream.cancel()  # type: ignore[attr-defined]
    assert transfer.terms.is_cancelled()
    transfer.terms.on_end(1, None)
    await push.abandon()


@over("ipc", NIXL)  # a receiver waits only for one-sided pushes
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
    assert receiving.receiver.table.counters.num_expired_leases == 1
    receiving.receiver.drop_owner("alive")
    assert [freed.block_ids for freed in receiving.freed] == [(1,), (2,)]
    assert receiving.receiver.table.counters.num_expired_leases == 1


@over("ipc")
async def test_blocks_are_freed_a_lease_after_their_sender_is_lost_though_nothing_else_was_to_expire(
    cluster: Cluster,
) -> None:
    """The timer of leases has nothing to wait for by then: the owner of the grant is gone, and there is no other."""
    receiving = await cluster.add_receiving(lease_s=0.2)
    receiver = receiving.receiver
    grant = receiver.issue("router", [6], 0)
    attachment_id = receiver.attach(
        pb.PushChunk(grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation)
    )
    receiver.drop_owner("router")
    async with asyncio.timeout(DEADLINE_S):
        while receiver._has_deadline.is_set():  # noqa: ASYNC110 - the timer has slept until the lease of the grant ended
            await asyncio.sleep(0.01)
    assert receiving.freed == [], "the sender may still write"
    receiver.sender_gone(grant.grant_id, attachment_id)
    await until(receiving.has_freed)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]


@over("ipc", NIXL)
@pytest.mark.parametrize("closes", [False, True])
async def test_a_sender_whose_stream_broke_says_that_it_has_ended_when_its_commit_fails(
    cluster: Cluster, receiving: Receiving, closes: bool
) -> None:
    """Else the receiver would keep the blocks for a lease. A sender that closes says it before."""
    grant = receiving.receiver.issue("router", [6], 0)
    push = await cluster.push(grant, [3])
    await push._writer.drain()
    push._writer._stream.cancel()  # type: ignore[attr-defined]
    async with asyncio.timeout(DEADLINE_S):
        while not receiving.receiver.table._lost:  # noqa: ASYNC110 - the receiver tells nobody
            await asyncio.sleep(0.01)
    receiving.receiver.revoke(grant.grant_id)
    with pytest.raises(GrantGone):
        await push.commit(4, 1, [3])
    if closes:
        cluster.senders.remove(cluster.sender)
        await cluster.sender.close()
    while cluster.sender._background:
        await asyncio.wait(cluster.sender._background)
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]
