"""In bfloat16 the CPU kernels agree with plain torch, as closely as bfloat16 allows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from reference import Reference

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

NUM_LIKELIEST = 20
GREEDY = SamplingParams(temperature=0, max_tokens=1)


def log_probabilities(folder: Path, references: Seq[Reference], **settings: object) -> torch.Tensor:
    """Return the logprobs after each reference's prompt, [prompts, V]. Computes all but the last token in chunks of
    100, the last alone."""
    args = EngineArgs(model=str(folder), max_model_len=2048, num_kv_blocks=160, num_threads=2, **settings)  # type: ignore[arg-type]
    runner = Executor(create_engine_config(args))._worker.runner
    rows = []
    for reference in references:
        tokens = list(reference.prompt_token_ids)
        seq = Sequence(0, reference.name, tokens, len(tokens), GREEDY)
        seq.block_table = list(range(159, 159 - (-(-len(tokens) // 16)), -1))
        while seq.num_computed_tokens < len(tokens):
            num_left = len(tokens) - seq.num_computed_tokens
            num_new_tokens = min(100, num_left - 1) or 1
            step = runner.prepare(SchedulerOutput([ScheduledSequence(seq, num_new_tokens)], []))
            logits = runner.compute(step).logits
            seq.num_computed_tokens += num_new_tokens
        assert logits is not None
        rows.append(logits[0].float().log_softmax(-1))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def differences(model_folder: Path, references: list[Reference]) -> dict[str, torch.Tensor]:
    """How far plain torch and the kernels, in bfloat16, are from float32: [prompts, most probable tokens]."""
    references = [reference for reference in references if len(reference.prompt_token_ids) < 600][::2]
    exact = log_probabilities(model_folder, references, dtype="float32")
    likeliest = exact.topk(NUM_LIKELIEST).indices
    return {
        backend: (
            log_probabilities(model_folder, references, dtype="bfloat16", attention_backend=backend) - exact
        ).gather(1, likeliest)
        for backend in ("torch", "cpu")
    }


@pytest.mark.slow
def test_kernels_are_as_near_to_float32_as_plain_torch_is(differences: dict[str, torch.Tensor]) -> None:
    errors = {backend: difference.abs().mean().item() for backend, difference in differences.items()}
    assert errors["cpu"] < 1.25 * errors["torch"], errors


def test_kernels_stay_within_a_bound_of_plain_torch(differences: dict[str, torch.Tensor]) -> None:
    """The logprobs of the 20 most probable tokens differ by 0.1 on average and 0.5 at most; neighbouring bfloat16
    logits are 0.06 apart."""
    apart = (differences["cpu"] - differences["torch"]).abs()
    assert apart.mean() < 0.1, (apart.mean(), apart.max())
    assert apart.max() < 0.5, (apart.mean(), apart.max())
