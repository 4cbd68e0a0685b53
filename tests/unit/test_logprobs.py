"""Logprobs of tokens: compared with the definition in float64, with the same bits in any batch, and always in one
order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.outputs import Logprob, TokenLogprobs
from engine.sampling import logprobs as module
from engine.sampling.logprobs import ROWS_AT_A_TIME, RawLogits
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

VOCAB_SIZE = 4096


def sequences(*asked: int | None) -> list[Sequence]:
    return [Sequence(10 + n, "r", [1], 1, SamplingParams(logprobs=num)) for n, num in enumerate(asked)]


def logits(num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    return values.to(dtype)


@pytest.fixture(params=["host", "device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the code for a CPU and with the code for a GPU, both on a CPU."""
    if request.param == "device":
        monkeypatch.setattr(module, "_numbers_on_host", module._numbers_on_device)


def logprobs(values: torch.Tensor, seqs: list[Sequence], token_ids: list[int]) -> dict[int, TokenLogprobs]:
    raw = RawLogits.of(values, seqs)
    assert raw is not None
    values.zero_()  # a sampler may change the logits later
    told = raw.logprobs(torch.tensor(token_ids)).read()
    return {seq_id: only for seq_id, [only] in told.items()}


def by_definition(values_V: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    row = values_V.double()
    of_token = (row - row.exp().sum().log()).tolist()
    ordered = sorted(range(len(of_token)), key=lambda i: (-float(values_V[i]), i))
    entries = {i: Logprob(i, of_token[i], rank) for rank, i in enumerate(ordered, 1)}
    return TokenLogprobs(entries[token_id], [entries[i] for i in ordered[:num_top]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_defined(dtype: torch.dtype) -> None:
    values = logits(4, dtype)
    token_ids = [int(values[0].argmax()), 7, 4095, int(values[3].argmin())]
    seqs = sequences(3, 0, 20, 1)
    told = logprobs(values.clone(), seqs, token_ids)
    assert list(told) == [seq.seq_id for seq in seqs]
    for row, seq in enumerate(seqs):
        expected = by_definition(values[row], token_ids[row], seq.sampling_params.logprobs or 0)
        given = told[seq.seq_id]
        for one, other in zip([given.sampled, *given.top], [expected.sampled, *expected.top], strict=True):
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert math.isclose(one.logprob, other.logprob, rel_tol=1e-5)
    assert told[10].sampled.rank == 1


def test_only_of_those_that_ask() -> None:
    assert RawLogits.of(logits(2), sequences(None, None)) is None
    values = logits(3)
    told = logprobs(values.clone(), sequences(None, 2, None), [1, 2, 3])
    assert list(told) == [11]
    assert told[11].sampled.token_id == 2
    assert told[11].top == logprobs(values[1:2].clone(), sequences(2), [2])[10].top


def test_the_lower_id_comes_first_among_equals() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, -1.0, 2.0]])
    told = logprobs(values, sequences(7), [6])[10]
    assert [each.token_id for each in told.top] == [1, 2, 6, 0, 3, 4, 5]
    assert [each.rank for each in told.top] == [1, 2, 3, 4, 5, 6, 7]
    assert told.sampled == told.top[2]
    many = torch.zeros(1, VOCAB_SIZE)
    many[0, 1::3] = 1.0
    many[0, 5::500] = 2.0
    told = logprobs(many, sequences(20), [1])[10]
    assert [each.token_id for each in told.top] == [*range(5, VOCAB_SIZE, 500), *range(1, 34, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    num_rows = 2 * ROWS_AT_A_TIME + 5
    values = logits(num_rows, dtype)
    token_ids = [int(row) for row in values.argmax(dim=-1)]
    together = logprobs(values.clone(), sequences(*[5] * num_rows), token_ids)
    for row in range(num_rows):
        alone = logprobs(values[row : row + 1].clone(), sequences(5), [token_ids[row]])
        assert alone[10] == together[10 + row]


def test_whoever_has_no_token_spoils_no_other() -> None:
    values = logits(2)
    values[0, 5] = float("nan")
    told = logprobs(values.clone(), sequences(2, 2), [INVALID_TOKEN, 9])
    assert told[11] == logprobs(values[1:].clone(), sequences(2), [9])[10]


def test_what_cannot_be_and_fewer_tokens_than_alternatives() -> None:
    values = torch.tensor([[0.0, float("-inf"), 0.0]])
    told = logprobs(values, sequences(20), [1])[10]
    assert told.sampled == Logprob(1, float("-inf"), 3)
    assert [(each.token_id, round(each.logprob, 6)) for each in told.top[:2]] == [(0, -0.693147), (2, -0.693147)]
    assert len(told.top) == 3


@pytest.mark.parametrize("num", [-1, 21, True, 1.5, "3"])
def test_how_many_may_be_asked_for(num: Any) -> None:
    with pytest.raises(ValueError, match=r"logprobs must be an integer in \[0, 20\], is "):
        SamplingParams(logprobs=num)


def test_where_a_row_begins_does_not_depend_on_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row begins at a multiple of 16 bytes, because the order in which CUDA's kernel adds up depends on that. The
    padding of a row is no token, and does not change the others' logprobs."""
    seen: list[torch.Tensor] = []
    log_softmax = torch.Tensor.log_softmax

    def watched(x: torch.Tensor, dim: int) -> torch.Tensor:
        seen.append(x)
        return log_softmax(x, dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", watched)
    values, seqs = logits(3)[:, :4093].contiguous(), sequences(2, 2, 2)
    token_ids = [1, 4092, 7]
    told = logprobs(values.clone(), seqs, token_ids)
    for row, seq in enumerate(seqs):
        expected = by_definition(values[row], token_ids[row], 2)
        assert told[seq.seq_id].sampled.logprob == pytest.approx(expected.sampled.logprob, abs=1e-5)
        assert [each.token_id for each in told[seq.seq_id].top] == [each.token_id for each in expected.top]
    if module._numbers_on_host is module._numbers_on_device:
        assert {each.stride(0) * each.itemsize % 16 for each in seen} == {0}
