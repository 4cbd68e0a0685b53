"""What layers that keep a state compute between their products, in plain torch: for any device, and the reference for
kernels. See `engine.models.recurrent_ops` for the operations' arguments.

Shapes: T tokens, S sequences, C channels, J taps, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_states import RecurrentStep

EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


def convolve(x_TC: torch.Tensor, of: Convolution, inputs: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """A `Convolve` in plain torch."""
    num_seqs, num_kept = len(step.slots), inputs.shape[1]
    kept = torch.where(step.is_new[:, None, None], 0, inputs[step.slots])
    source = torch.cat((kept.flatten(0, 1), x_TC))
    seqs = torch.arange(num_seqs, device=x_TC.device)
    # In `source`, a sequence's tokens before its first one of this step end here, and those of this step begin here.
    ends_of_kept, firsts = (seqs + 1) * num_kept, num_seqs * num_kept + step.firsts

    def row_of(seq: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """`place`: from the sequence's first token of this step on; negative: before."""
        return torch.where(place < 0, ends_of_kept[seq], firsts[seq]) + place

    seq_T = torch.repeat_interleave(seqs, step.lengths, output_size=len(x_TC))
    place_T = torch.arange(len(x_TC), device=x_TC.device) - step.firsts[seq_T]
    y_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    if of.bias is not None:
        y_TC += of.bias.float()
    for tap in range(num_kept + 1):
        y_TC += source[row_of(seq_T, place_T + tap - num_kept)].float() * of.weight[:, tap].float()
    last = torch.arange(-num_kept, 0, device=x_TC.device)
    inputs[step.slots] = source[row_of(seqs[:, None], step.lengths[:, None] + last)]
    return (F.silu(y_TC) if of.has_silu else y_TC).to(x_TC.dtype)


def gates(
    a_TN: torch.Tensor, b_TN: torch.Tensor, rate_N: torch.Tensor, bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Gates` in plain torch."""
    return torch.exp(-rate_N * F.softplus(a_TN.float() + bias_N)), b_TN.sigmoid().float()


def delta_rule(
    qkv_TC: torch.Tensor, decay_TN: torch.Tensor, beta_TN: torch.Tensor, matrices: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    """A `DeltaRule` in plain torch: some launches for each token of the longest prompt, for all sequences at once."""
    _, num_heads, key_dim, value_dim = matrices.shape
    num_keys = (qkv_TC.shape[1] - num_heads * value_dim) // 2
    q, k, v = torch.split(qkv_TC.float(), [num_keys, num_keys, num_heads * value_dim], dim=1)
    q_TNK, k_TNK = (_of_length_one(each.reshape(len(each), -1, key_dim), num_heads) for each in (q, k))
    q_TNK, v_TNV = q_TNK * key_dim**-0.5, v.reshape(len(v), num_heads, value_dim)
    y_TNV = torch.empty_like(v_TNV)
    state = torch.where(step.is_new[:, None, None, None], 0, matrices[step.slots])
    for place in range(step.longest):
        # Which sequences are longer, only the device knows. The others compute their last token again, for nothing.
        is_token_S = (step.lengths > place)[:, None, None]
        rows = step.firsts + (step.lengths - 1).clamp_max(place)
        k_SNK = k_TNK[rows]
        decayed = state * decay_TN[rows][..., None, None]
        missing_SNV = v_TNV[rows] - (decayed * k_SNK[..., None]).sum(dim=-2)
        new = decayed + k_SNK[..., None] * (missing_SNV * beta_TN[rows][..., None])[..., None, :]
        y_TNV[rows] = torch.where(is_token_S, (new * q_TNK[rows][..., None]).sum(dim=-2), y_TNV[rows])
        state = torch.where(is_token_S[..., None], new, state)
    matrices[step.slots] = state
    return y_TNV.to(qkv_TC.dtype)


def _of_length_one(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Normed, and repeated for each value head: [T, key heads, K] -> [T, N, K]"""
    normed = x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPSILON)
    return normed.repeat_interleave(num_heads // x.shape[1], dim=1)


def steps(
    dt_TN: torch.Tensor, rate_N: torch.Tensor, bias_N: torch.Tensor, limits: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Steps` in plain torch."""
    dt_TN = F.softplus(dt_TN.float() + bias_N).clamp(*limits)
    return torch.exp(-rate_N * dt_TN), dt_TN


def scan(
    x_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    dt_TN: torch.Tensor,
    skip_N: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
) -> torch.Tensor:
    """A `Scan` in plain torch, in the same way as `delta_rule`."""
    _, num_heads, key_dim, value_dim = matrices.shape
    num_keys = (x_TC.shape[1] - num_heads * value_dim) // 2
    v, k, q = torch.split(x_TC.float(), [num_heads * value_dim, num_keys, num_keys], dim=1)
    v_TNV = v.reshape(len(v), num_heads, value_dim)
    num_sharing = num_heads * key_dim // num_keys
    k_TNK, q_TNK = (each.reshape(len(each), -1, key_dim).repeat_interleave(num_sharing, dim=1) for each in (k, q))
    added_TNV = v_TNV * dt_TN[..., None]
    y_TNV = torch.empty_like(v_TNV)
    state = torch.where(step.is_new[:, None, None, None], 0, matrices[step.slots])
    for place in range(step.longest):
        is_token_S = (step.lengths > place)[:, None, None]
        rows = step.firsts + (step.lengths - 1).clamp_max(place)
        new = state * decay_TN[rows][..., None, None] + k_TNK[rows][..., None] * added_TNV[rows][..., None, :]
        y_TNV[rows] = torch.where(is_token_S, (new * q_TNK[rows][..., None]).sum(dim=-2), y_TNV[rows])
        state = torch.where(is_token_S[..., None], new, state)
    matrices[step.slots] = state
    return (y_TNV + v_TNV * skip_N[:, None]).to(x_TC.dtype)


TORCH_OPS = RecurrentOps(convolve, delta_rule, gates, scan, steps)
