"""CPU kernels that choose the same tokens as `engine.sampling.sampler`. Call `load_cpu_kernels` first."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.scheduling.sequence import Sequence


def draw(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Like `engine.sampling.sampler.draw`, for float32 logits. Overwrites rows with filters."""
    params, vocab_size = [seq.sampling_params for seq in seqs], logits_RV.shape[1]
    integers = [
        (p.seed, seq.num_output_tokens, min(max(p.top_k, 0), vocab_size)) for p, seq in zip(params, seqs, strict=True)
    ]
    numbers = [(p.temperature, p.top_p, p.min_p) for p in params]
    token_ids: torch.Tensor = torch.ops.tandem_cpu.sample(
        logits_RV, torch.tensor(integers, dtype=torch.int64), torch.tensor(numbers, dtype=torch.float64)
    )
    return token_ids


def choose_largest(logits_SV: torch.Tensor, _: Seq[Sequence] = ()) -> torch.Tensor:
    """Like `engine.sampling.sampler.choose_largest`, for float32 logits."""
    token_ids: torch.Tensor = torch.ops.tandem_cpu.largest(logits_SV)
    return token_ids
