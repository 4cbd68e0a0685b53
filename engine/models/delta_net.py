"""Layers of gated delta rules, in place of transformers' own modules, over the states of the engine's sequences.

transformers' modules take all tokens for one text, and keep its state in a cache of theirs. `DeltaNet` takes over such
a module's weights. It computes the same for each sequence of a step by itself, from the sequence's row of
`RecurrentStates`, and leaves the new state there.

    x ──products──> queries, keys, values ──convolution, SiLU──> delta rule ──norm, gated by z──> product ──> y

Shapes: T tokens, S sequences, D hidden, C channels, J taps, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_shape import DeltaLayer
from engine.models.recurrent_states import RecurrentStates

SIBLINGS = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))
"""Products of the same input: as in Qwen 3.5, and as in Qwen3-Next."""


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

    def __init__(self, module: Any, layer: DeltaLayer, number: int, states: RecurrentStates, ops: RecurrentOps) -> None:
        """`number`: the layer's among those that keep a state."""
        super().__init__()
        self._parts = module
        self._project = _of_groups if hasattr(module, "in_proj_qkvz") else _of_names
        self._convolution = Convolution(module.conv1d.weight.data.squeeze(1).contiguous(), has_silu=True)
        self._rate_N = module.A_log.data.float().exp()
        self._dt_bias_N = module.dt_bias.data.float()
        self._layer, self._number, self._states, self._ops = layer, number, states, ops

    def forward(self, hidden_states: torch.Tensor, **_further: object) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]"""
        states, step, value_dim = self._states, self._states.step, self._layer.value_dim
        projected = self._project(self._parts, self._layer, hidden_states[0])
        qkv_TC = self._ops.convolve(projected.qkv, self._convolution, states.inputs[self._number], step)
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
