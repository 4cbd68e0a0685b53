"""A decoder's parts, by the Triton kernels: `Decoder(…, TRITON_PARTS)`. Products are torch's."""

from __future__ import annotations

import torch

from engine.kernels.gpu.pointwise import add_rms_norm, silu_multiply
from engine.layers import GatedLinear, RMSNorm
from engine.models.decoder import Parts


class TritonRMSNorm(RMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(x.contiguous(), None, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        return x, add_rms_norm(x, delta, self.weight, self.eps)


class TritonGatedLinear(GatedLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return silu_multiply(self._gate_up(x))


TRITON_PARTS = Parts(gated_linear=TritonGatedLinear, rms_norm=TritonRMSNorm)
