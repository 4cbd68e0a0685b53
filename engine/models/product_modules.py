"""Modules that stand in transformers' code in place of its linear layers, and compute by our parts.

Shapes: T tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.layers import GatedLinear, Linear


class Direct(nn.Module):
    """A module without hooks: a call is its `forward`. torch looks for hooks in nine places, at each call."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.forward(x)
        return y


class Product(Direct):
    """One of our parts in place of torch's linear layer."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._linear(x.reshape(-1, x.shape[-1]).contiguous())
        return y.view(*x.shape[:-1], y.shape[-1])


class GatedProducts(Direct):
    """In place of a module of gate, up and down; has its `down`."""

    def __init__(self, gated: GatedLinear, down: nn.Module) -> None:
        super().__init__()
        self.down_proj = down
        self._gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._gated(x.reshape(-1, x.shape[-1]).contiguous())
        y: torch.Tensor = self.down_proj(h.view(*x.shape[:-1], h.shape[-1]))
        return y


class JointProduct:
    """Products of one input, computed as one when the first of them is called with it."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        self._linear, self._sizes = linear, sizes
        self._x: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def outputs(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Of product `number`: [..., in] -> [T, its outputs]."""
        if self._x is not x:
            y = self._linear(x.reshape(-1, x.shape[-1]).contiguous())
            self._x, self._outputs = x, torch.split_with_sizes(y, self._sizes, dim=-1)
        outputs = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._x, self._outputs = None, ()
        return outputs


class Sibling(Direct):
    """One of the products of a `JointProduct`."""

    def __init__(self, joint: JointProduct, number: int) -> None:
        super().__init__()
        self._joint, self._number = joint, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._joint.outputs(x, self._number)
        return y.view(*x.shape[:-1], y.shape[-1])
