"""First contact, over every transport: who may write to whom, and what a peer may claim about itself."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import pytest
from device_peers import on_devices
from kv_harness import DEADLINE_S, Cluster, Receiving, assert_moved, make_pool, over
from nixl_marks import needs_nixl
from ports import lasting_port

from kv_transfer import (
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
from protos import tandem_kv_transfer_pb2 as pb
from rpc.channel import open_kv_channel


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
    monkeypatch.setattr(receiving.receiver, "_differences", lambda _: [])  # a receiver that accepts anybody
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
    for create in (partial(create_sender, open_channel=open_kv_channel), create_endpoint):
        with pytest.raises(TransportMissing, match="extra `nixl`"):
            create("nixl", pool=make_pool(2, seed=None), identity=identity)
        with pytest.raises(ValueError, match="transport must be one of grpc, ipc, nixl"):
            create("carrier pigeon", pool=make_pool(2, seed=None), identity=identity)


def test_memory_of_this_process_alone_is_no_pool_for_ipc() -> None:
    pool = make_pool(2, seed=None)
    own = HostPool(pool.layout, pool.array.copy())
    with pytest.raises(TransportMissing, match="no other one can open it"):
        create_endpoint("ipc", pool=own, identity=kv_base.Identity(worker_id="a", incarnation="b", compat_digest="c"))


async def described(cluster: Cluster, receiving: Receiving) -> pb.ConnectResponse:
    """How the receiver describes itself to a compatible sender."""
    request = pb.ConnectRequest(
        protocol_version=kv_base.PROTOCOL_VERSION,
        compat_digest="same",
        layout=cluster.source.layout.to_proto(),
        transport=cluster.transport,
    )
    return receiving.receiver.connect(request)


BAD_NIXL_FIELDS = [
    ("agent_metadata", b""),
    ("agent_metadata", b"x" * (2 << 20)),
    ("base_address", 0),
    ("base_address", 2**64 - 1),
    ("pool_bytes", 1),
    ("device_id", 2**31),
    ("memory", "FILE"),
]


@needs_nixl
@over("nixl")
@pytest.mark.parametrize(("field", "value"), BAD_NIXL_FIELDS)
async def test_what_a_nixl_endpoint_says_is_checked(
    cluster: Cluster, receiving: Receiving, field: str, value: object
) -> None:
    from kv_transfer.nixl_transport import check_endpoint

    response = await described(cluster, receiving)
    check_endpoint(response)
    setattr(response.nixl, field, value)
    with pytest.raises(InvalidTransfer):
        check_endpoint(response)


@pytest.mark.one_in(3)
@needs_nixl
@over("nixl")
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("field", "value"), BAD_NIXL_FIELDS)
async def test_what_a_nixl_endpoint_says_of_each_rank_is_checked(
    cluster: Cluster, field: str, value: object, rank: int
) -> None:
    from kv_transfer.nixl_ranks import check_endpoint

    cluster.source = make_pool(30, seed=7, num_layers=6)
    response = await described(cluster, await cluster.add_receiving(wrap=on_devices, num_layers=6))
    check_endpoint(response)
    setattr(response.nixl.ranks[rank], field, value)
    with pytest.raises(InvalidTransfer):
        check_endpoint(response)


@needs_nixl
@over("nixl")
async def test_what_a_nixl_endpoint_says_of_all_ranks_is_checked(cluster: Cluster) -> None:
    from kv_transfer.nixl_ranks import check_endpoint

    cluster.source = make_pool(30, seed=7, num_layers=6)
    response = await described(cluster, await cluster.add_receiving(wrap=on_devices, num_layers=6))
    response.nixl.pool_bytes -= 1
    with pytest.raises(InvalidTransfer, match="a pool of that layout has"):
        check_endpoint(response)
    response.nixl.pool_bytes += 1
    response.nixl.ranks[1].ranks.add()
    with pytest.raises(InvalidTransfer, match="a rank has no ranks"):
        check_endpoint(response)


@over("ipc")
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"pool_bytes": 1}, InvalidTransfer, "has 30720 bytes, not 1"),
        ({"machine": "another"}, IncompatiblePeer, "decode is on another machine.*--transport grpc or nixl"),
        ({"machine": ""}, IncompatiblePeer, "on another machine"),
        (
            {"host": pb.HostMemory(pid=2**31 - 1, fd=3, name="tandem-kv-0123456789abcdef")},
            PeerUnreachable,
            "memory of process 2147483647: No such file",
        ),
        ({"host": pb.HostMemory(pid=1, fd=0, name="tandem-kv-0123456789abcdef")}, PeerUnreachable, "process 1"),
        ({"host": pb.HostMemory(pid=1, fd=0)}, InvalidTransfer, "is no name of shared memory"),
        ({"cuda": pb.CudaMemory(handle=bytes(64))}, InvalidTransfer, "cannot be copied into a device's"),
        ({"host": None}, InvalidTransfer, "cannot be copied into a device's"),
    ],
    ids=["bytes", "machine", "no machine", "no process", "another process", "no name", "a device's", "nothing"],
)
async def test_what_an_ipc_endpoint_says_is_checked(
    cluster: Cluster,
    receiving: Receiving,
    change: dict[str, Any],
    error: type[Exception],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = (await described(cluster, receiving)).ipc
    for field, value in change.items():
        endpoint.ClearField(field)
        if isinstance(value, (int, str)):
            setattr(endpoint, field, value)
        elif value is not None:
            getattr(endpoint, field).CopyFrom(value)
    monkeypatch.setattr(receiving.receiver._endpoint, "describe", lambda response: response.ipc.CopyFrom(endpoint))
    with pytest.raises(error, match=named):
        await cluster.sender.open(receiving.receiver.issue("router", [6], 0))
