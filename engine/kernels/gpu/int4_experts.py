"""Products of a mixture's experts with 4-bit weights (engine/int4_weight.py): rows are sorted by expert, and one launch
computes all experts.

Tiles of rows, grids and the order of sums are those of experts.py; a tile is multiplied as in int4.py, each number
converted in registers to the same value as in all other code. Experts with many rows use larger tiles of the same
kernel.

Shapes: R rows, T of a tile, E experts, N outputs of each, K inputs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.eight_bits import ProductConfig
from engine.kernels.gpu.experts import TILE_FIELDS
from engine.kernels.gpu.int4 import LOWER, UPPER, ScaledInt4, int4_tile


def int4_expert_product(
    x_RK: torch.Tensor, weight: ScaledInt4, num_experts: int, tiles_G3: torch.Tensor, config: ProductConfig
) -> torch.Tensor:
    """Each row times its expert's weight: [R, N] in x's dtype. All contiguous.

    `weight`: of all experts, E * N outputs. `tiles_G3`: from `engine.kernels.gpu.experts.tiles_of`, for tiles of
    `config.block_t` rows.
    """
    num_rows, size_k = x_RK.shape
    size_n = len(weight.packed) // num_experts
    out_RN = x_RK.new_empty(num_rows, size_n)
    _int4_expert_kernel[(triton.cdiv(size_n, config.block_n), len(tiles_G3))](
        x_RK, weight.packed, weight.scale, weight.offset, tiles_G3, out_RN, 1.0, LOWER, UPPER,
        SIZE_N=size_n, SIZE_K=size_k, GROUP_SIZE=weight.group_size, PART_K=math.gcd(config.block_k, weight.group_size),
        FIELDS=TILE_FIELDS, TILE_ROWS=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_RN


@triton.jit
def _int4_expert_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    offset_ptr,
    tiles_ptr,
    out_ptr,
    one,
    lower,
    upper,  # numbers that the compiler does not know
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PART_K: tl.constexpr,  # inputs of a tile that share a scale
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of outputs, tile of rows)."""
    tile_ptr = tiles_ptr + tl.program_id(1) * FIELDS
    start, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if start >= end:
        return
    expert = tl.load(tile_ptr).to(tl.int64)
    rows_T = start + tl.arange(0, TILE_ROWS)
    is_row_T = rows_T < end
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs beyond the last one are computed from the last one, so weights need no mask.
    weights_N = (expert * SIZE_N + tl.minimum(outs_N, SIZE_N - 1))[:, None]
    y_NT = int4_tile(
        x_ptr, rows_T, is_row_T, packed_ptr, scale_ptr, offset_ptr, weights_N, 0, tl.cdiv(SIZE_K, BLOCK_K),
        one, lower, upper, SIZE_K, GROUP_SIZE, PART_K, BLOCK_K,
    )  # fmt: skip
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=(outs_N < SIZE_N)[:, None] & is_row_T[None, :])
