"""What the CPU kernels make of inputs that they multiply by weights in 8 and 4 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

SCALED = 32
"""Inputs that share a scale (source/product_quads.h)."""


def rounds_inputs() -> bool:
    """Whether the kernels round such inputs to 8 bits, too: with AVX2 alone."""
    return torch.ops.tandem_cpu.arithmetic().startswith("bytes")


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """The inputs [rows, K] that are multiplied, in float64."""
    if not rounds_inputs():
        return x.double()
    x_RSI = F.pad(x.float(), (0, -x.shape[1] % SCALED)).unflatten(1, (-1, SCALED))
    most = x_RSI.abs().amax(dim=2, keepdim=True)
    by = torch.tensor(127.0) / most  # `127 / most` would multiply by the reciprocal
    integers = torch.where(most < 1e-30, 0.0, x_RSI * by).round()
    return (integers.double() * (most / 127).double()).flatten(1)[:, : x.shape[1]]
