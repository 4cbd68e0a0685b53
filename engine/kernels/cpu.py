"""The CPU kernels as the layers of a decoder. `load_cpu_kernels` comes first. bfloat16 only.

Shapes: T tokens, D hidden, F intermediate, V vocabulary.
"""

from __future__ import annotations

import torch

from engine.layers import LayerKit, RMSNorm


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` in one pass, with the residual sum before it. Overwrites `x` with the sum."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = torch.ops.tandem_cpu.add_rms_norm(x, None, self.weight, self.eps)
        return h

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.ops.tandem_cpu.add_rms_norm(x, delta, self.weight, self.eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `engine.layers.silu_mul`, in one pass."""
    h: torch.Tensor = torch.ops.tandem_cpu.silu_mul(gate_up)
    return h


CPU_LAYERS = LayerKit(FusedRMSNorm, silu_mul)
