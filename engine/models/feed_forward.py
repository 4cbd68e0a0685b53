"""The dense feed-forward of the Llama family.

Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import torch

from engine.models.parts import PartsFactory


class GatedFeedForward:
    """`down(silu(gate(h)) * up(h))` (N. Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, factory: PartsFactory, name: str, hidden_size: int, intermediate_size: int, has_bias: bool):
        D, I = hidden_size, intermediate_size  # noqa: E741
        self.gated = factory.gated_linear(f"{name}.gate_proj", f"{name}.up_proj", I, D, has_bias)
        self.down = factory.row_parallel_linear(f"{name}.down_proj", D, I, has_bias)

    def __call__(self, h_TD: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(h_TD))
