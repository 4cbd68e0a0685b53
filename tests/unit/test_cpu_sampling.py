"""The CPU kernels that sample choose the same tokens as the sampler."""

from __future__ import annotations

import random
from collections.abc import Sequence as Sequence_
from typing import Any

import pytest
import torch

from engine.kernels.cpu_sampling import choose_largest as kernel_largest
from engine.kernels.cpu_sampling import draw as kernel_draw
from engine.sampling.sampler import HOPELESS, Sampler, choose_largest, draw, filtered_weights
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

pytestmark = pytest.mark.usefixtures("cpu_threads")


@pytest.mark.parametrize("vocab_size", [1, 50, 49_152])
@pytest.mark.parametrize("temperature", [1e-45, 0.01, 0.9, 3.0])
def test_draws_are_those_of_the_sampler_to_the_token(vocab_size: int, temperature: float) -> None:
    logits = 4 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1))
    seqs = [
        Sequence(
            0, "r", [1, 2, *[3] * (i % 7)], 2, SamplingParams(temperature=temperature, seed=(-1) ** i * i * 7919**4)
        )
        for i in range(40)
    ]
    assert kernel_draw(logits, seqs).tolist() == draw(logits, seqs).tolist()


FILTERS = {
    "top_k": (-1, 1, 2, 20, 64, 999, 2**40), "top_p": (1e-9, 0.3, 0.9, 0.999), "min_p": (1e-300, 1e-10, 0.05, 1.0),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [("top_k",), ("top_p",), ("min_p",), tuple(FILTERS)], ids="+".join)
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 300, 49_152])
def test_filters_keep_what_those_of_the_sampler_keep(vocab_size: int, names: tuple[str, ...]) -> None:
    """Among tokens that can win, they keep all that are as likely as the last one kept, also at temperatures that level
    all."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(3)
    for spread in (0.0, 0.01, 1.0, 8.0, 1e4):
        logits = spread * torch.randn(8, vocab_size, generator=generator)
        logits[2] = logits[2].bfloat16().float()
        logits[3] = (2 * logits[3]).round() / 2  # makes many of them equal
        logits[4, torch.rand(vocab_size, generator=generator) < 0.9] = float("-inf")
        logits[4, vocab_size // 2], logits[5] = 1.0, logits[5] - 1e4
        params: list[dict[str, Any]] = [{name: rng.choice(FILTERS[name]) for name in names} for _ in logits]
        temperatures = [5e-324, 0.3, 1.0, 1.0, 1.0, 1.7, 1e5, 1e300]
        settings = [SamplingParams(temperature=t, seed=7, **p) for t, p in zip(temperatures, params, strict=True)]
        seqs, plain = (
            [Sequence(0, "r", [1] * (2 + i), 2, each) for i, each in enumerate(some)]
            for some in (settings, [SamplingParams(temperature=t) for t in temperatures])
        )
        can_win = filtered_weights(logits, plain) > HOPELESS
        kept, expected = logits.clone(), filtered_weights(logits, seqs) > HOPELESS
        assert kernel_draw(kept, seqs).tolist() == draw(logits, seqs).tolist()
        assert torch.equal((kept > float("-inf")) & can_win, expected)


def test_a_row_with_a_nan_has_no_next_token() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 99], logits[2] = float("nan"), float("-inf")
    seqs = [Sequence(0, "r", [1], 1, SamplingParams(seed=i)) for i in range(3)]
    seqs += [Sequence(0, "r", [1], 1, SamplingParams(seed=i, top_k=3, top_p=0.9, min_p=0.1)) for i in range(3)]
    assert kernel_draw(logits.repeat(2, 1), seqs)[[1, 2, 4, 5]].tolist() == [INVALID_TOKEN] * 4


@pytest.mark.parametrize("vocab_size", [1, 3, 50, 49_152])
def test_the_largest_is_that_of_the_sampler(vocab_size: int) -> None:
    logits = torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(4))
    logits[1], logits[2], logits[3], logits[4] = 0.0, -0.0, float("-inf"), -3e38
    logits[5, : vocab_size // 2] = -0.0
    logits[5, vocab_size // 2 :] = 0.0  # equal to the first half
    logits[6, -1], logits[7, -1], logits[8, -1] = float("nan"), -float("nan"), float("inf")
    assert kernel_largest(logits).tolist() == choose_largest(logits).tolist()


def test_greedy_rows_draw_nothing() -> None:
    asked: list[str] = []

    def kernel(logits: torch.Tensor, seqs: Sequence_[Sequence]) -> torch.Tensor:
        asked.extend(seq.request_id for seq in seqs)
        return kernel_draw(logits, seqs)

    settings: dict[str, dict[str, float]] = {
        "plain": {}, "greedy": {"temperature": 0.0}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.1},
    }  # fmt: skip
    seqs = [Sequence(0, name, [1], 1, SamplingParams(seed=3, **s)) for name, s in settings.items()]  # type: ignore[arg-type]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    last_token_ids = torch.tensor([1] * len(seqs))
    with_kernel = Sampler(frozenset(), draw_rows=kernel).sample(logits.clone(), seqs, last_token_ids)
    assert with_kernel.tolist() == Sampler(frozenset()).sample(logits, seqs, last_token_ids).tolist()
    assert asked == ["plain", "top_k", "top_p", "min_p"]
