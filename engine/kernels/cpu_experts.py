"""A mixture's experts by the CPU kernels: one after the other, each reads its weights once for all its rows.

Shapes: E experts, R rows, D hidden, I intermediate; of a product, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.cpu_products import PANEL, PanelGatedLinear, PanelLinear, side_by_side
from engine.layers import Activation
from engine.models.expert_products import ExpertProducts, ExpertWeight
from engine.models.four_bit_experts import ClampedGate, FourBitStack
from engine.weight import dequantized

MOST_EXPONENT = 252
"""As in source/mxfp4.h."""


def _of_even_size(weight: ExpertWeight) -> ExpertWeight:
    """Pad an odd intermediate size with zeros, since products read inputs in pairs. The result is the same."""
    gate, up, down = weight
    if len(gate) % 2 == 0:
        return weight
    gate, up = (F.pad(dequantized(each), (0, 0, 0, 1)) for each in (gate, up))
    return gate, up, F.pad(dequantized(down), (0, 1))


class PanelExperts(ExpertProducts):
    """Computes one expert after the other; each reads its weights once for all its rows."""

    reads_back = True

    def __init__(self, weights: Iterable[ExpertWeight], activation: Activation = "silu") -> None:
        self._experts = [
            (PanelGatedLinear(gate, up, None, None, activation), PanelLinear(down))
            for gate, up, down in map(_of_even_size, weights)
        ]

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        y_RD = torch.empty_like(x_RD)
        for (gated, down), (start, end) in zip(self._experts, pairwise([0, *ends_E.tolist()]), strict=True):
            if start < end:
                y_RD[start:end] = down(gated(x_RD[start:end]))
        return y_RD


@dataclass(frozen=True, slots=True)
class _Product:
    panels: torch.Tensor
    """Of source/mxfp4.h."""
    bias: torch.Tensor
    """One number for each output of the panels."""


class PanelFourBitExperts(ExpertProducts):
    """Computes one expert after the other; each reads its weights once for all its rows."""

    reads_back = True

    def __init__(self, gate_up: FourBitStack, down: FourBitStack, gate: ClampedGate) -> None:
        """`gate_up` [E, 2I, D], gate and up alternately; `down` [E, D, I]. Copies both. Raises `ValueError` if a number
        is too large for a bfloat16."""
        self._gate, self._size = gate, down.bias.shape[1]
        self._experts = [
            (_gated(*of_gate_up), _plain(*of_down))
            for of_gate_up, of_down in zip(_each(gate_up), _each(down), strict=True)
        ]

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        y_RD = x_RD.new_empty(len(x_RD), self._size)
        for (gated, down), (start, end) in zip(self._experts, pairwise([0, *ends_E.tolist()]), strict=True):
            if start < end:
                y_RD[start:end] = self._of_expert(x_RD[start:end], gated, down)
        return y_RD

    def _of_expert(self, x_RD: torch.Tensor, gated: _Product, down: _Product) -> torch.Tensor:
        ops, I = torch.ops.tandem_cpu, 32 * down.panels.shape[1]  # noqa: E741
        h_RI = ops.clamped_gated_linear(x_RD, gated.panels, gated.bias, I, self._gate.alpha, self._gate.limit)
        y_RD: torch.Tensor = ops.linear(h_RI, down.panels, None, down.bias, self._size)
        return y_RD


_OfExpert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Pairs [N, K / 2], exponents [N, K / 32] and bias [N]."""


def _each(stack: FourBitStack) -> list[_OfExpert]:
    if stack.scales.numel() and int(stack.scales.max()) > MOST_EXPONENT:
        raise ValueError(f"MXFP4 weights have a scale above {MOST_EXPONENT}, which is too large for bfloat16")
    return list(zip(stack.pairs, stack.scales, stack.bias, strict=True))


MOST_EXPONENT = 252
"""As in source/mxfp4.h."""


def _gated(pairs: torch.Tensor, exponents: torch.Tensor, bias: torch.Tensor) -> _Product:
    pairs, exponents, bias = (side_by_side([each[::2], each[1::2]]) for each in (pairs, exponents, bias))
    return _Product(torch.ops.tandem_cpu.pack_mxfp4(pairs, exponents), bias)


def _plain(pairs: torch.Tensor, exponents: torch.Tensor, bias: torch.Tensor) -> _Product:
    panels = torch.ops.tandem_cpu.pack_mxfp4(pairs.contiguous(), exponents.contiguous())
    return _Product(panels, F.pad(bias, (0, -len(bias) % PANEL)))
