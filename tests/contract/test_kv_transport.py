"""What every transport guarantees: one suite over all of them, with real servers and real memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from device_peers import on_a_device, on_devices
from kv_harness import Cluster, Receiving, assert_moved, make_pool, over, until
from nixl_marks import NIXL

from kv_transfer import CorruptTransfer


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
    assert receiving.receiver.table.num_grants == 0
    layout = cluster.source.layout
    assert stats.transport == cluster.transport
    assert stats.num_bytes == len(src) * layout.block_bytes * layout.num_layers
    assert (stats.num_blocks, stats.num_cached_blocks) == (len(src), 0)
    assert stats.push_ms > stats.commit_ms > 0  # the push began before the commit


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
    """Each of three devices has two layers. Damage to a block on the second device is noticed and repaired."""
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
    """The receiver takes three leases to accept the commit; the sender waits as long as the connection lives."""
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
    assert receiving.receiver.table.counters.num_mismatched_blocks == 1
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
        receiving.pool.array[0, 7, 0] ^= 1  # a memory cell that never keeps its value
        return digests(block_ids)

    monkeypatch.setattr(receiving.pool, "digests", damaging_digests)
    grant = receiving.receiver.issue("router", [6, 7], 0)
    push = await cluster.push(grant, [3, 4])
    with pytest.raises(CorruptTransfer, match="1 blocks"):
        await push.commit(8, 1, [3, 4])
    assert receiving.receiver.table.counters.num_mismatched_blocks == 3
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
    if cluster.sender._background:  # the pushes' streams end after the commits
        await asyncio.wait(cluster.sender._background)
    for owner in (cluster.sender._transport, receiving.receiver._endpoint):
        agent = owner._agent  # type: ignore[attr-defined]
        assert await asyncio.wrap_future(agent.call(agent._patience_s)) is None
