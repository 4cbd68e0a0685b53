"""Choices of `engine.sampling.sampler` by CPU kernels, the same tokens. `load_cpu_kernels` comes first."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.scheduling.sequence import Sequence


def draw_unfiltered(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """As `engine.sampling.sampler.draw`, for rows whose parameters leave no token out. float32."""
    params = [seq.sampling_params for seq in seqs]
    # 64-bit seeds, signed or not, as the bits that they are.
    seeds = [(p.seed + 2**63) % 2**64 - 2**63 for p in params]
    token_ids: torch.Tensor = torch.ops.tandem_cpu.sample(
        logits_RV,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor([seq.num_output_tokens for seq in seqs], dtype=torch.int64),
    )
    return token_ids


def choose_largest(logits_SV: torch.Tensor, _: Seq[Sequence] = ()) -> torch.Tensor:
    """As `engine.sampling.sampler.choose_largest`. float32."""
    token_ids: torch.Tensor = torch.ops.tandem_cpu.largest(logits_SV)
    return token_ids
