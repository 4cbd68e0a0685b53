"""Penalties for tokens that occurred before: steps 2 and 3 of the sampler, for all rows that ask for them at once.

Each sequence's last token is read on the device, since a step may be launched before the host knows it.

Only the logits of tokens that a sequence has are gathered, changed and written back: processing whole rows of the
vocabulary takes ten times as long. A token that occurs several times is computed as often, with equal results.

Shapes: S rows, R rows that ask for penalties, V vocabulary, N tokens of all these rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.scheduling.sequence import Sequence
from engine.to_device import integers, to_device

_LARGEST = {torch.float32: 1e38, torch.bfloat16: 1e38, torch.float16: 3e4}
"""By dtype: bound of the logits after the repetition penalty, so that none becomes infinite."""


def apply_penalties(logits_SV: torch.Tensor, seqs: Seq[Sequence], last_token_ids_S: torch.Tensor) -> None:
    """Apply repetition, frequency and presence penalty in place. Computes in float32, and rounds to the logits' dtype
    after the repetition penalty and at the end."""
    rows = [row for row, seq in enumerate(seqs) if seq.sampling_params.has_penalties]
    if not rows:
        return
    asking = [seqs[row] for row in rows]
    device = logits_SV.device
    cells_N = _cells(rows, asking, last_token_ids_S, logits_SV.shape[1])
    lengths = [len(seq) - 1 for seq in asking] + [1] * len(asking)  # in the order of `_cells`

    def of_each(name: str) -> torch.Tensor:
        values = np.array([getattr(seq.sampling_params, name) for seq in asking] * 2, dtype=np.float32)
        return to_device(values.repeat(lengths), device)

    logits = logits_SV.view(-1)
    repetition_N = of_each("repetition_penalty")
    x_N = logits.index_select(0, cells_N).float()
    largest = _LARGEST[logits.dtype]
    repeated_N = torch.where(x_N > 0, x_N / repetition_N, x_N * repetition_N).clamp_(-largest, largest)
    x_N = torch.where(repetition_N != 1, repeated_N, x_N).to(logits.dtype).float()
    if any(seq.sampling_params.frequency_penalty or seq.sampling_params.presence_penalty for seq in asking):
        is_said_N = to_device(_is_said(asking), device)
        counts_N = torch.zeros_like(logits, dtype=torch.float32).scatter_add_(0, cells_N, is_said_N)[cells_N]
        said_N = counts_N * of_each("frequency_penalty") + of_each("presence_penalty")
        x_N -= torch.where(counts_N > 0, said_N, 0.0)
    logits.index_copy_(0, cells_N, x_N.to(logits.dtype))


def _cells(rows: Seq[int], seqs: Seq[Sequence], last_token_ids_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N] int64: indices of the sequences' tokens in the flattened logits; first the known tokens of all sequences,
    then the last token of each."""
    device = last_token_ids_S.device
    # No view of a sequence's tokens may outlive this: the array could not grow.
    known = [np.asarray(seq.token_ids)[:-1] + row * vocab_size for row, seq in zip(rows, seqs, strict=True)]
    # INVALID_TOKEN (-1) will fail its sequence; until then its index must stay within the row.
    index_R = integers(rows, device)
    last_R = last_token_ids_S.index_select(0, index_R).clamp_min(0) + index_R * vocab_size
    return torch.cat([to_device(np.concatenate(known), device), last_R])


def _is_said(seqs: Seq[Sequence]) -> np.ndarray:
    """[N] float32, in the order of `_cells`: 1 for tokens of the answer, 0 for tokens of the prompt."""
    is_said = [np.arange(len(seq) - 1) >= seq.num_prompt_tokens for seq in seqs]
    is_said.append(np.array([seq.num_output_tokens > 0 for seq in seqs]))
    return np.concatenate(is_said).astype(np.float32)
