"""The parts of a decoder whose rows have the same bits in any batch, built from the Triton kernels: `batch_invariant`.

Where `TRITON_PARTS` uses torch's libraries, which choose the order of addition by the number of rows, these parts use
kernels with a fixed order (engine/kernels/gpu/product.py); norms and other row-by-row operations are unchanged. Logits
are returned in float32, as they are added up: in 16 bits the two most likely tokens are sometimes equal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.gpu.eight_bits import scaled_product
from engine.kernels.gpu.experts import tiles_of
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.int4 import int4_product
from engine.kernels.gpu.parts import TRITON_PARTS, TritonGroupScaledLinear, TritonInt4Linear, TritonInt8Linear
from engine.kernels.gpu.pointwise import multiply_gated
from engine.kernels.gpu.product import (
    expert_row_product,
    head_row_products,
    row_config,
    row_product,
    scaled_row_config,
)
from engine.layers import HeadProducts, Linear
from engine.models.expert_products import ExpertProducts
from engine.quantization import Float8Linear, QuantizedLinears
from engine.weight import Weight


class InvariantLinear(Linear):
    out_dtype: torch.dtype | None = None
    """Dtype of the output; None: that of the input."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, torch.Tensor), "weights in 8 bits are for products in 8 bits"
        self._weight_NK, self._bias = weight.contiguous(), bias
        self._kind = gpu_kind(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        config = row_config(self._kind, len(x_TK), x.itemsize)
        y_TN = row_product(x_TK, self._weight_NK, self._bias, config, self.out_dtype)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class InvariantFloatLinear(InvariantLinear):
    """For logits, and for experts' scores: sums stay in float32."""

    out_dtype = torch.float32


class InvariantHeadProducts(HeadProducts):
    """Does not support inputs that heads share: latents are never unfolded, because a token must have the same bits as
    in decoding."""

    def __init__(self, weight_NKO: torch.Tensor) -> None:
        self.shape = tuple(weight_NKO.shape)
        self._weight_NOK = weight_NKO.transpose(1, 2).contiguous()
        self._kind = gpu_kind(weight_NKO.device)

    def __call__(self, x_TNK: torch.Tensor, out_TNO: torch.Tensor) -> None:
        head_row_products(x_TNK, self._weight_NOK, out_TNO, row_config(self._kind, len(x_TNK), x_TNK.itemsize))


class InvariantExperts(ExpertProducts):
    reads_back = False

    def __init__(self, gate_up_EXD: torch.Tensor, down_EDI: torch.Tensor) -> None:
        self._gate_up_EXD, self._down_EDI = gate_up_EXD, down_EDI
        self._kind = gpu_kind(gate_up_EXD.device)

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        num_rows = len(x_RD)
        # For the number of rows that each expert has if all are chosen equally often.
        config = row_config(self._kind, -(-num_rows // len(ends_E)), x_RD.itemsize)
        tiles_G3 = tiles_of(ends_E, num_rows, config.block_t)
        gate_up = expert_row_product(x_RD.contiguous(), self._gate_up_EXD, tiles_G3, config)
        return expert_row_product(multiply_gated(gate_up), self._down_EDI, tiles_G3, config)


class InvariantInt8Linear(TritonInt8Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        config = scaled_row_config(gpu_kind(x.device), len(x_TK), x.itemsize)
        y_TN = scaled_product(x_TK, self.weight_NK, self.scale_N, self.bias, config=config)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class InvariantFloat8Linear(Float8Linear):
    """Only weights are in 8 bits: `torch._scaled_mm`, which also takes activations in 8 bits, chooses its order by the
    number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        config = scaled_row_config(gpu_kind(x.device), len(x_TK), x.itemsize)
        y_TN = scaled_product(x_TK, self.weight_NK, self.scale_1N, self.bias, config=config)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class InvariantGroupScaledLinear(TritonGroupScaledLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK, weight = x.reshape(-1, x.shape[-1]).contiguous(), self.weight
        config = scaled_row_config(gpu_kind(x.device), len(x_TK), x.itemsize)
        y_TN = scaled_product(x_TK, weight.weight, weight.scale, self.bias, weight.group_size, config)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


class InvariantInt4Linear(TritonInt4Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1]).contiguous()
        config = scaled_row_config(self._kind, len(x_TK), x.itemsize)
        y_TN = int4_product(x_TK, self.scaled, self.bias, config)
        return y_TN.view(*x.shape[:-1], y_TN.shape[1])


INVARIANT_PARTS = replace(
    TRITON_PARTS.with_products(InvariantLinear),
    lm_head=InvariantFloatLinear,
    expert_scores=InvariantFloatLinear,
    head_products=InvariantHeadProducts,
    plain_experts=InvariantExperts,
)
INVARIANT_QUANTIZED_LINEARS = QuantizedLinears(
    plain=InvariantLinear,
    int8=InvariantInt8Linear,
    fp8=InvariantFloat8Linear,
    groups=InvariantGroupScaledLinear,
    int4=InvariantInt4Linear,
)
