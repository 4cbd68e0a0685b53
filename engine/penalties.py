"""Penalties for what was said before: steps 2 and 3 of `engine.sampler`, for all rows that ask for some at once.

Each sequence's last token is taken from where the model has it: a step may be launched before the host knows it.

Shapes: S rows, R rows that ask for penalties, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.sequence import Sequence
from engine.to_device import integers, to_device

_LARGEST = 1e38
"""Logits stay within this after penalties, so that none is infinite: in bfloat16, too."""


def apply_penalties(logits_SV: torch.Tensor, seqs: Seq[Sequence], last_token_ids_S: torch.Tensor) -> None:
    """Repetition, frequency and presence penalty, in place. In float32, rounded after the first and at the end."""
    rows = [row for row, seq in enumerate(seqs) if seq.sampling_params.has_penalties]
    if not rows:
        return
    device, vocab_size = logits_SV.device, logits_SV.shape[1]
    asking = [seqs[row] for row in rows]
    index_R = integers(rows, device)
    is_seen_RV, counts_RV = _count(asking, last_token_ids_S.index_select(0, index_R), vocab_size)

    def column(name: str) -> torch.Tensor:
        return to_device(np.array([[getattr(seq.sampling_params, name)] for seq in asking], dtype=np.float32), device)

    repetition = column("repetition_penalty")
    x_RV = logits_SV.index_select(0, index_R).float()
    repeated_RV = torch.where(x_RV > 0, x_RV / repetition, x_RV * repetition).clamp_(-_LARGEST, _LARGEST)
    x_RV = torch.where(is_seen_RV & (repetition != 1), repeated_RV, x_RV).to(logits_SV.dtype).float()
    x_RV -= torch.where(counts_RV > 0, counts_RV * column("frequency_penalty") + column("presence_penalty"), 0.0)
    logits_SV.index_copy_(0, index_R, x_RV.to(logits_SV.dtype))


def _count(seqs: Seq[Sequence], last_token_ids_R: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens occur in prompt or answer: [R, V] bool; how often in the answer: [R, V] float32."""
    device = last_token_ids_R.device
    prompts, answers = [], []
    for row, seq in enumerate(seqs):
        known = np.array(seq.token_ids[:-1], dtype=np.int64) + row * vocab_size
        prompts.append(known[: seq.num_prompt_tokens])
        answers.append(known[seq.num_prompt_tokens :])
    answers_N = to_device(np.concatenate(answers), device)
    counts_RV = torch.zeros(len(seqs), vocab_size, device=device)
    counts_RV.view(-1).scatter_add_(0, answers_N, torch.ones(len(answers_N), device=device))
    # What is no token will fail its sequence; until then it must stay within the row.
    last_R1 = last_token_ids_R.clamp_min(0).unsqueeze(1)
    has_answer = np.array([[seq.num_output_tokens > 0] for seq in seqs], dtype=np.float32)
    counts_RV.scatter_add_(1, last_R1, to_device(has_answer, device))
    is_seen_RV = counts_RV > 0
    is_seen_RV.view(-1).index_fill_(0, to_device(np.concatenate(prompts), device), True)
    return is_seen_RV.scatter_(1, last_R1, True), counts_RV
