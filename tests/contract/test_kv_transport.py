"""What every transport keeps: one suite over grpc, nixl and local, with real servers and real memory."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from kv_harness import DEADLINE_S, LEASE_S, Cluster, Receiving, make_pool, running_cluster, until
from ports import lasting_port

from kv_transfer import (
    CorruptTransfer,
    GrantGone,
    HostPool,
    IncompatiblePeer,
    InvalidTransfer,
    PeerUnreachable,
    TransportMissing,
    create_endpoint,
    create_sender,
)
from kv_transfer import base as kv_base
from worker_service.device_pool import DevicePool

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
NIXL = pytest.param("nixl", marks=needs_nixl)
TRANSPORTS = ["grpc", NIXL, "local"]


def over(*transports: object) -> pytest.MarkDecorator:
    """Of a test of what only some transports do."""
    return pytest.mark.parametrize("cluster", transports, indirect=True)


@pytest.fixture(params=TRANSPORTS)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with running_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
async def receiving(cluster: Cluster) -> Receiving:
    return await cluster.add_receiving()


def assert_moved(cluster: Cluster, receiving: Receiving, src: list[int], dst: list[int]) -> None:
    """Blocks `dst` hold what `src` hold, and no other block of the receiver was touched."""
    np.testing.assert_array_equal(receiving.pool.array[:, dst], cluster.source.array[:, src])
    others = np.delete(receiving.pool.array, dst, axis=1)
    assert not others.any()


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
    assert receiving.receiver.reserved_block_ids == []
    layout = cluster.source.layout
    assert stats.transport == cluster.transport
    assert stats.num_bytes == len(src) * layout.block_bytes * layout.num_layers
    assert (stats.num_blocks, stats.num_cached_blocks) == (len(src), 0)
    assert stats.push_ms > 0


def on_a_device(host: HostPool) -> DevicePool:
    """The same bytes, as numbers in the memory of a device that is a CPU."""
    numbers = torch.from_numpy(host.array).view(getattr(torch, host.layout.dtype))
    return DevicePool(host.layout, numbers, lambda _, block_ids: host.digests(block_ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
async def test_blocks_travel_between_devices(cluster: Cluster, dtype: str) -> None:
    cluster.source = make_pool(30, seed=7, dtype=dtype)
    receiving = await cluster.add_receiving(wrap=on_a_device, dtype=dtype)
    push = await cluster.make_sender(on_a_device(cluster.source)).open(receiving.receiver.issue("router", [9, 4], 0))
    for layer in range(cluster.source.layout.num_layers):
        push.write(layer, 0, [3, 7])
    await push.commit(8, 42, [3, 7])
    assert_moved(cluster, receiving, [3, 7], [9, 4])


async def test_cached_prefix_stays_untouched(cluster: Cluster, receiving: Receiving) -> None:
    src, dst = [4, 5, 6, 7], [10, 3, 30, 31]
    grant = receiving.receiver.issue("router", dst, 2)
    push = await cluster.push(grant, src)
    stats = await push.commit(16, 1, src)
    assert_moved(cluster, receiving, src[2:], dst[2:])
    assert (stats.num_blocks, stats.num_cached_blocks) == (2, 2)


async def test_a_receiver_with_much_to_do_is_late_and_not_dead(cluster: Cluster) -> None:
    """It takes over after three leases: the sender waits as long as the connection lives."""
    receiving = await cluster.add_receiving(lease_s=0.2)
    receiving.taking_s = 0.6
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
    if cluster.transport == "nixl":
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
    assert len(receiving.freed) == (0 if cluster.transport == "nixl" else 1)
    await push.abandon()
    assert [freed.grant_id for freed in receiving.freed] == [grant.grant_id]
    push.write(0, 0, [3])
    await push.abandon()


@over(NIXL)  # only one-sided pushes are waited for
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


@over(NIXL)  # the others never poll
async def test_nothing_polls_once_pushes_have_ended(cluster: Cluster, receiving: Receiving) -> None:
    for _ in range(3):
        await cluster.push_and_commit(receiving.receiver.issue("router", [6], 0), [3])
    for owner in (cluster.sender._transport, receiving.receiver._endpoints["nixl"]):
        agent = owner._agent  # type: ignore[attr-defined]
        assert await asyncio.wrap_future(agent.call(agent._patience_s)) is None


@over("grpc", NIXL)  # the local one has no connection
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


async def test_restarted_receiver_is_not_the_one_that_granted(cluster: Cluster) -> None:
    receiving = await cluster.add_receiving(f"127.0.0.1:{lasting_port()}")
    old_grant = receiving.receiver.issue("router", [6], 0)
    await (await cluster.sender.open(old_grant)).abandon()
    await receiving.server.stop(0)
    again = await cluster.add_receiving(receiving.address, incarnation="d-2")
    new_grant = again.receiver.issue("router", [6], 0)
    assert (new_grant.grant_id, new_grant.epoch) == (old_grant.grant_id, old_grant.epoch)
    with pytest.raises((GrantGone, PeerUnreachable)):
        await cluster.push_and_commit(old_grant, [3])
    assert not again.pool.array.any()
    with pytest.raises(GrantGone, match="is now worker 'decode', incarnation 'd-2'"):
        await cluster.make_sender(cluster.source).open(old_grant)
    push = await cluster.push(new_grant, [5])
    await push.commit(4, 1, [5])
    assert_moved(cluster, again, [5], [6])


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"compat_digest": "other"}, "compat_digest: 'other' != 'same'"),
        ({"head_dim": 16}, "layout.*head_dim: 16 != 8|head_dim: 16 != 8"),
        ({"dtype": "float16", "num_layers": 5}, "num_layers: 5 != 3; dtype: 'float16' != 'bfloat16'"),
        ({"order": "layer block head kv dim slot"}, "order: 'layer block head kv dim slot' != "),
    ],
    ids=["compat", "shape", "two", "order"],
)
async def test_incompatible_peers_are_refused(cluster: Cluster, difference: dict[str, Any], named: str) -> None:
    receiving = await cluster.add_receiving(**difference)
    with pytest.raises(IncompatiblePeer, match=named):
        await cluster.sender.open(receiving.receiver.issue("router", [6], 0))
    same = await cluster.add_receiving(incarnation="d-2")
    await (await cluster.sender.open(same.receiver.issue("router", [6], 0))).abandon()


async def test_a_grant_of_another_worker_at_a_known_address_is_refused(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    await (await cluster.sender.open(grant)).abandon()
    stolen = type(grant).FromString(grant.SerializeToString())
    stolen.worker_id = "d-9"
    with pytest.raises(GrantGone, match=r"is now worker 'decode'.* not 'd-9'"):
        await cluster.sender.open(stolen)
    await (await cluster.sender.open(grant)).abandon()


async def test_sender_checks_for_itself(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving.receiver, "_differences", lambda _: [])  # a receiver that takes anybody
    grant = receiving.receiver.issue("router", [6], 0)
    stranger = cluster.make_sender(cluster.source, compat_digest="other")
    with pytest.raises(IncompatiblePeer, match="compat_digest: 'other' != 'same'"):
        await stranger.open(grant)
    other_shape = cluster.make_sender(make_pool(30, seed=1, head_dim=16))
    with pytest.raises(IncompatiblePeer, match="head_dim: 16 != 8"):
        await other_shape.open(grant)


async def test_other_protocol_is_refused(
    cluster: Cluster, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.sender.PROTOCOL_VERSION", kv_base.PROTOCOL_VERSION + 1)
    with pytest.raises(IncompatiblePeer, match="protocol_version: 1 != 2"):
        await cluster.sender.open(receiving.receiver.issue("router", [6], 0))


async def test_other_transport_is_refused(cluster: Cluster) -> None:
    other = "grpc" if cluster.transport != "grpc" else "local"
    receiving = Receiving(other)
    await receiving.start()
    cluster.receivings.append(receiving)
    cluster.local_receivers[receiving.address] = receiving.receiver
    with pytest.raises(IncompatiblePeer, match=f"transport: {other} is served, not '{cluster.transport}'"):
        await cluster.sender.open(receiving.receiver.issue("router", [6], 0))


async def test_nobody_there(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    await receiving.server.stop(0)
    del cluster.local_receivers[receiving.address]
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(cluster.sender.open(grant), DEADLINE_S)


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": ""},
        {"incarnation": "x" * 300},
        {"kv_address": ""},
        {"num_cached_blocks": 3},
        {"block_ids": [4, 4]},
        {"lease_ms": 0},
        {"lease_ms": 2**32 - 1},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_malformed_grant(cluster: Cluster, receiving: Receiving, change: dict[str, Any]) -> None:
    grant = receiving.receiver.issue("router", [6, 7], 0)
    for field, value in change.items():
        grant.ClearField(field)
        if isinstance(value, list):
            grant.block_ids.extend(value)
        else:
            setattr(grant, field, value)
    with pytest.raises(InvalidTransfer):
        await cluster.sender.open(grant)


async def test_write_outside_the_grant_is_the_callers_mistake(cluster: Cluster, receiving: Receiving) -> None:
    push = await cluster.sender.open(receiving.receiver.issue("router", [6, 7], 0))
    for layer, first_block, num_blocks in [(3, 0, 1), (-1, 0, 1), (0, 1, 2), (0, -1, 1)]:
        with pytest.raises(ValueError):
            push.write(layer, first_block, [0] * num_blocks)
    with pytest.raises(ValueError):
        await push.commit(8, 1, [0])
    await push.abandon()


async def test_grant_beyond_the_pool_is_refused(cluster: Cluster, receiving: Receiving) -> None:
    grant = receiving.receiver.issue("router", [6], 0)
    grant.block_ids[0] = 40
    with pytest.raises(InvalidTransfer):
        await cluster.push_and_commit(grant, [3])
    assert not receiving.pool.array.any()


def test_missing_nixl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    identity = kv_base.Identity(worker_id="a", incarnation="b", compat_digest="c")
    for create in (create_sender, create_endpoint):
        with pytest.raises(TransportMissing, match="extra `nixl`"):
            create("nixl", pool=make_pool(2, seed=None), identity=identity)
        with pytest.raises(ValueError, match="transport must be one of grpc, nixl"):
            create("carrier pigeon", pool=make_pool(2, seed=None), identity=identity)
