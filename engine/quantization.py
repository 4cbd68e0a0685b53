"""Weights in 8 and 4 bits: the formats, and the layers that multiply with them. `engine.quantization_choice` says where
each can be used.

Weights are quantised when loaded, with one scale per output channel (in 4 bits: per group of inputs), or kept as the
checkpoint has them (`ScaledWeight`, `Int4Weight`).
Only products of layers are quantised: embeddings, norms and the logits' product keep the model's dtype, as in vLLM; but
the CPU kernels multiply logits in int8 (engine/kernels/cpu.py).
`Parts.with_products` puts these layers into a decoder.

    int8     only weights, on any device: activations keep their dtype (but on CPUs with AVX2 alone, where the kernels
             round the inputs of products in int8 and int4 to 8 bits: engine/kernels/source/product_quads.h)
    fp8      weights, and activations with a scale per token, computed at run time: float8_e4m3fn (engine/float8.py) on
             tensor cores. For few rows, our GPU kernels use only the weights in 8 bits
    int4     only weights, with a scale and an offset for each group of inputs (engine/int4_weight.py), on any device
    stored   each weight as it is in the checkpoint: one of these, or 8 bits with a scale for each group of inputs (only
             weights), or plain; for a mixture's experts, in any 8 or 4 bits, only weights
             (engine/models/expert_products.py)

The quantised weights depend only on the original ones, so that engines with equal weights also have equal quantised
ones.

Shapes: T tokens, N outputs, K inputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from engine.float8 import MAX_FLOAT8, saturated_float8
from engine.int4_weight import MAX_NUMBERS, Int4Weight
from engine.layers import Linear, MakeLinear
from engine.models.stored_weights import AS_STORED
from engine.narrow_weight import check_finite
from engine.scaled_weight import ScaledWeight
from engine.weight import Quantise, Weight, as_int4, dequantized

MAX_INT8 = 127
MAX_PACKED_ROWS = 16
"""Up to this many rows a CPU uses `torch._weight_int8pack_mm`; with more, dequantising the whole weight first is
faster. A GPU never uses it, since there it computes one output per thread or warp."""
PACKED_GRAIN, PACKED_ALIGNMENT = 16, 32
"""That function reads inputs by 16 bfloat16 numbers, aligned to 32 bytes, and checks neither: other sizes make it read
beyond a row's end, and unaligned rows crash the process (torch 2.13, AVX-512)."""
SMALLEST_AMAX = 1e-12
"""Avoids a division by zero for a row of zeros."""


def quantize_int8(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise symmetrically to (int8 [N, K], scales [N]): the largest number of each output becomes 127.

    The weight is divided by the rounded scale. The scale has the weight's dtype, but float32 for float16, which loses
    bits below 6e-5. Processes some rows at a time, since intermediate results take four times a weight's bytes. Raises
    `ValueError` if a weight is not finite.
    """
    num_rows = max(MAX_NUMBERS // weight_NK.shape[1], 1)
    int8_NK = torch.empty_like(weight_NK, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = []
    for rows, to in zip(torch.split(weight_NK, num_rows), torch.split(int8_NK, num_rows), strict=True):
        integers, scale = _quantized(rows)
        to.copy_(integers)
        scales.append(scale)
    return int8_NK, torch.cat(scales)


def _quantized(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers in float32, and the scales."""
    dtype = torch.float32 if weight_NK.dtype == torch.float16 else weight_NK.dtype
    amax_N = weight_NK.abs().amax(dim=1).float()
    check_finite(amax_N)
    scale_N = _divided(amax_N, MAX_INT8).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    return (weight_NK.float() / scale_N.float()[:, None]).round_().clamp_(-MAX_INT8, MAX_INT8), scale_N


def as_int8(weight: Weight) -> ScaledWeight:
    """Quantise the weight unless it is in 8 bits already."""
    if isinstance(weight, ScaledWeight):
        return weight
    weight = dequantized(weight)
    int8_NK, scale_N = quantize_int8(weight)
    return ScaledWeight(int8_NK, scale_N.float()[:, None], weight.shape[1], weight.dtype)


def as_float8(weight: Weight) -> ScaledWeight:
    """Likewise, to float8_e4m3fn. Raises `ValueError` if a weight is not finite."""
    if isinstance(weight, ScaledWeight):
        return weight
    weight = dequantized(weight)
    check_finite(weight.abs().amax(dim=1))
    float8_NK, scale_N1 = quantize_float8(weight)
    return ScaledWeight(float8_NK, scale_N1, weight.shape[1], weight.dtype)


def quantize_float8(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to (float8_e4m3fn [N, K], scales [N, 1] in float32): the largest number of each row becomes 448."""
    amax_N1 = x_NK.abs().amax(dim=1, keepdim=True).float().clamp_min_(SMALLEST_AMAX)
    scale_N1 = _divided(amax_N1, MAX_FLOAT8)
    return saturated_float8(x_NK.float() / scale_N1), scale_N1


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """`x / by`, correctly rounded on every device: if the divisor is a Python number, a GPU multiplies with its
    reciprocal, which is sometimes off by a bit."""
    return x / torch.full_like(x, by)


def _narrowed(scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert scales to `dtype`, which faster products need, if that is exact; never to float16: see
    `quantize_int8`."""
    narrow_N = scale_N.to(dtype)
    return narrow_N if dtype != torch.float16 and torch.equal(narrow_N.float(), scale_N) else scale_N


QUANTISERS: dict[str, Quantise] = {"int8": as_int8, "int4": as_int4, "fp8": as_float8}
"""By the engine's quantization, if all products of layers have it."""


class Int8Linear(Linear):
    """`x @ (weight * scale).T + bias`, with the weight in int8 and everything else in x's dtype."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        scaled = as_int8(weight)
        assert not scaled.has_groups
        self.weight_NK, self.scale_N = scaled.weight, _narrowed(scaled.scale[:, 0], weight.dtype)
        self.bias = bias
        self._dtype = weight.dtype
        self._can_pack = self.weight_NK.device.type == "cpu" and self.weight_NK.shape[1] % PACKED_GRAIN == 0
        self._can_pack &= self.scale_N.dtype == weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        if not self._can_pack or len(x_TK) > MAX_PACKED_ROWS:
            return F.linear(x, self.dequantized(), self.bias)
        x_TK = x_TK.contiguous()
        if x_TK.data_ptr() % PACKED_ALIGNMENT:
            x_TK = x_TK.clone()
        y_TN = torch._weight_int8pack_mm(x_TK, self.weight_NK, self.scale_N)
        return (y_TN if self.bias is None else y_TN + self.bias).view(*x.shape[:-1], -1)

    def dequantized(self) -> torch.Tensor:
        """[N, K] in the weight's original dtype."""
        return (self.weight_NK * self.scale_N[:, None]).to(self._dtype)


class Float8Linear(Linear):
    """`(x8 @ weight8.T) * scale of row * scale of output + bias`: both operands in 8 bits, added up in float32."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        scaled = as_float8(weight)
        assert not scaled.has_groups
        self.weight_NK, self.scale_1N = scaled.weight, scaled.scale.T.contiguous()
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x8_TK, scale_T1 = self._quantize_rows(x.reshape(-1, x.shape[-1]))
        # `_scaled_mm` needs a column-major second operand: the transposed view of the stored weight.
        y_TN = torch._scaled_mm(
            x8_TK, self.weight_NK.T, scale_a=scale_T1, scale_b=self.scale_1N, bias=self.bias, out_dtype=x.dtype
        )
        return y_TN.view(*x.shape[:-1], -1)

    def _quantize_rows(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_float8(x_TK)


class GroupScaledLinear(Linear):
    """`x @ (weight * scale).T + bias`, with a scale per output and group of inputs; only the weight is quantised."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, ScaledWeight)
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantized(), self.bias)


class Int4Linear(Linear):
    """`x @ (integers * scale + offset).T + bias`; only the weight is quantised."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.weight = as_int4(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantized(), self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """The classes that multiply with quantised weights, and with plain ones beside them, on some device."""

    plain: MakeLinear = Linear
    int8: type[Int8Linear] = Int8Linear
    fp8: type[Float8Linear] = Float8Linear
    groups: type[GroupScaledLinear] = GroupScaledLinear
    int4: type[Int4Linear] = Int4Linear

    def of(self, quantization: str) -> MakeLinear:
        """The class for all products of layers. `quantization`: resolved, and not "none"."""
        makers: dict[str, MakeLinear] = {
            "int8": self.int8, "fp8": self.fp8, "int4": self.int4, AS_STORED: self.as_stored,
        }  # fmt: skip
        return makers[quantization]

    def as_stored(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, torch.Tensor):
            return self.plain(weight, bias)
        if isinstance(weight, Int4Weight):
            return self.int4(weight, bias)
        if weight.has_groups:
            return self.groups(weight, bias)
        return self.int8(weight, bias) if weight.weight.dtype == torch.int8 else self.fp8(weight, bias)


QUANTIZED_LINEARS = QuantizedLinears()
