"""A device draws the same tokens as the CPU's sampler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from pretend_gpu import pretend_gpu

from engine.sampling import device_draw, random, sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

VOCAB_SIZE = 1003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sequence(num_output_tokens: int = 0, **params: Any) -> Sequence:
    settings = {"max_tokens": 100_000} | params
    tokens = [1, 2, 3] + [5] * num_output_tokens
    return Sequence(0, "r", tokens, 3, SamplingParams(**settings))


def logits(num_rows: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("seed", [0, 5, -5, 2**63 - 1, -(2**63), 5 + 2**32])
def test_clocks_are_the_same(seed: int) -> None:
    seeds, positions = (torch.tensor(column, device=DEVICE) for column in ([[seed], [seed]], [[123], [124]]))
    clocks = device_draw.exponentials(seeds, positions, VOCAB_SIZE).cpu().numpy()
    for row in (0, 1):
        expected = random.exponentials(seed, 123 + row, np.arange(VOCAB_SIZE))
        np.testing.assert_allclose(clocks[row], expected, rtol=1e-14)


FILTERS = [{}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 20}, {"min_p": 0.1},
           {"min_p": 0.01, "top_p": 0.95, "top_k": 400}, {"top_k": 5000}, {"top_k": -1}]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_same_whatever_rows_ask_for(dtype: torch.dtype) -> None:
    for step in range(20):
        seqs = [
            sequence(step, temperature=0.3 + 0.2 * index, seed=1000 * step + index, **params)
            for index, params in enumerate(FILTERS)
        ]
        values = logits(len(seqs), seed=step).to(dtype)
        assert device_draw.draw(values.to(DEVICE), seqs).tolist() == sampler.draw(values.clone(), seqs).tolist()


@pytest.mark.parametrize("params", FILTERS)
def test_filters_keep_the_same_tokens(params: dict[str, Any]) -> None:
    seqs = [sequence(temperature=0.7, **params)] * 5
    values = logits(5, seed=3)
    values[2] = values[2].round()  # makes many of them equal
    ours = device_draw.filtered_weights(values.to(DEVICE), seqs).cpu()
    torch.testing.assert_close(ours, sampler.filtered_weights(values.clone(), seqs), rtol=1e-14, atol=0)


@pytest.mark.parametrize("params", FILTERS)
def test_a_row_with_a_nan_has_no_next_token_and_its_neighbours_have(params: dict[str, Any]) -> None:
    seqs = [sequence(temperature=1.0, seed=number, **params) for number in range(3)]
    values = logits(3, seed=1)
    alone = [int(device_draw.draw(values[row : row + 1].to(DEVICE), seqs[row : row + 1])) for row in range(3)]
    values[1, 17] = float("nan")
    assert device_draw.draw(values.to(DEVICE), seqs).tolist() == [alone[0], INVALID_TOKEN, alone[2]]


@pytest.mark.parametrize("params", FILTERS)
def test_of_what_a_grammar_leaves(params: dict[str, Any]) -> None:
    """The grammar leaves one token, or a few."""
    seqs = [sequence(temperature=0.9, seed=seed, **params) for seed in range(8)]
    values = torch.full((8, VOCAB_SIZE), float("-inf"))
    for row, left in enumerate([[1002], [0], [5, 900], [3, 4, 5, 6, 7]] * 2):
        values[row, left] = logits(1, seed=row)[0, left]
    assert device_draw.draw(values.to(DEVICE), seqs).tolist() == sampler.draw(values.clone(), seqs).tolist()


def test_greedy_rows_have_the_same_tokens() -> None:
    values = logits(4, seed=2)
    values[1, 700:] = float("-inf")
    values[2, 17] = float("nan")
    values[3] = float("-inf")
    with nullcontext() if torch.cuda.is_available() else pretend_gpu():
        chosen = sampler.choose_largest(values.to("cuda")).tolist()
    assert chosen == sampler.choose_largest(values).tolist()
    assert chosen[2:] == [INVALID_TOKEN, INVALID_TOKEN]
