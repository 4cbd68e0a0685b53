"""gpt-oss' experts: weights that stay in MXFP4, and their gate.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025: `down(gate * sigmoid(alpha * gate) * (up + 1))` of clamped gate
and up, whose outputs alternate; each product has a bias. The form of the weights: engine/model_loader/mxfp4.py.

Plain torch cannot compute with them: without kernels for them, they are dequantised when they are loaded.

Shapes: E experts, N outputs, K inputs, G = K / 32 groups; of a gate, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.expert_products import ExpertWeight

GROUP, BIAS = 32, 127
"""Number of inputs that share a power of two, and the bias of its exponent."""


@dataclass(frozen=True, slots=True)
class FourBitStack:
    """One weight of every expert, as the checkpoint has it, and its bias."""

    pairs: torch.Tensor
    """[E, N, K / 2] uint8: two numbers each, the lower half first."""
    scales: torch.Tensor
    """[E, N, G] uint8: the power's exponent + 127."""
    bias: torch.Tensor
    """[E, N] in the model's dtype."""


BiasedExpert = tuple[ExpertWeight, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The weights of a gate, up and down, in 16 bits, and their biases."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2I], gate and up alternately -> [..., I]. In float32, rounded once."""
        gate, up = gate_up.float()[..., ::2], gate_up.float()[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * (gate * self.alpha).sigmoid() * (up + 1)).to(gate_up.dtype)
