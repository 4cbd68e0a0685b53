"""Whatever a peer sends, a receiver answers with a status, and no byte of its memory changes that should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
from kv_harness import DEADLINE_S, Receiving, until

from kv_transfer.base import MAX_LEASE_MS
from kv_transfer.errors import InvalidTransfer
from kv_transfer.sender import check_grant
from protos import tandem_kv_transfer_pb2 as pb
from protos import tandem_kv_transfer_pb2_grpc as pb_grpc


@pytest.fixture
async def receiving() -> AsyncIterator[Receiving]:
    receiving = Receiving("grpc")
    await receiving.start()
    yield receiving
    await receiving.close()


@pytest.fixture
async def stub(receiving: Receiving) -> AsyncIterator[pb_grpc.KVTransferStub]:
    async with grpc.aio.insecure_channel(receiving.address) as channel:
        yield pb_grpc.KVTransferStub(channel)


async def push(stub: pb_grpc.KVTransferStub, chunks: Iterable[pb.PushChunk]) -> pb.PushSummary:
    return await stub.Push(iter(chunks), timeout=DEADLINE_S)


def chunk_of(grant: pb.Grant, receiving: Receiving, **changes: Any) -> pb.PushChunk:
    chunk = {
        "grant_id": grant.grant_id,
        "epoch": grant.epoch,
        "incarnation": grant.incarnation,
        "layer": 1,
        "block_ids": [grant.block_ids[-1]],
        "data": b"\xff" * receiving.pool.layout.block_bytes,
    }
    return pb.PushChunk(**{**chunk, **changes})


def commit_of(grant: pb.Grant, receiving: Receiving, **changes: Any) -> pb.CommitRequest:
    num_digests = receiving.pool.layout.num_layers * (len(grant.block_ids) - grant.num_cached_blocks)
    commit = {
        "grant_id": grant.grant_id,
        "epoch": grant.epoch,
        "incarnation": grant.incarnation,
        "num_prompt_tokens": 1,
        "digests": bytes(8 * num_digests),
        "first_token_id": 5,
    }
    return pb.CommitRequest(**{**commit, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer": 3}, "layer 3"),
        ({"layer": 2**32 - 1}, "layer"),
        ({"block_ids": [40]}, "block 40"),
        ({"block_ids": [2**32 - 1]}, "block 4294967295"),
        ({"block_ids": [5]}, "it is cached"),
        ({"block_ids": [6, 7]}, "2 blocks are"),
        ({"data": b""}, "not 0"),
        ({"data": b"\xff" * 255}, "not 255"),
        ({"data": b"\xff" * 257}, "not 257"),
        ({"block_ids": []}, "data without block ids"),
        ({"block_ids": [], "data": b""}, "no one-sided transport"),
    ],
    ids=str,
)
async def test_malformed_chunks(
    receiving: Receiving, stub: pb_grpc.KVTransferStub, changes: dict[str, Any], says: str
) -> None:
    grant = receiving.receiver.issue("router", [5, 6], 1)
    with pytest.raises(grpc.aio.AioRpcError, match=says) as raised:
        await push(stub, [chunk_of(grant, receiving, **changes)])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not receiving.pool.array.any()
    summary = await push(stub, [chunk_of(grant, receiving)])
    assert (summary.num_written, summary.num_bytes, summary.num_late) == (1, 256, 0)
    assert receiving.pool.array[1, 6].all()
    assert int(receiving.pool.array.sum()) == 256 * 255


@pytest.mark.parametrize("changes", [{"grant_id": 77}, {"epoch": 0}, {"incarnation": "d-0"}, {"incarnation": ""}])
async def test_strays_are_dropped_and_counted(
    receiving: Receiving, stub: pb_grpc.KVTransferStub, changes: dict[str, Any]
) -> None:
    grant = receiving.receiver.issue("router", [5, 6], 1)
    summary = await push(stub, [chunk_of(grant, receiving, **changes)] * 3)
    assert (summary.num_written, summary.num_late) == (0, 3)
    assert receiving.receiver.table.counters.num_late_writes == 3
    assert not receiving.pool.array.any()


async def test_bytes_that_are_no_message(receiving: Receiving) -> None:
    async with grpc.aio.insecure_channel(receiving.address) as channel:
        for method in ("Connect", "Commit", "Abandon"):
            call = channel.unary_unary(f"/tandem.v1.KVTransfer/{method}")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff\xff\xff junk", timeout=DEADLINE_S)
        truncated = channel.stream_unary("/tandem.v1.KVTransfer/Push")
        grant = receiving.receiver.issue("router", [5], 0)
        message = chunk_of(grant, receiving).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError):
            await truncated(iter([message[:-7]]), timeout=DEADLINE_S)
    assert not receiving.pool.array.any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"digests": b""}, "not 0"),
        ({"digests": bytes(8 * 3 + 1)}, "not 25"),
        ({"digests": bytes(8 * 6)}, "not 48"),
        ({"num_prompt_tokens": 0}, "0 prompt tokens"),
        ({"num_prompt_tokens": 9}, "9 prompt tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_malformed_commits(
    receiving: Receiving, stub: pb_grpc.KVTransferStub, changes: dict[str, Any], says: str
) -> None:
    grant = receiving.receiver.issue("router", [5, 6], 1)
    with pytest.raises(grpc.aio.AioRpcError, match=says) as raised:
        await stub.Commit(commit_of(grant, receiving, **changes), timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    answer = await stub.Commit(commit_of(grant, receiving), timeout=DEADLINE_S)
    assert (answer.outcome, list(answer.mismatched_blocks)) == (pb.CommitResponse.MISMATCH, [6])
    assert receiving.committed == []


@pytest.mark.parametrize("changes", [{"grant_id": 77}, {"epoch": 0}, {"incarnation": "d-0"}])
async def test_stray_commits_and_abandons(
    receiving: Receiving, stub: pb_grpc.KVTransferStub, changes: dict[str, Any]
) -> None:
    grant = receiving.receiver.issue("router", [5], 0)
    answer = await stub.Commit(commit_of(grant, receiving, **changes), timeout=DEADLINE_S)
    assert answer.outcome == pb.CommitResponse.GRANT_GONE
    abandon = {"grant_id": grant.grant_id, "epoch": grant.epoch, "incarnation": grant.incarnation}
    await stub.Abandon(pb.AbandonRequest(**{**abandon, **changes}), timeout=DEADLINE_S)
    assert receiving.freed == []
    assert (await push(stub, [chunk_of(grant, receiving)])).num_written == 1


async def test_connect_with_nonsense_names_all_of_it(receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
    request = pb.ConnectRequest(protocol_version=9, compat_digest="x" * 10_000, layout=pb.KVLayout(), transport="?")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Connect(request, timeout=DEADLINE_S)
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    details = raised.value.details()
    assert details is not None
    assert all(name in details for name in ("protocol_version", "compat_digest", "layout", "transport"))
    assert len(details) < 1000


async def test_commit_whose_caller_hung_up_is_found_again(
    receiving: Receiving, stub: pb_grpc.KVTransferStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = receiving.receiver.issue("router", [5], 1)
    has_begun, may_end, has_hung_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
    calls = []

    async def slow_commit(*call: object) -> bool:
        calls.append(call)
        has_begun.set()
        await may_end.wait()
        return True

    commit = receiving.receiver.commit

    async def noticing_commit(request: pb.CommitRequest) -> pb.CommitResponse:
        try:
            return await commit(request)
        except asyncio.CancelledError:
            has_hung_up.set()
            raise

    monkeypatch.setattr(receiving.receiver, "_on_commit", slow_commit)
    monkeypatch.setattr(receiving.receiver, "commit", noticing_commit)
    first = stub.Commit(commit_of(grant, receiving), timeout=DEADLINE_S)
    await until(has_begun)
    first.cancel()
    await until(has_hung_up)
    second = stub.Commit(commit_of(grant, receiving), timeout=DEADLINE_S)
    may_end.set()
    assert (await second).outcome == pb.CommitResponse.COMMITTED
    assert len(calls) == 1


async def test_repeated_commit_is_verified_once(receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
    grant = receiving.receiver.issue("router", [5, 6], 1)
    request = commit_of(grant, receiving)
    answers = await asyncio.gather(*(receiving.receiver.commit(request) for _ in range(4)))
    assert [list(answer.mismatched_blocks) for answer in answers] == [[6]] * 4
    assert receiving.receiver.table.counters.num_mismatched_blocks == 1
    other = commit_of(grant, receiving, digests=b"\x01" * 24)
    answers = await asyncio.gather(*(receiving.receiver.commit(each) for each in (request, other, request, other)))
    assert [list(answer.mismatched_blocks) for answer in answers] == [[6]] * 4
    assert receiving.receiver.table.counters.num_mismatched_blocks >= 3


@pytest.mark.parametrize("lease_ms", [1, MAX_LEASE_MS])
async def test_senders_take_a_lease_of_any_length_that_a_receiver_may_have(lease_ms: int) -> None:
    receiving = Receiving("grpc", lease_s=lease_ms / 1000)
    await receiving.start()
    grant = receiving.receiver.issue("router", [5, 6], 0)
    await receiving.close()
    check_grant(grant)


@pytest.mark.parametrize("lease_ms", [0, MAX_LEASE_MS + 1])
async def test_a_lease_that_no_sender_takes_is_refused_at_both_ends(lease_ms: int) -> None:
    with pytest.raises(ValueError, match="lease_s must be between"):
        Receiving("grpc", lease_s=lease_ms / 1000)
    grant = pb.Grant(worker_id="d", incarnation="d-1", kv_address="d:1", block_ids=[5, 6], lease_ms=lease_ms)
    with pytest.raises(InvalidTransfer, match="lease_ms must be between"):
        check_grant(grant)


class TestOneSided:
    @pytest.fixture
    async def receiving(self) -> AsyncIterator[Receiving]:
        receiving = Receiving("ipc", lease_s=0.5)
        await receiving.start()
        yield receiving
        await receiving.close()

    def bare(self, grant: pb.Grant) -> pb.PushChunk:
        return pb.PushChunk(grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation)

    async def attach(self, stub: pb_grpc.KVTransferStub, grant: pb.Grant) -> Any:
        call = stub.Push()
        await call.write(self.bare(grant))
        assert ("tandem-push", "attached") in tuple(await call.initial_metadata())
        return call

    async def test_broken_stream_keeps_quarantine_for_a_lease(
        self, receiving: Receiving, stub: pb_grpc.KVTransferStub
    ) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        call = await self.attach(stub, grant)
        receiving.receiver.revoke(grant.grant_id)
        assert receiving.freed == []
        call.cancel()
        broke_s = asyncio.get_running_loop().time()
        await until(receiving.has_freed)
        assert 0.4 < asyncio.get_running_loop().time() - broke_s < 2.0
        assert [freed.block_ids for freed in receiving.freed] == [(5, 6)]

    async def test_half_closed_stream_is_not_a_word(self, receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        call = await self.attach(stub, grant)
        receiving.receiver.revoke(grant.grant_id)
        await call.done_writing()
        await call
        assert receiving.freed == []
        await stub.Abandon(pb.AbandonRequest(grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation))
        assert [freed.block_ids for freed in receiving.freed] == [(5, 6)]

    async def test_second_chunk_ends_the_push(self, receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        call = await self.attach(stub, grant)
        receiving.receiver.revoke(grant.grant_id)
        await call.write(self.bare(grant))
        await call
        assert [freed.block_ids for freed in receiving.freed] == [(5, 6)]

    async def test_one_sender_at_a_time(self, receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        await self.attach(stub, grant)
        with pytest.raises(grpc.aio.AioRpcError, match="another sender") as raised:
            await push(stub, [self.bare(grant)])
        assert raised.value.code() is grpc.StatusCode.ABORTED

    async def test_a_push_is_one_sided_from_its_start(self, receiving: Receiving, stub: pb_grpc.KVTransferStub) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        stray = chunk_of(grant, receiving, epoch=0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await push(stub, [stray, self.bare(grant), self.bare(grant)])
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await push(stub, [self.bare(grant), self.bare(grant)])

    async def test_one_sided_receiver_takes_no_other_data(
        self, receiving: Receiving, stub: pb_grpc.KVTransferStub
    ) -> None:
        grant = receiving.receiver.issue("router", [5, 6], 0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await push(stub, [self.bare(grant), chunk_of(grant, receiving)])
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not receiving.pool.array.any()
