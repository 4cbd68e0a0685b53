"""The parts of a decoder, built from the Triton kernels: `Decoder(…, TRITON_PARTS)`. Products of 16-bit weights use
torch, except those of one row.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from engine.int4_weight import Int4Weight
from engine.kernels.gpu.choose import choose_experts
from engine.kernels.gpu.convolution import convolve
from engine.kernels.gpu.delta_spans import delta_rule_in_spans
from engine.kernels.gpu.eight_bits import FEW_ROWS, MAX_ROWS, quantize_rows, scaled_product, widen
from engine.kernels.gpu.experts import expert_config, expert_product, sum_of_experts, tiles_of
from engine.kernels.gpu.four_bits import clamped_gate, four_bit_product
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.int4 import ScaledInt4, int4_config, int4_product, widen_int4
from engine.kernels.gpu.int4_experts import int4_expert_product
from engine.kernels.gpu.one_row import one_row_product
from engine.kernels.gpu.pointwise import add_rms_norm, multiply_gated
from engine.kernels.gpu.scan_spans import scan_in_spans
from engine.layers import Activation, GatedLinear, Linear, RMSNorm
from engine.models.chosen_experts import ChosenExperts
from engine.models.expert_products import ExpertProducts
from engine.models.four_bit_experts import ClampedGate, FourBitStack
from engine.models.parts import Parts
from engine.models.recurrent_ops import RecurrentOps
from engine.models.recurrent_reference import gates, steps
from engine.quantization import (
    SMALLEST_AMAX,
    Float8Linear,
    GroupScaledLinear,
    Int4Linear,
    Int8Linear,
    QuantizedLinears,
)
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight, as_int4


class TritonRMSNorm(RMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return add_rms_norm(x.contiguous(), None, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        return x, add_rms_norm(x, delta, self.weight, self.eps)


class TritonLinear(Linear):
    """A product of one row of 16-bit numbers uses a Triton kernel; all others use torch."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, torch.Tensor), "weights in 8 bits are for products in 8 bits"
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_outputs, num_inputs = self._weight.shape
        is_row = x.shape[-1] == x.numel() == num_inputs
        if not is_row or x.itemsize != 2 or x.dtype != self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        return one_row_product(x.contiguous(), self._weight, self._bias).view(*x.shape[:-1], num_outputs)


class TritonGatedLinear(GatedLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_gated(self._gate_up(x), self._activation)


class TritonInt8Linear(Int8Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        if len(x_TK) > MAX_ROWS:
            return F.linear(x, self.dequantized(), self.bias)
        if len(x_TK) == 1 and x.itemsize == 2:
            y_TN = one_row_product(x_TK, self.weight_NK, self.bias, self.scale_N)
        else:
            y_TN = scaled_product(x_TK, self.weight_NK, self.scale_N, self.bias)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class TritonFloat8Linear(Float8Linear):
    """For few rows, only the weight is in 8 bits."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        if len(x_TK) > FEW_ROWS:
            return super().__call__(x)
        if len(x_TK) == 1:
            y_TN = one_row_product(x_TK, self.weight_NK, self.bias, self.scale_1N)
        else:
            y_TN = scaled_product(x_TK, self.weight_NK, self.scale_1N, self.bias)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])

    def _quantize_rows(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(x_TK.contiguous(), SMALLEST_AMAX)


class TritonGroupScaledLinear(GroupScaledLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        if len(x_TK) > MAX_ROWS:
            wide_NK = widen(weight.weight, weight.scale, weight.group_size, weight.dtype)
            return F.linear(x, wide_NK, self.bias)
        y_TN = scaled_product(x_TK, weight.weight, weight.scale, self.bias, weight.group_size)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class TritonInt4Linear(Int4Linear):
    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        # The given weight is not kept: its scales take more bytes.
        self.scaled, self.bias = ScaledInt4.of(as_int4(weight)), bias
        self._kind = gpu_kind(self.scaled.packed.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        if len(x_TK) > MAX_ROWS:
            return F.linear(x, widen_int4(self.scaled), self.bias)
        y_TN = int4_product(x_TK, self.scaled, self.bias, int4_config(self._kind, len(x_TK), x.itemsize))
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class TritonScaledExperts(ExpertProducts):
    reads_back = False

    def __init__(self, gate_up: ScaledWeight, down: ScaledWeight, activation: Activation = "silu") -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation
        self._kind = gpu_kind(gate_up.weight.device)

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        num_rows, num_experts = len(x_RD), len(ends_E)
        config = expert_config(self._kind, num_rows, num_experts, x_RD.itemsize)
        tiles_G3 = tiles_of(ends_E, num_rows, config.block_t)
        gate_up = expert_product(x_RD.contiguous(), self._gate_up, num_experts, tiles_G3, config)
        return expert_product(multiply_gated(gate_up, self._activation), self._down, num_experts, tiles_G3, config)


class TritonInt4Experts(ExpertProducts):
    reads_back = False

    def __init__(self, gate_up: Int4Weight, down: Int4Weight, activation: Activation = "silu") -> None:
        # As in layers, the given weights are not kept: their scales take more bytes.
        self._gate_up, self._down = ScaledInt4.of(gate_up), ScaledInt4.of(down)
        self._activation = activation
        self._kind = gpu_kind(self._gate_up.packed.device)

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        num_rows, num_experts = len(x_RD), len(ends_E)
        config = expert_config(self._kind, num_rows, num_experts, x_RD.itemsize)
        tiles_G3 = tiles_of(ends_E, num_rows, config.block_t)
        gate_up = int4_expert_product(x_RD.contiguous(), self._gate_up, num_experts, tiles_G3, config)
        return int4_expert_product(multiply_gated(gate_up, self._activation), self._down, num_experts, tiles_G3, config)


class TritonFourBitExperts(ExpertProducts):
    reads_back = False

    def __init__(self, gate_up: FourBitStack, down: FourBitStack, gate: ClampedGate) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate
        self._kind = gpu_kind(gate_up.pairs.device)

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        num_rows = len(x_RD)
        config = expert_config(self._kind, num_rows, len(ends_E), x_RD.itemsize)
        tiles_G3 = tiles_of(ends_E, num_rows, config.block_t)
        gate_up = four_bit_product(x_RD.contiguous(), self._gate_up, tiles_G3, config)
        return four_bit_product(clamped_gate(gate_up, self._gate), self._down, tiles_G3, config)


TRITON_RECURRENT_OPS = RecurrentOps(convolve, delta_rule_in_spans, gates, scan_in_spans, steps)
TRITON_PARTS = Parts(
    linear=TritonLinear,
    gated_linear=partial(TritonGatedLinear, linear=TritonLinear),
    lm_head=TritonLinear,
    rms_norm=TritonRMSNorm,
    scaled_experts=TritonScaledExperts,
    int4_experts=TritonInt4Experts,
    four_bit_experts=TritonFourBitExperts,
    choose_experts=choose_experts,
    chosen_experts=partial(ChosenExperts, sum_of_experts=sum_of_experts),
    recurrent_ops=TRITON_RECURRENT_OPS,
)
TRITON_QUANTIZED_LINEARS = QuantizedLinears(
    plain=TRITON_PARTS.linear,
    int8=TritonInt8Linear,
    fp8=TritonFloat8Linear,
    groups=TritonGroupScaledLinear,
    int4=TritonInt4Linear,
)
