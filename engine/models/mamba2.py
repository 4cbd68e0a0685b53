"""Mamba-2 layers (T. Dao and A. Gu, "Transformers are SSMs", 2024), in place of transformers' own modules, over the
states of the engine's sequences.

`Mamba2` takes over the weights of such a module (Nemotron-H, Granite 4, Falcon-H1, Bamba). It computes the same for
each sequence of a step by itself, from the sequence's row of `RecurrentStates`, and leaves the new state there.

    x ──product──> gate; values, keys, queries ──convolution, SiLU──> scan ──norm, gated──> product ──> y
              └──> how long a step each head takes ────────────────────^

The literature names the keys B, the queries C and the values x.

Shapes: T tokens, D hidden, C channels, N heads, V dims of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_shape import Mamba2Layer
from engine.models.recurrent_states import RecurrentStates


class Mamba2(nn.Module):
    """Stands for a module of transformers' in its layer, and has that module's parts."""

    _parts: Any

    def __init__(
        self, module: Any, layer: Mamba2Layer, number: int, states: RecurrentStates, ops: RecurrentOps
    ) -> None:
        """`number`: the layer's among those that keep a state."""
        super().__init__()
        self._parts = module
        bias = None if module.conv1d.bias is None else module.conv1d.bias.data
        self._convolution = Convolution(module.conv1d.weight.data.squeeze(1).contiguous(), bias, has_silu=True)
        self._rate_N = module.A_log.data.float().exp()
        self._dt_bias_N, self._skip_N = module.dt_bias.data.float(), module.D.data.float()
        least, most = module.time_step_limit
        self._dt_limits = float(least), float(most)
        # Falcon-H1 scales the product's input and outputs, and may have no norm.
        self._scale = getattr(module, "ssm_in_multiplier", 1.0)
        self._scales = module.mup_vector.flatten() if hasattr(module, "mup_vector") else None
        self._has_norm = getattr(module, "mamba_rms_norm", True)
        self._sizes = layer.num_heads * layer.head_dim, layer.num_channels, layer.num_heads
        self._number, self._states, self._ops = number, states, ops

    def forward(self, hidden_states: torch.Tensor, **_further: object) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]"""
        states, step, x_TD = self._states, self._states.step, hidden_states[0]
        projected = self._parts.in_proj(x_TD if self._scale == 1.0 else x_TD * self._scale)
        if self._scales is not None:
            projected = projected * self._scales
        gate, x_TC, dt_TN = projected.split(self._sizes, dim=1)
        x_TC = self._ops.convolve(x_TC.contiguous(), self._convolution, states.inputs[self._number], step)
        decay_TN, dt_TN = self._ops.steps(dt_TN, self._rate_N, self._dt_bias_N, self._dt_limits)
        y = self._ops.scan(x_TC, decay_TN, dt_TN, self._skip_N, states.matrices[self._number], step).flatten(1)
        y = self._parts.norm(y, gate) if self._has_norm else y * F.silu(gate)
        output: torch.Tensor = self._parts.out_proj(y[None].to(hidden_states.dtype))
        return output
