"""What a prefill worker refuses on arrival, so that it cannot disturb other requests: a grant that does not fit its
prompt, and more answers that stay here than half of the pool can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefill_service.prefill import PrefillRole, check_grant_fits
from protos import tandem_worker_pb2 as pb
from protos.tandem_inference_pb2 import SamplingParams
from protos.tandem_kv_transfer_pb2 import Grant
from worker_service.sessions import Stream


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (32, 2)])
def test_one_that_fits(num_tokens: int, num_blocks: int) -> None:
    check_grant_fits(Grant(block_ids=range(num_blocks)), num_tokens, 16)
    check_grant_fits(Grant(block_ids=range(num_blocks), num_cached_blocks=num_blocks), num_tokens, 16)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (17, 1), (16, 2)])
def test_one_that_does_not(num_tokens: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="blocks"):
        check_grant_fits(Grant(block_ids=range(num_blocks)), num_tokens, 16)


def test_more_cached_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_cached_blocks"):
        check_grant_fits(Grant(block_ids=[3], num_cached_blocks=2), 16, 16)


def staying(num_blocks: int, max_num_seqs: int) -> PrefillRole:
    """A role for a pool with blocks of 16 tokens, and contexts of up to 64 blocks."""
    config = SimpleNamespace(
        model=SimpleNamespace(max_model_len=1024), cache=SimpleNamespace(block_size=16),
        scheduler=SimpleNamespace(max_num_seqs=max_num_seqs),
    )  # fmt: skip
    none: Any = None
    engine: Any = SimpleNamespace(config=config)
    return PrefillRole(host=none, engine=engine, sender=none, num_blocks=num_blocks, on_handed_over=none)


def answer(num_prompt_tokens: int, max_tokens: int) -> tuple[Stream, pb.EngineRequest]:
    session: Any = None
    request = pb.EngineRequest(
        prompt_token_ids=[1] * num_prompt_tokens, sampling_params=SamplingParams(max_tokens=max_tokens)
    )
    return Stream(session, "r", 1, "r/1"), request


def test_answers_that_stay_get_half_of_the_pool_as_they_are_expected_to_grow() -> None:
    role = staying(num_blocks=100, max_num_seqs=64)
    first, request = answer(160, 160)  # grows to 20 blocks
    assert role._take(first, request)
    assert role._take(*answer(160, 160))
    assert not role._take(*answer(160, 16))
    assert role._take(*answer(100, 60))
    assert not role._take(*answer(1, 15))
    first.is_open = False
    assert role._take(*answer(160, 160))


def test_an_answer_without_a_bound_is_expected_to_double() -> None:
    role = staying(num_blocks=100, max_num_seqs=64)
    streams = [answer(80, 1024) for _ in range(6)]  # 5 blocks now, and 64 at most
    assert [role._take(*each) for each in streams] == [True] * 5 + [False]
    streams[0][0].num_tokens = 16  # 6 blocks now
    streams[1][0].is_open = False
    assert not role._take(*streams[5])
    streams[0][0].num_tokens = 0
    begun, request = answer(80, 1024)
    request.output_token_ids.extend([1] * 16)
    assert not role._take(begun, request)
    assert role._take(*streams[5])


def test_answers_that_stay_get_half_of_the_sequences() -> None:
    role = staying(num_blocks=10_000, max_num_seqs=5)
    assert [role._take(*answer(16, 16)) for _ in range(4)] == [True, True, False, False]


def test_one_answer_may_stay_however_long_it_may_grow() -> None:
    assert staying(num_blocks=64, max_num_seqs=1)._take(*answer(100, 100_000))


def test_a_grant_has_blocks_for_the_state_of_a_prompt() -> None:
    check_grant_fits(Grant(block_ids=range(5)), 17, 16, 3)
    with pytest.raises(ValueError, match="grant must have 5 blocks for 17 tokens, has 2"):
        check_grant_fits(Grant(block_ids=range(2)), 17, 16, 3)
