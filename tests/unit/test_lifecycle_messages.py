"""What a client is told in which message, when its router has several events to handle at a time. No network."""

from __future__ import annotations

import pytest
from lifecycle_bench import LENGTH, Bench, settle

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.request_events import MAX_JOINED_TOKENS
from rpc.errors import InvalidRequest, code_of


def told(received: list[inference_pb.GenerateResponse]) -> list[tuple[int, list[int]]]:
    return [(message.offset, list(message.token_ids)) for message in received if not message.finish_reason]


async def test_tokens_that_wait_are_one_message() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    await settle()
    for index in range(1, 5):
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[5 + index]))
    bench.d.say("r", 1, tokens=pb.Tokens(index=5, token_ids=[10], finish_reason=LENGTH))
    await asked.task
    assert told(asked.received) == [(0, [5]), (1, [6, 7, 8, 9, 10])]
    last = asked.received[-1]
    assert (last.finish_reason, last.offset, last.usage.completion_tokens) == (LENGTH, 6, 6)


async def test_no_message_grows_without_bound() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    for index in range(3 * MAX_JOINED_TOKENS):
        bench.d.say("r", 1, tokens=pb.Tokens(index=index, token_ids=[5]))
    bench.d.say("r", 1, tokens=pb.Tokens(index=3 * MAX_JOINED_TOKENS, token_ids=[6], finish_reason=LENGTH))
    await asked.task
    sizes = [(offset, len(token_ids)) for offset, token_ids in told(asked.received)]
    assert sizes == [*((i * MAX_JOINED_TOKENS, MAX_JOINED_TOKENS) for i in range(3)), (3 * MAX_JOINED_TOKENS, 1)]


async def test_tokens_come_before_the_error_that_waits_behind_them() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.d.say("r", 1, tokens=pb.Tokens(index=1, token_ids=[6]))
    bench.d.say("r", 1, failed=pb.Failed(code=code_of(InvalidRequest([])), message="no", can_retry=False))
    with pytest.raises(InvalidRequest):
        await asked.task
    assert told(asked.received) == [(0, [5, 6])]


async def test_tokens_that_wait_behind_a_gap_end_the_attempt_and_no_more() -> None:
    bench = Bench()
    asked = bench.request("r")
    await settle()
    bench.d.say("r", 1, tokens=pb.Tokens(index=0, token_ids=[5]))
    bench.d.say("r", 1, tokens=pb.Tokens(index=2, token_ids=[7]))
    bench.d.say("r", 1, tokens=pb.Tokens(index=3, token_ids=[8]))
    await settle()
    assert told(asked.received) == [(0, [5])]
    bench.d.say("r", 2, tokens=pb.Tokens(index=1, token_ids=[6], finish_reason=LENGTH))
    await asked.task
    assert told(asked.received) == [(0, [5]), (1, [6])]
