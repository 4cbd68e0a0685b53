"""Penalties compared with their definition, token by token, in each dtype of logits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from engine.sampling.penalties import apply_penalties
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def penalised(logits_V: torch.Tensor, seq: Sequence, last_token_id: int) -> torch.Tensor:
    """What vLLM's documentation says of each penalty, computed token by token, and rounded after the first penalty and
    at the end."""
    params, said = seq.sampling_params, Counter(seq.token_ids[seq.num_prompt_tokens : -1])
    if seq.num_output_tokens:
        said[last_token_id] += 1
    result = logits_V.clone()
    for token in {*seq.token_ids[:-1], last_token_id}:
        x = logits_V[token].float()
        if params.repetition_penalty != 1:
            r = torch.tensor(params.repetition_penalty)
            x = (x / r if x > 0 else x * r).to(logits_V.dtype).float()
        if said[token]:
            x = x - (torch.tensor(params.frequency_penalty) * said[token] + params.presence_penalty)
        result[token] = x.to(logits_V.dtype)
    return result


def random_sequence(rng: np.random.Generator, vocab_size: int, **params: float) -> Sequence:
    length = int(rng.integers(1, 40))
    token_ids = rng.integers(0, vocab_size, length).tolist()
    return Sequence(0, "r", token_ids, int(rng.integers(1, length + 1)), SamplingParams(**params))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "names",
    [
        ("repetition_penalty",),
        ("frequency_penalty",),
        ("presence_penalty",),
        ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    ],
    ids=lambda names: "+".join(name.split("_")[0] for name in names),
)
def test_each_row_is_what_the_definition_says(names: tuple[str, ...], dtype: torch.dtype) -> None:
    rng, vocab_size = np.random.default_rng(len(names)), 30
    values = {"repetition_penalty": [1.0, 1.3, 0.7], "frequency_penalty": [0, 0.45, -1], "presence_penalty": [0, 0.7]}
    for _ in range(20):
        seqs = [
            random_sequence(rng, vocab_size, **{name: float(rng.choice(values[name])) for name in names})
            for _ in range(int(rng.integers(1, 6)))
        ]
        logits_SV = (torch.from_numpy(rng.normal(size=(len(seqs), vocab_size))) * 5).to(dtype)
        last = [int(rng.integers(vocab_size)) if seq.num_output_tokens else seq.token_ids[-1] for seq in seqs]
        wanted = [penalised(logits_V, seq, token) for logits_V, seq, token in zip(logits_SV, seqs, last, strict=True)]
        apply_penalties(logits_SV, seqs, torch.tensor(last))
        assert logits_SV.equal(torch.stack(wanted))


def test_without_a_repetition_penalty_large_logits_stay_as_they_are() -> None:
    seqs = [Sequence(0, "r", [1, 2, 3], 1, SamplingParams(presence_penalty=2.0)) for _ in range(2)]
    logits_SV = torch.tensor([[0, -65504.0, 65504.0, 0, 0], [0, float("-inf"), 0, 0, 0]], dtype=torch.float16)
    apply_penalties(logits_SV, seqs, torch.tensor([4, 4]))
    assert logits_SV.tolist() == [[0, -65504.0, 65504.0, 0, -2.0], [0, float("-inf"), -2.0, 0, -2.0]]


def test_what_is_no_token_changes_no_other_row() -> None:
    """A sequence whose logits are NaN has -1 as its last token. That must not affect its neighbours."""
    seqs = [Sequence(0, "r", [1, 2, 3], 1, SamplingParams(presence_penalty=1.0)) for _ in range(2)]
    logits_SV = torch.zeros(2, 9)
    apply_penalties(logits_SV, seqs, torch.tensor([4, -1]))
    assert logits_SV[0].nonzero().flatten().tolist() == [2, 4]
