"""Layers of gated delta rules, in place of transformers' own modules, over the states of the engine's sequences.

transformers' modules take all tokens for one text, and keep its state in a cache of theirs. `DeltaNet` takes over such
a module's weights. It computes the same for each sequence of a step by itself, from the sequence's row of
`RecurrentStates`, and leaves the new state there.

    x ──products──> queries, keys, values ──convolution, SiLU──> delta rule ──norm, gated by z──> product ──> y

A sequence's tokens are computed one after the other, whatever chunks its prompt comes in. So its numbers depend neither
on the chunks nor on other sequences (README, P3). Many tokens at once would be faster, but would add up in another
order.

Shapes: T tokens, S sequences, D hidden, C channels, J taps, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from engine.models.recurrent_shape import DeltaLayer, RecurrentLayer
from engine.models.recurrent_states import RecurrentStates, RecurrentStep

EPSILON = 1e-6
"""Added to the squared length of queries and keys."""

Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RecurrentStep, bool], torch.Tensor]
"""(x [T, C], weight [C, J], inputs [rows, J - 1, C], step, has SiLU): each sequence's causal convolution, [T, C], or
SiLU of it. Updates `inputs`, each sequence's last ones."""
Gates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(a [T, N], b [T, N], rate [N], bias [N]): decay and beta of `DeltaRule`. rate and bias are float32."""
DeltaRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RecurrentStep], torch.Tensor]
"""(qkv [T, C], decay [T, N], beta [T, N], matrices [rows, N, K, V], step): [T, N, V] in the dtype of qkv. decay, the
factor of the matrices, beta and matrices are float32. Updates `matrices`."""


def gates(
    a_TN: torch.Tensor, b_TN: torch.Tensor, rate_N: torch.Tensor, bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Gates` in plain torch."""
    return torch.exp(-rate_N * F.softplus(a_TN.float() + bias_N)), b_TN.sigmoid().float()


@dataclass(frozen=True, slots=True)
class DeltaOps:
    """What a layer computes between its products."""

    convolve: Convolve
    delta_rule: DeltaRule
    gates: Gates = gates
    key_grain: int = 1
    """Dims of keys must be a multiple of this."""
    value_grain: int = 1
    most_key_dim: int = 1 << 30
    most_taps: int = 1 << 30

    channel_grain: int = 1

    def convolve_of(self, layer: RecurrentLayer) -> Convolve:
        """The convolution of a layer that has nothing else."""
        fits = layer.num_taps <= self.most_taps and layer.num_channels % self.channel_grain == 0
        return self.convolve if fits else convolve

    def fit(self, layer: DeltaLayer) -> bool:
        """Whether they can compute the layer."""
        has_keys = layer.key_dim % self.key_grain == 0 and layer.key_dim <= self.most_key_dim
        return has_keys and layer.value_dim % self.value_grain == 0 and layer.num_taps <= self.most_taps


def convolve(
    x_TC: torch.Tensor, weight_CJ: torch.Tensor, inputs: torch.Tensor, step: RecurrentStep, has_silu: bool
) -> torch.Tensor:
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
    for tap in range(num_kept + 1):
        y_TC += source[row_of(seq_T, place_T + tap - num_kept)].float() * weight_CJ[:, tap].float()
    last = torch.arange(-num_kept, 0, device=x_TC.device)
    inputs[step.slots] = source[row_of(seqs[:, None], step.lengths[:, None] + last)]
    return (F.silu(y_TC) if has_silu else y_TC).to(x_TC.dtype)


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


TORCH_DELTA_OPS = DeltaOps(convolve, delta_rule)
"""The reference, for any device."""


class _Projected(NamedTuple):
    """What a layer's products make of its input."""

    qkv: torch.Tensor
    """[T, C]"""
    z: torch.Tensor
    """[T, N * V]"""
    b: torch.Tensor
    """[T, N]"""
    a: torch.Tensor
    """[T, N]"""


class DeltaNet(nn.Module):
    """Stands for a module of transformers' in its layer, and has that module's parts."""

    _parts: Any

    def __init__(self, module: Any, layer: DeltaLayer, number: int, states: RecurrentStates, ops: DeltaOps) -> None:
        """`number`: the layer's among those that keep a state."""
        super().__init__()
        self._parts = module
        self._project = _of_groups if hasattr(module, "in_proj_qkvz") else _of_names
        self._weight_CJ = module.conv1d.weight.data.squeeze(1).contiguous()
        self._rate_N = module.A_log.data.float().exp()
        self._dt_bias_N = module.dt_bias.data.float()
        self._layer, self._number, self._states = layer, number, states
        self._ops = ops if ops.fit(layer) else TORCH_DELTA_OPS

    def forward(self, hidden_states: torch.Tensor, **_further: object) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]"""
        states, step, value_dim = self._states, self._states.step, self._layer.value_dim
        projected = self._project(self._parts, self._layer, hidden_states[0])
        qkv_TC = self._ops.convolve(projected.qkv, self._weight_CJ, states.inputs[self._number], step, True)
        decay_TN, beta_TN = self._ops.gates(projected.a, projected.b, self._rate_N, self._dt_bias_N)
        y_TNV = self._ops.delta_rule(qkv_TC, decay_TN, beta_TN, states.matrices[self._number], step)
        y = self._parts.norm(y_TNV.reshape(-1, value_dim), projected.z.reshape(-1, value_dim))
        output: torch.Tensor = self._parts.out_proj(y.reshape(1, len(y_TNV), -1))
        return output


def _of_names(module: Any, layer: DeltaLayer, x_TD: torch.Tensor) -> _Projected:
    """As in Qwen 3.5."""
    del layer
    return _Projected(
        module.in_proj_qkv(x_TD).contiguous(), module.in_proj_z(x_TD), module.in_proj_b(x_TD), module.in_proj_a(x_TD)
    )


def _of_groups(module: Any, layer: DeltaLayer, x_TD: torch.Tensor) -> _Projected:
    """As in Qwen3-Next, where two products have the parts of each key head side by side."""
    num_groups, num_shared = layer.num_key_heads, layer.num_value_heads // layer.num_key_heads
    sizes = layer.key_dim, layer.key_dim, num_shared * layer.value_dim, num_shared * layer.value_dim
    q, k, v, z = (
        part.flatten(1) for part in module.in_proj_qkvz(x_TD).unflatten(1, (num_groups, -1)).split(sizes, dim=2)
    )
    b, a = (part.flatten(1) for part in module.in_proj_ba(x_TD).unflatten(1, (num_groups, -1)).split(num_shared, dim=2))
    return _Projected(torch.cat((q, k, v), dim=1), z, b, a)
