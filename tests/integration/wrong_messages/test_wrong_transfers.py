"""KV that no grant covers, wrong commits, incompatible peers."""

from __future__ import annotations

from typing import Any

import pytest

from kv_transfer.base import PROTOCOL_VERSION as KV_PROTOCOL_VERSION
from protos import tandem_kv_transfer_pb2 as kv_pb
from protos import tandem_worker_pb2 as pb
from rpc.errors import InvalidRequest, code_of
from wrong_messages.saying import (
    BAD,
    BLOCK_BYTES,
    FAILED,
    HUGE,
    NUM_BLOCKS,
    Peers,
    Session,
    chunk_of,
    commit_of,
    connect_request,
    push_zeros,
    refusal,
    work,
)

CHUNKS: dict[str, tuple[dict[str, Any], str]] = {
    "layer beyond": ({"layer": 30}, "layer 30"),
    "layer far beyond": ({"layer": HUGE}, f"layer {HUGE}"),
    "block beyond the pool": ({"block_ids": [NUM_BLOCKS]}, f"block {NUM_BLOCKS}"),
    "block far beyond": ({"block_ids": [HUGE]}, f"block {HUGE}"),
    "no data": ({"data": b""}, "not 0"),
    "a byte less": ({"data": bytes(BLOCK_BYTES - 1)}, f"not {BLOCK_BYTES - 1}"),
    "a byte more": ({"data": bytes(BLOCK_BYTES + 1)}, f"not {BLOCK_BYTES + 1}"),
    "a million blocks": ({"block_ids": [1] * 1_000_000}, "1000000 blocks are"),
    "data for no block": ({"block_ids": []}, "must be the first"),
    "nothing": ({"block_ids": [], "data": b""}, "must be the first"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_wrong_chunks(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    changes, says = CHUNKS[name]
    grant = granted[1]
    code, details = refusal(lambda: peers.call("KVTransfer/Push", chunk_of(grant), chunk_of(grant, **changes)))
    assert code == BAD
    assert says in details
    # The grant stays valid, and until the commit a block may be pushed again: the last push counts.
    push_zeros(peers, grant)
    push_zeros(peers, grant)
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.COMMITTED


STRAYS: dict[str, dict[str, Any]] = {
    "grant never made": {"grant_id": 10**9},
    "grant zero": {"grant_id": 0},
    "grant of the last number": {"grant_id": 2**64 - 1},
    "epoch zero": {"epoch": 0},
    "epoch of the last number": {"epoch": 2**64 - 1},
    "no incarnation": {"incarnation": ""},
    "other incarnation": {"incarnation": "of old"},
    "endless incarnation": {"incarnation": "x" * 1_000_000},
}


@pytest.mark.parametrize("name", STRAYS)
def test_what_belongs_to_no_grant(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    grant = granted[1]
    push = peers.call("KVTransfer/Push", *[chunk_of(grant, **STRAYS[name])] * 3)
    assert kv_pb.PushSummary.FromString(push).num_late == 3
    commit = peers.call("KVTransfer/Commit", commit_of(peers, grant, **STRAYS[name]))
    assert kv_pb.CommitResponse.FromString(commit).outcome == kv_pb.CommitResponse.GRANT_GONE
    named = {"grant_id": grant.grant_id, "epoch": grant.epoch, "incarnation": grant.incarnation}
    peers.call("KVTransfer/Abandon", kv_pb.AbandonRequest(**{**named, **STRAYS[name]}))
    push = peers.call("KVTransfer/Push", chunk_of(grant))
    assert kv_pb.PushSummary.FromString(push).num_written == 1


COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "no digests": ({"digests": b""}, "not 0"),
    "a byte less": ({"digests": bytes(8 * 30 * 3 - 1)}, "not 719"),
    "a block more": ({"digests": bytes(8 * 30 * 4)}, "not 960"),
    "a million digests": ({"digests": bytes(8_000_000)}, "not 8000000"),
    "no prompt": ({"num_prompt_tokens": 0}, "0 prompt tokens"),
    "prompt beyond the blocks": ({"num_prompt_tokens": 49}, "49 prompt tokens"),
    "endless prompt": ({"num_prompt_tokens": HUGE}, f"{HUGE} prompt tokens"),
}


@pytest.mark.parametrize("name", COMMITS)
def test_wrong_commits(peers: Peers, granted: tuple[Session, kv_pb.Grant], name: str) -> None:
    changes, says = COMMITS[name]
    grant = granted[1]
    push_zeros(peers, grant)
    code, details = refusal(lambda: peers.call("KVTransfer/Commit", commit_of(peers, grant, **changes)))
    assert code == BAD
    assert says in details
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.COMMITTED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_token_id": 49_152}, "token_id"),
        ({"first_token_id": HUGE}, "token_id"),
        ({"num_prompt_tokens": 39}, "num_tokens must be 40, is 39"),
        ({"num_prompt_tokens": 48}, "num_tokens must be 40, is 48"),
    ],
    ids=str,
)
def test_a_commit_of_something_else_ends_the_attempt(
    peers: Peers, granted: tuple[Session, kv_pb.Grant], changes: dict[str, Any], says: str
) -> None:
    """The request does not run: both sides get the error, and the blocks are freed at once."""
    session, grant = granted
    push_zeros(peers, grant)
    code, details = refusal(lambda: peers.call("KVTransfer/Commit", commit_of(peers, grant, **changes)))
    assert (code, says in details) == (BAD, True), details
    failed = session.event().failed
    assert (failed.code, failed.can_retry) == (code_of(InvalidRequest()), True)
    assert says in failed.message
    peers.cluster.wait_until_at_rest()
    again = peers.call("KVTransfer/Commit", commit_of(peers, grant))
    assert kv_pb.CommitResponse.FromString(again).outcome == kv_pb.CommitResponse.GRANT_GONE


def test_a_commit_before_its_writes_and_a_commit_again(peers: Peers, granted: tuple[Session, kv_pb.Grant]) -> None:
    session, grant = granted
    peers.call("KVTransfer/Push", chunk_of(grant))
    early = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert early.outcome == kv_pb.CommitResponse.MISMATCH
    assert grant.block_ids[-1] in early.mismatched_blocks
    push_zeros(peers, grant)
    for _ in range(2):
        answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
        assert answer.outcome == kv_pb.CommitResponse.COMMITTED
    late = kv_pb.PushSummary.FromString(peers.call("KVTransfer/Push", chunk_of(grant)))
    assert (late.num_written, late.num_late) == (0, 1)
    assert [session.event().tokens.index for _ in range(3)] == [1, 2, 3]


def test_after_a_cancel_nothing_of_the_grant_counts(peers: Peers, granted: tuple[Session, kv_pb.Grant]) -> None:
    session, grant = granted
    session.say(cancel=pb.Cancel(request_id="a", attempt=1)).send(work(session, attempt=2, prompt_token_ids=[]))
    assert session.event().failed.code == code_of(InvalidRequest())
    late = kv_pb.PushSummary.FromString(peers.call("KVTransfer/Push", chunk_of(grant)))
    assert (late.num_written, late.num_late) == (0, 1)
    answer = kv_pb.CommitResponse.FromString(peers.call("KVTransfer/Commit", commit_of(peers, grant)))
    assert answer.outcome == kv_pb.CommitResponse.GRANT_GONE


CONNECTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"protocol_version": KV_PROTOCOL_VERSION + 1}, "protocol_version: 1 != 2"),
    "no version": ({"protocol_version": 0}, "protocol_version: 1 != 0"),
    "no digest": ({"compat_digest": ""}, "compat_digest: 'kv_format_version=1"),
    "digest of other parts": ({"compat_digest": "weights=1"}, "kv_format_version '1' != (absent)"),
    **{
        f"other {part}": ({"part": part}, f"compat_digest: {part} '")
        for part in ("model", "weights", "dtype", "block_size", "kv_order", "eos_token_ids", "kv_format_version")
    },
    "endless digest": ({"compat_digest": "x" * 1_000_000}, "compat_digest"),
    "transport": ({"transport": "pigeon"}, "transport: grpc is served, not 'pigeon'"),
    "endless transport": ({"transport": "x" * 1_000_000}, "transport: grpc is served"),
    "layers": ({"layout": {"num_layers": 29}}, "num_layers: 30 != 29"),
    "no layers": ({"layout": {"num_layers": 0}}, "layout: num_layers"),
    "layers beyond": ({"layout": {"num_layers": HUGE}}, "layout: num_layers"),
    "block size": ({"layout": {"block_size": 8}}, "block_size: 16 != 8"),
    "heads": ({"layout": {"num_kv_heads": 9}}, "num_kv_heads: 3 != 9"),
    "head_dim": ({"layout": {"head_dim": 128}}, "head_dim: 64 != 128"),
    "dtype": ({"layout": {"dtype": "float16"}}, "dtype: 'bfloat16' != 'float16'"),
    "dtype that is none": ({"layout": {"dtype": "x" * 1_000_000}}, "layout: dtype"),
    "order": ({"layout": {"order": "layer block slot kv head dim"}}, "order: "),
    "digest of blocks": ({"layout": {"digest": "md5"}}, "layout: digest"),
    "pool beyond": ({"layout": {"num_blocks": HUGE}}, "layout: num_blocks"),
}


@pytest.mark.parametrize("name", CONNECTS)
def test_peers_that_differ_are_told_in_what(peers: Peers, name: str) -> None:
    changes, says = CONNECTS[name]
    code, details = refusal(lambda: peers.call("KVTransfer/Connect", connect_request(peers, **changes)))
    assert code == FAILED
    assert says in details
    assert len(details) < 600
    assert kv_pb.ConnectResponse.FromString(peers.call("KVTransfer/Connect", connect_request(peers))).HasField("grpc")
