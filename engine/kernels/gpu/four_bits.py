"""Products of a mixture's experts with weights that stay in MXFP4: rows are sorted by expert, and one launch computes
all experts.

Tiles of rows, grids and the order of sums are those of experts.py. A byte holds two numbers. Each is converted in
registers to exactly the value that `engine.model_loader.mxfp4.widen` gives, including its group's power of two. So
tensor cores multiply 16-bit numbers, and no sum is scaled.

    4 bits ──moved to where a float32 has sign, exponent, mantissa──x 2^126──> 0 to 6 ──x its power──> in x's dtype

After the move, the float32 has the right value except for the exponent's bias. This also holds for 0.5, which has no
leading one: it becomes a subnormal float32, which is multiplied exactly.

Shapes: R rows, T of a tile, E experts, N outputs, K inputs, G groups of S = 16 bytes, I intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.eight_bits import ProductConfig
from engine.kernels.gpu.experts import TILE_FIELDS
from engine.models.four_bit_experts import GROUP, ClampedGate, FourBitStack

GROUP_BYTES = tl.constexpr(GROUP // 2)
WITHOUT_BIAS = tl.constexpr(2.0**126)
"""The difference between the exponent biases of a float32 and of the 4-bit number, 127 and 1, as a factor."""
SMALLEST_POWER = tl.constexpr(0x400000)
"""The bits of 2^-127, a subnormal float32; from 2^-126 on, a power of two consists only of its exponent bits."""


def four_bit_product(
    x_RK: torch.Tensor, stack: FourBitStack, tiles_G3: torch.Tensor, config: ProductConfig
) -> torch.Tensor:
    """Each row times its expert's weight, plus its bias: [R, N] in x's dtype. All contiguous.

    `tiles_G3`: from `engine.kernels.gpu.experts.tiles_of`, for tiles of `config.block_t` rows.
    """
    num_rows, size_k = x_RK.shape
    size_n = stack.bias.shape[1]
    config = config.within(size_k)  # divides K and is a multiple of the group size: nothing is masked
    out_RN = x_RK.new_empty(num_rows, size_n)
    _four_bit_kernel[(triton.cdiv(size_n, config.block_n), len(tiles_G3))](
        x_RK, stack.pairs, stack.scales, stack.bias, tiles_G3, out_RN, 1.0,
        SIZE_N=size_n, SIZE_K=size_k, FIELDS=TILE_FIELDS,
        TILE_ROWS=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_RN


@triton.jit
def _power(scale):
    """2 to the (scale - 127) in float32; `scale`: bytes."""
    bits = tl.where(scale == 0, SMALLEST_POWER, scale.to(tl.int32) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _number(code):
    """The float32 value of the lowest 4 bits of `code`, an int32: 0 to 6 and their negatives."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * WITHOUT_BIAS


@triton.jit
def _four_bit_kernel(
    x_ptr,
    bytes_ptr,
    scales_ptr,
    bias_ptr,
    tiles_ptr,
    out_ptr,
    one,  # 1.0, unknown to the compiler
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a divisor of SIZE_K
):
    """Program (block of outputs, tile of rows). The product is computed transposed, as in eight_bits.py."""
    tile_ptr = tiles_ptr + tl.program_id(1) * FIELDS
    first, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first >= end:
        return
    expert = tl.load(tile_ptr).to(tl.int64)
    rows_T = first + tl.arange(0, TILE_ROWS)
    is_row_T = rows_T < end
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs beyond the last one are computed from the last one, so weights need no mask.
    weights_N = expert * SIZE_N + tl.minimum(outs_N, SIZE_N - 1)
    BLOCK_B: tl.constexpr = BLOCK_K // 2
    BLOCK_G: tl.constexpr = BLOCK_B // GROUP_BYTES
    x_ptrs = x_ptr + rows_T[None, :].to(tl.int64) * SIZE_K + tl.arange(0, BLOCK_K)[:, None]
    byte_ptrs = bytes_ptr + weights_N[:, None] * (SIZE_K // 2) + tl.arange(0, BLOCK_B)[None, :]
    scale_ptrs = scales_ptr + weights_N[:, None] * (SIZE_K // 2 // GROUP_BYTES) + tl.arange(0, BLOCK_G)[None, :]
    acc_NT = tl.zeros([BLOCK_N, TILE_ROWS], dtype=tl.float32)
    for start in range(0, SIZE_K // BLOCK_K):
        pairs_NGS = tl.load(byte_ptrs + start * BLOCK_B).reshape(BLOCK_N, BLOCK_G, GROUP_BYTES).to(tl.int32)
        power_NG1 = _power(tl.load(scale_ptrs + start * BLOCK_G))[:, :, None]
        x_KT = tl.load(x_ptrs + start * BLOCK_K, mask=is_row_T[None, :], other=0.0)
        lower_NGS = (_number(pairs_NGS) * power_NG1).to(x_KT.dtype)
        upper_NGS = (_number(pairs_NGS >> 4) * power_NG1).to(x_KT.dtype)
        weight_NK = tl.interleave(lower_NGS, upper_NGS).reshape(BLOCK_N, BLOCK_K)
        # The tensor cores do not accumulate: a tile's sum must be complete before the next weight is converted, into
        # registers that they would otherwise still be reading (see product_tile in eight_bits.py).
        acc_NT += tl.dot(weight_NK, x_KT, input_precision="ieee") * one
    is_out_N = outs_N < SIZE_N
    acc_NT += tl.load(bias_ptr + weights_N).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, acc_NT.to(out_ptr.dtype.element_ty), mask=is_out_N[:, None] & is_row_T[None, :])


def clamped_gate(gate_up: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
    """Apply `gate` to a contiguous [..., 2I], in one pass."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = min(triton.next_power_of_2(size), 1024)
    _gate_kernel[(out.numel() // size, triton.cdiv(size, block))](
        gate_up, out, gate.alpha, gate.limit, SIZE=size, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, tile of it)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    gate_up_ptrs = gate_up_ptr + row * (2 * SIZE) + 2 * dims
    gate = tl.load(gate_up_ptrs, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptrs + 1, mask=is_dim, other=0.0).to(tl.float32)
    # A comparison with NaN is false: NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
    tl.store(out_ptr + row * SIZE + dims, y.to(out_ptr.dtype.element_ty), mask=is_dim)
