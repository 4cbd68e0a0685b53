"""The Triton kernels draw the same tokens as the CPU's sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICE

from engine.kernels.gpu import draw as kernels
from engine.kernels.gpu.draw import draw
from engine.sampling import sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

FILTERS = [{}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 20}, {"min_p": 0.1},
           {"min_p": 0.01, "top_p": 0.95, "top_k": 400}, {"top_k": 5000}, {"top_k": -1}, {"top_p": 1e-9},
           {"min_p": 0.3, "top_k": 50}]  # fmt: skip


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has several pieces, blocks and tiles."""
    monkeypatch.setattr(kernels, "PIECE", 512)
    monkeypatch.setattr(kernels, "RACE_BLOCKS", 64)
    monkeypatch.setattr(kernels, "BOUNDS_TILE", 1024)


def sequence(num_output_tokens: int = 0, **params: Any) -> Sequence:
    settings = {"max_tokens": 100_000} | params
    tokens = [1, 2, 3] + [5] * num_output_tokens
    return Sequence(0, "r", tokens, 3, SamplingParams(**settings))


def logits(num_rows: int, seed: int, *, vocab_size: int = 1003, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def drawn(values: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    tokens: list[int] = draw(values.to(DEVICE), seqs).tolist()
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_tokens_are_the_same_whatever_rows_ask_for(dtype: torch.dtype) -> None:
    for step in (0, 3):
        seqs = [
            sequence(step, temperature=0.3 + 0.2 * index, seed=(1000 * step + index) * (-1) ** step, **params)
            for index, params in enumerate(FILTERS)
        ]
        values = logits(len(seqs), seed=step).to(dtype)
        assert drawn(values, seqs) == sampler.draw(values.clone(), seqs).tolist()


@pytest.mark.parametrize("vocab_size", [1, 3, 513, 2049])
def test_of_any_vocabulary(vocab_size: int) -> None:
    seqs = [sequence(seed=seed, temperature=2.0, top_p=0.8) for seed in (2**63 - 1, -(2**63), 5 + 2**32)]
    values = logits(3, seed=vocab_size, vocab_size=vocab_size)
    assert drawn(values, seqs) == sampler.draw(values.clone(), seqs).tolist()


@pytest.mark.parametrize("params", FILTERS)
def test_which_tokens_can_be_drawn(params: dict[str, Any]) -> None:
    """With many equal logits, both zeros, and numbers on both sides of them."""
    values = logits(1, seed=3, vocab_size=60, scale=2.0).round()
    values[0, ::7] = -0.0
    values[0, 5] = float("-inf")
    seqs = [sequence(temperature=1.5, seed=seed, **params) for seed in range(6)]
    ours = drawn(values.expand(6, -1), seqs)
    assert ours == sampler.draw(values.expand(6, -1), seqs).tolist()
    kept = sampler.filtered_weights(values.clone(), seqs[:1])[0] > 0
    assert set(ours) <= set(kept.nonzero().flatten().tolist())


def test_neighbouring_numbers_of_16_bits_are_told_apart() -> None:
    values = torch.cat([sign * (1 + torch.arange(20) / 128) for sign in (1, -1)]).bfloat16()[None]
    assert len(values.unique()) == 40
    for top_k in (1, 21):
        seqs = [sequence(temperature=50.0, seed=seed, top_k=top_k) for seed in range(6)]
        assert drawn(values.expand(6, -1), seqs) == sampler.draw(values.expand(6, -1), seqs).tolist()


@pytest.mark.parametrize("params", FILTERS[::3])
def test_a_row_without_numbers_has_no_next_token_and_its_neighbours_have(params: dict[str, Any]) -> None:
    seqs = [sequence(temperature=1.0, seed=number, **params) for number in range(5)]
    values = logits(5, seed=1)
    alone = [drawn(values[row : row + 1], seqs[row : row + 1])[0] for row in (0, 4)]
    values[1, 17], values[2], values[3, 900] = float("nan"), float("-inf"), float("inf")
    assert drawn(values, seqs) == [alone[0], *[INVALID_TOKEN] * 3, alone[1]]


@pytest.mark.parametrize(
    "temperature", [5e-324, *(pytest.param(t, marks=pytest.mark.slow) for t in (1e-45, 1e-20)), 1e20]
)
def test_any_temperature(temperature: float) -> None:
    seqs = [sequence(temperature=temperature, seed=4, **params) for params in FILTERS[2:7]]
    values = logits(len(seqs), seed=2)
    assert drawn(values, seqs) == sampler.draw(values.clone(), seqs).tolist()


@pytest.mark.parametrize("params", FILTERS[:8:3])
def test_of_what_a_grammar_leaves(params: dict[str, Any]) -> None:
    """The grammar leaves one token, or a few."""
    seqs = [sequence(temperature=0.9, seed=seed, **params) for seed in range(4)]
    values = torch.full((4, 1003), float("-inf"))
    for row, left in enumerate([[1002], [0], [5, 900], [3, 4, 5, 6, 7]]):
        values[row, left] = logits(1, seed=row)[0, left]
    assert drawn(values, seqs) == sampler.draw(values.clone(), seqs).tolist()
