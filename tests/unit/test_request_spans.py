"""The spans of a request, whatever happens to it: one for each attempt, with those of its stages within. No network."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from lifecycle_bench import LENGTH, Asked, Bench, settle

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from protos.tandem_kv_transfer_pb2 import Grant
from router.lifecycle import Lifecycle
from router.request_spans import request_spans
from rpc.errors import NoWorker
from rpc.tracing import Span


def spans_of(lifecycle: Lifecycle) -> list[Span]:
    return request_spans(lifecycle.account.stamps.arrived_s, {0: lifecycle.account.attempts})


def named(spans: list[Span]) -> list[Any]:
    return [(span.name, [child.name for child in span.children]) if span.children else span.name for span in spans]


def check(spans: list[Span]) -> None:
    """Check that spans follow each other, and that each child lies within its parent."""
    for before, after in itertools.pairwise(spans):
        assert before.start_s <= before.end_s <= after.start_s
    for span in spans:
        assert all(span.start_s <= child.start_s <= child.end_s <= span.end_s for child in span.children)


async def test_an_answer_that_goes_on_at_another_attempt() -> None:
    bench = Bench()
    lifecycle = bench.lifecycle("r")
    asked = Asked(lifecycle.run())
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5], waited_ms=1e6))
    await settle()
    bench.lose_decode_session(num_lost=1)
    await settle()
    session = bench.reopen_decode_session()
    bench.dispatch()
    await settle()
    assert named(spans_of(lifecycle)) == ["prepare", "queue", ("attempt", ["prefill", "decode"])]  # the ended ones
    session.say("r", 2, tokens=pb.Tokens(index=1, token_ids=[6], finish_reason=LENGTH))
    await asked.task
    spans = spans_of(lifecycle)
    check(spans)
    attempt = ("attempt", ["prefill", "decode"])
    assert named(spans) == ["prepare", "queue", attempt, "queue", attempt]
    assert [span.error for span in spans] == ["", "", "worker d was lost", "", ""]
    assert [span.attributes.get("tandem.attempt") for span in spans] == [None, 1, 1, 2, 2]
    prefill = spans[2].children[0]
    assert prefill.attributes["tandem.waited_s"] == pytest.approx(prefill.end_s - prefill.start_s)  # cut to its span


async def test_a_worker_without_room_and_then_a_handover() -> None:
    bench = Bench(with_prefill=True)
    lifecycle = bench.lifecycle("r")
    asked = Asked(lifecycle.run())
    await settle()
    bench.d.say("r", 1, busy=pb.Busy())
    await settle()
    bench.decode.set_load(pb.WorkerLoad(num_running=1, blocks=pb.BlockLedger(num_blocks=100, num_free=100)))
    bench.decode.set_load(pb.WorkerLoad(blocks=pb.BlockLedger(num_blocks=100, num_free=100)))
    bench.dispatch()
    await settle()
    bench.d.say("r", 2, granted=Grant(grant_id=1))
    await settle()
    bench.p.say("r", 2, tokens=pb.Tokens(index=0, token_ids=[5]))
    stats = inference_pb.KVTransferStats(transport="ipc", num_bytes=7, num_blocks=2, num_cached_blocks=1)
    bench.p.say("r", 2, handed_over=pb.HandedOver(stats=stats))
    bench.d.say("r", 2, tokens=pb.Tokens(index=1, token_ids=[6], finish_reason=LENGTH))
    await asked.task
    spans = spans_of(lifecycle)
    check(spans)
    handover = ("attempt", ["reserve", "prefill", "kv_transfer", "decode"])
    assert named(spans) == ["prepare", "queue", ("attempt", ["reserve"]), "queue", handover]
    assert [spans[i].attributes["tandem.is_busy"] for i in (2, 4)] == [True, False]
    assert not any(span.error for span in spans)
    assert spans[4].children[2].attributes == {
        "tandem.transport": "ipc", "tandem.num_bytes": 7, "tandem.num_blocks": 2, "tandem.num_cached_blocks": 1,
    }  # fmt: skip


async def test_nobody_could_be_found() -> None:
    bench = Bench()
    lifecycle = bench.lifecycle("r")
    asked = Asked(lifecycle.run())
    await settle()
    bench.lose_decode_session(num_lost=5)
    with pytest.raises(NoWorker):
        await asked.task
    spans = spans_of(lifecycle)
    check(spans)
    assert named(spans) == ["prepare", "queue", ("attempt", ["prefill"]), "queue"]
    assert "no decode worker is available" in spans[-1].error


async def test_its_client_leaves() -> None:
    bench = Bench()
    lifecycle = bench.lifecycle("r")
    asked = Asked(lifecycle.run())
    await settle()
    await asked.leave()
    assert named(spans_of(lifecycle)) == ["prepare", "queue", ("attempt", ["prefill"])]
    assert request_spans(0.0, {}) == []
