"""`router.sequences`: the names and seeds of several answers to one prompt. The rest needs workers (test_ends)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from protos import tandem_inference_pb2 as pb
from router.asked_answer import names_at_workers, params_of_sequence
from router.seeds import seed_of_sequence
from router.sequences import Sequences, _as_one


def test_one_answer_has_the_name_of_its_request() -> None:
    assert names_at_workers("r", 1) == ["r"]
    assert names_at_workers("r", 3) == ["0_r", "1_r", "2_r"]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(5, 0, 5), (5, 3, 8), (-1, 1, 0), (2**63 - 1, 0, 2**63 - 1), (2**63 - 1, 1, -(2**63)), (-(2**63), 2, 2 - 2**63)],
)
def test_seeds_follow_one_another_and_fit_64_bits(seed: int, index: int, expected: int) -> None:
    assert seed_of_sequence(seed, index) == expected
    asked = pb.SamplingParams(seed=seed, n=9, temperature=0.5, stop=["x"])
    assert params_of_sequence(asked, index) == pb.SamplingParams(seed=expected, n=1, temperature=0.5, stop=["x"])
    assert (asked.seed, asked.n) == (seed, 9)


async def test_an_answer_in_one_message_begins_where_it_was_resumed_and_names_its_kind() -> None:
    async def messages() -> AsyncGenerator[pb.GenerateResponse, None]:
        yield pb.GenerateResponse(offset=3, token_ids=[7], text="a", worker_kind="k")
        yield pb.GenerateResponse(offset=4, token_ids=[8, 9], text="b")
        yield pb.GenerateResponse(offset=6, text="c", finish_reason=pb.FINISH_REASON_STOP)

    (whole,) = [message async for message in _as_one(messages())]
    assert (whole.offset, list(whole.token_ids), whole.text) == (3, [7, 8, 9], "abc")
    assert (whole.worker_kind, whole.finish_reason) == ("k", pb.FINISH_REASON_STOP)


@pytest.mark.parametrize("num_before", [0, 3])
async def test_the_others_wait_for_the_second_token_that_comes_now(num_before: int) -> None:
    """At the second token, the prompt is in a decode worker's cache. Tokens that the client has from another router do
    not show that."""
    begun: list[str] = []
    goes_on = asyncio.Event()

    async def first() -> AsyncGenerator[pb.GenerateResponse, None]:
        yield pb.GenerateResponse(offset=num_before, token_ids=[7])
        await goes_on.wait()
        begun.append("second token")
        yield pb.GenerateResponse(offset=num_before + 1, token_ids=[8], finish_reason=pb.FINISH_REASON_LENGTH)

    async def other() -> AsyncGenerator[pb.GenerateResponse, None]:
        begun.append("other")
        yield pb.GenerateResponse(sequence=1, finish_reason=pb.FINISH_REASON_LENGTH)

    lifecycles: Any = [SimpleNamespace(run=first, has_one_worker=False), SimpleNamespace(run=other)]
    messages = Sequences(lifecycles, is_streaming=True).run()
    assert (await anext(messages)).token_ids == [7]
    for _ in range(5):  # lets every task run that can
        await asyncio.sleep(0)
    goes_on.set()
    assert [list(message.token_ids) async for message in messages] == [[8], []]
    assert begun == ["second token", "other"]


async def test_the_others_begin_though_the_first_answer_has_no_second_token() -> None:
    begun = asyncio.Event()

    async def first() -> AsyncGenerator[pb.GenerateResponse, None]:
        yield pb.GenerateResponse(token_ids=[7], finish_reason=pb.FINISH_REASON_STOP)

    async def other() -> AsyncGenerator[pb.GenerateResponse, None]:
        begun.set()
        yield pb.GenerateResponse(sequence=1, finish_reason=pb.FINISH_REASON_LENGTH)

    lifecycles: Any = [SimpleNamespace(run=first, has_one_worker=False), SimpleNamespace(run=other)]
    async with asyncio.timeout(5):
        messages = [message async for message in Sequences(lifecycles, is_streaming=True).run()]
    assert begun.is_set()
    assert [message.sequence for message in messages] == [0, 1]
