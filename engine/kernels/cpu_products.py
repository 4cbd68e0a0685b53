"""Products by the CPU kernels: weights in panels, as source/panels.h describes them.

Shapes: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from engine.int4_weight import Int4Weight
from engine.layers import Activation, GatedLinear, HeadProducts, Linear
from engine.weight import Quantise, Weight, as_it_is, joined

LANES = 16
PANEL = 2 * LANES
"""Outputs whose weights are stored together (source/matmul.h)."""


class PanelLinear(Linear):
    """Stores the weight only in panels."""

    added: Any = None
    """What adapters add: see cpu_adapters.py."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.num_outputs = len(weight)
        self.panels, self.scale = in_panels(weight)
        self.bias = None if bias is None else F.pad(bias, (0, -len(bias) % PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tandem_cpu.linear(x, self.panels, self.scale, self.bias, self.num_outputs)
        return y


def in_panels(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pack a weight [N, K] in bfloat16, int4, or int8 with a scale per output. Returns its panels, and for int8 the
    scales in float32."""
    if isinstance(weight, torch.Tensor):
        return torch.ops.tandem_cpu.pack_weight(weight), None
    if isinstance(weight, Int4Weight):
        return torch.ops.tandem_cpu.pack_int4(weight.packed, weight.scale, weight.offset), None
    assert weight.weight.dtype == torch.int8
    assert not weight.has_groups
    scale_N = weight.scale[:, 0].float()
    return torch.ops.tandem_cpu.pack_weight(weight.weight.contiguous()), F.pad(scale_N, (0, -len(scale_N) % PANEL))


class PanelHeadProducts(HeadProducts):
    """Each head's weight in panels of its own, one head after the other."""

    def __init__(self, weight_NKO: torch.Tensor, quantise: Quantise = as_it_is) -> None:
        self.shape = tuple(weight_NKO.shape)
        _, num_inputs, self._num_outputs = self.shape
        by_outputs = F.pad(weight_NKO.mT, (0, 0, 0, -self._num_outputs % PANEL)).reshape(-1, num_inputs).contiguous()
        self.panels, self.scale = in_panels(quantise(by_outputs))

    def __call__(self, x_TNK: torch.Tensor, out_TNO: torch.Tensor) -> None:
        x_NTK = x_TNK.transpose(0, 1).contiguous()
        out_TNO.copy_(torch.ops.tandem_cpu.multiply_heads(x_NTK, self.panels, self.scale, self._num_outputs))


class PanelLogits(PanelLinear):
    """[T, in] -> [T, out] in float32. Without a bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tandem_cpu.linear_float(x, self.panels, self.scale, self.num_outputs)
        return y


class PanelGatedLinear(GatedLinear):
    """Each panel holds 16 outputs of the gate and the same 16 outputs of `up`, so that the gate is applied at once."""

    added: Any = None

    def __init__(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = "silu",
    ) -> None:
        self.num_outputs = len(gate)
        self.is_gelu = activation == "gelu_tanh"
        self.panels, self.scale = in_panels(joined((gate, up), side_by_side))
        self.bias = None if gate_bias is None or up_bias is None else side_by_side([gate_bias, up_bias])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tandem_cpu.gated_linear(
            x, self.panels, self.scale, self.bias, self.num_outputs, self.is_gelu
        )
        return y


def side_by_side(gate_and_up: list[torch.Tensor]) -> torch.Tensor:
    """[N, ...] twice -> [2 * N, ...], alternately 16 of one and 16 of the other; N is padded with zeros to 16."""
    missing = -len(gate_and_up[0]) % LANES
    padded = (torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in gate_and_up)
    sixteens = [x.view(-1, LANES, *x.shape[1:]) for x in padded]
    return torch.stack(sixteens, dim=1).flatten(0, 2)
