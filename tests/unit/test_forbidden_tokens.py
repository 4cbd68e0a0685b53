"""The tokens that a row must not have are the same whatever rows are beside it, and many rows take no more launches on
a device than few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_cases import EOS, KINDS, grammar_text, write_model
from pretend_gpu import pretend_gpu, without_waiting

from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.scheduling.grammar import Grammars
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

VOCAB_SIZE = 300
ASKED: list[dict[str, Any]] = [
    {"logit_bias": {5: 100.0, 9: -100.0}},
    {"min_tokens": 50, "stop_token_ids": frozenset({7, 8})},
    {"allowed_token_ids": frozenset(range(20, 40)), "logit_bias": {21: 100.0, 60: 100.0}},
    {"allowed_token_ids": frozenset({3})},
    {"bad_words_token_ids": ((11,), (12, 13), (2, 12, 14)), "min_tokens": 2},
    {},
    *({"grammar": grammar_text(kind)} for kind in KINDS),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))


def sequences(grammars: Grammars, times: int = 1) -> list[Sequence]:
    """One sequence for each of `ASKED`, `times` times over."""
    seqs = []
    for number, asked in enumerate(ASKED * times):
        output = [2, 12] if "bad_words_token_ids" in asked else []
        grammar = grammars.state(asked["grammar"]) if "grammar" in asked else None
        params = SamplingParams(max_tokens=100, temperature=0, **asked)
        seqs.append(Sequence(number, "r", [1, 2, 3, *output], 3, params, grammar=grammar))
    return seqs


def logits(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3
    values[:, [EOS, 7, 11, 13, 14]] = 20.0  # likely tokens that many rows must not have
    return values.to(dtype)


def sampled(values: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    return Sampler(frozenset({EOS})).sample(values, seqs, torch.zeros(len(seqs), dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_what_it_has_alone(grammars: Grammars, dtype: torch.dtype) -> None:
    seqs, values = sequences(grammars), logits(len(ASKED), dtype)
    values[3, 250] = float("nan")  # of a token that is forbidden
    values[8, 40] = float("nan")
    together = values.clone()
    token_ids = sampled(together, seqs).tolist()
    for row, seq in enumerate(seqs):
        alone = values[row : row + 1].clone()
        assert sampled(alone, [seq]).tolist() == [token_ids[row]]
        assert torch.equal(alone[0].isnan(), together[row].isnan())
        assert torch.equal(alone[0].nan_to_num(0.5), together[row].nan_to_num(0.5))
    assert [row for row, token_id in enumerate(token_ids) if token_id == INVALID_TOKEN] == [3, 8]
    assert (token_ids[0], token_ids[2]) == (5, 21)
    assert torch.equal(together[5], values[5])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_many_rows_take_no_more_launches_than_few(grammars: Grammars) -> None:
    def num_launches(times: int) -> tuple[int, list[int]]:
        seqs, values = sequences(grammars, times), logits(times * len(ASKED)).to("cuda")
        before = gpu.num_launches
        with without_waiting():
            token_ids = sampled(values, seqs)
        return gpu.num_launches - before, token_ids.tolist()

    with pretend_gpu() as gpu:
        few, token_ids = num_launches(1)
        many, _ = num_launches(5)
    assert many == few
    assert token_ids == sampled(logits(len(ASKED)), sequences(grammars)).tolist()
