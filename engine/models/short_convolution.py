"""Layers of short convolutions (LFM2), in place of transformers' own modules, over the states of an engine's sequences.

    x ──product──> b, c, u;   y = product(c * convolution(b * u)), a causal one of each sequence's channels

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_states import RecurrentStates


class ShortConvolution(nn.Module):
    """Stands for a module of transformers' in its layer, and has that module's parts."""

    _parts: Any

    def __init__(self, module: Any, number: int, states: RecurrentStates, ops: RecurrentOps) -> None:
        """`number`: the layer's among those that keep a state."""
        super().__init__()
        self._parts = module
        self._convolution = Convolution(module.conv.weight.data.squeeze(1).contiguous())
        self._number, self._states, self._ops = number, states, ops

    def forward(self, hidden_states: torch.Tensor, **_further: object) -> torch.Tensor:
        """[1, T, D] -> [1, T, D]"""
        states = self._states
        b_TD, c_TD, u_TD = self._parts.in_proj(hidden_states[0]).chunk(3, dim=1)
        y_TD = self._ops.convolve(b_TD * u_TD, self._convolution, states.inputs[self._number], states.step)
        output: torch.Tensor = self._parts.out_proj((c_TD * y_TD)[None])
        return output
