"""Products of a mixture's experts with 8-bit weights: rows are sorted by expert, and one launch computes all experts.

    ends of experts ──tiles_of──> tiles of rows, each of one expert     one launch for a layer, on the device
    tiles           ──expert_product──> a program for each tile and block of outputs

Only the device knows how many rows an expert has: a grid has the maximum number of tiles, and programs of tiles without
rows end at once. So nothing is read back, and a launch can be recorded in a CUDA graph. A tile is multiplied as in
`scaled_product` (eight_bits.py): weights are converted in registers, and a group's scale is applied to its sum.

Experts with many rows use larger tiles of the same kernel. Converting the whole weight first, as plain products of many
rows do, would need a launch for each expert, whose number of rows the host would have to know, or all experts' weights
in 16 bits at once. It would not pay: 2,048 tokens with 8 experts each are 64 rows for each of DeepSeek-V3's 256
experts, and reading their weights takes longer than multiplying them.

Each output's sum runs through its inputs in one program, in tiles at the same positions for any number of rows: the
bits of a row do not depend on other rows, provided that tensor cores add up tiles of 16 rows like those of 128.

The results of a token's experts are added up in the order in which they were chosen, in one pass (`sum_of_experts`).

Shapes: T tokens, A experts of each, R = T * A rows, G tiles, E experts, N outputs, K inputs, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.eight_bits import ProductConfig, product_tile, zero_of
from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.scaled_weight import ScaledWeight

TILE_FIELDS = 3
"""Numbers for each tile: its expert, its first row, and the end of its expert's rows."""

WARP_SIZE = 32
"""Threads of a warp: searching fewer experts than this takes no less time."""


def expert_config(kind: GpuKind, num_rows: int, num_experts: int, itemsize: int) -> ProductConfig:
    """Tiles that hold the rows of most experts if all are chosen equally often. Nothing is tuned at run time."""
    if itemsize == 4:  # no tensor cores: correct, but slow
        return ProductConfig(block_t=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    if num_rows <= 8 * num_experts:
        return ProductConfig(block_t=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if num_rows <= 16 * num_experts:
        return ProductConfig(block_t=32, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if num_rows <= 48 * num_experts:
        return ProductConfig(block_t=64, block_n=64, block_k=128, num_warps=4, num_stages=4)
    block_n = 64 if kind.tensor_cores is TensorCores.MMA else 128  # limited by registers
    return ProductConfig(block_t=128, block_n=block_n, block_k=128, num_warps=8, num_stages=3)


def max_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `num_rows` rows may need, however they are distributed among experts."""
    in_use = min(num_rows, num_experts)
    return (num_rows - in_use) // tile_rows + in_use


def tiles_of(ends_E: torch.Tensor, num_rows: int, tile_rows: int) -> torch.Tensor:
    """[G, 3] int32: see `TILE_FIELDS`; all 0 for a tile without rows. `ends_E`: int32, where each expert's rows end and
    the next one's begin."""
    num_experts = len(ends_E)
    num_tiles = max_tiles(num_rows, num_experts, tile_rows)
    tiles_G3 = ends_E.new_empty(num_tiles, TILE_FIELDS)
    _tiles_kernel[(num_tiles,)](
        ends_E, tiles_G3, NUM_EXPERTS=num_experts, TILE_ROWS=tile_rows, FIELDS=TILE_FIELDS,
        BLOCK_E=max(triton.next_power_of_2(num_experts), WARP_SIZE), num_warps=4,
    )  # fmt: skip
    return tiles_G3


@triton.jit
def _tiles_kernel(
    ends_ptr,
    tiles_ptr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Program (tile)."""
    tile = tl.program_id(0)
    experts_E = tl.arange(0, BLOCK_E)
    is_expert_E = experts_E < NUM_EXPERTS
    ends_E = tl.load(ends_ptr + experts_E, mask=is_expert_E, other=0)
    starts_E = tl.load(ends_ptr + experts_E - 1, mask=is_expert_E & (experts_E > 0), other=0)
    num_tiles_E = tl.where(is_expert_E, tl.cdiv(ends_E - starts_E, TILE_ROWS), 0)
    tile_in_expert_E = tile - (tl.cumsum(num_tiles_E, 0) - num_tiles_E)
    is_its_own_E = (tile_in_expert_E >= 0) & (tile_in_expert_E < num_tiles_E)  # true for one expert, or for none
    first_E = starts_E + tile_in_expert_E * TILE_ROWS
    tl.store(tiles_ptr + tile * FIELDS, tl.sum(tl.where(is_its_own_E, experts_E, 0), 0))
    tl.store(tiles_ptr + tile * FIELDS + 1, tl.sum(tl.where(is_its_own_E, first_E, 0), 0))
    tl.store(tiles_ptr + tile * FIELDS + 2, tl.sum(tl.where(is_its_own_E, ends_E, 0), 0))


def expert_product(
    x_RK: torch.Tensor, weight: ScaledWeight, num_experts: int, tiles_G3: torch.Tensor, config: ProductConfig
) -> torch.Tensor:
    """Each row times its expert's weight: [R, N] in x's dtype. All contiguous; groups as for `scaled_product`.

    `weight`: of all experts, E * N outputs. `tiles_G3`: from `tiles_of`, for tiles of `config.block_t` rows.
    """
    num_rows, size_k = x_RK.shape
    size_n = len(weight) // num_experts
    group_size = weight.group_size if weight.has_groups else 0
    if group_size:
        config = config.within(group_size)
    out_RN = x_RK.new_empty(num_rows, size_n)
    # Programs of one tile of rows are adjacent, and so are the tiles of one expert, so its weight is read once if a
    # cache holds it; tiles without rows come last.
    _expert_kernel[(triton.cdiv(size_n, config.block_n), len(tiles_G3))](
        x_RK, weight.weight, weight.scale, tiles_G3, out_RN,
        SIZE_N=size_n, SIZE_K=size_k, GROUP_SIZE=group_size, ZERO=zero_of(weight.weight), FIELDS=TILE_FIELDS,
        TILE_ROWS=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_RN


@triton.jit
def _expert_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    tiles_ptr,
    out_ptr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 0: one scale for all inputs
    ZERO: tl.constexpr,  # of the weight's type
    FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of outputs, tile of rows)."""
    tile_ptr = tiles_ptr + tl.program_id(1) * FIELDS
    first, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first >= end:
        return
    expert = tl.load(tile_ptr).to(tl.int64)
    rows_T = first + tl.arange(0, TILE_ROWS)
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T = rows_T < end
    weight_ptr += expert * SIZE_N * SIZE_K
    scale_ptr += expert * SIZE_N * (tl.cdiv(SIZE_K, GROUP_SIZE) if GROUP_SIZE else 1)
    y_NT = product_tile(
        x_ptr, rows_T, is_row_T, weight_ptr, scale_ptr, outs_N, SIZE_N, SIZE_K, GROUP_SIZE, ZERO, BLOCK_K
    )
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=(outs_N < SIZE_N)[:, None] & is_row_T[None, :])


def sum_of_experts(y_RD: torch.Tensor, order_R: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
    """See `engine.models.chosen_experts.sum_of_experts`. `y_RD` and `weights_TA`, float32, contiguous."""
    num_tokens, num_chosen = weights_TA.shape
    size = y_RD.shape[1]
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    out_TD = y_RD.new_empty(num_tokens, size)
    block = min(triton.next_power_of_2(size), 1024)
    _sum_kernel[(num_tokens, triton.cdiv(size, block))](
        y_RD, places_R, weights_TA, out_TD, SIZE=size, NUM_CHOSEN=num_chosen, BLOCK=block, num_warps=4
    )
    return out_TD


@triton.jit
def _sum_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, piece of it)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        row = tl.load(places_ptr + token * NUM_CHOSEN + choice)
        weight = tl.load(weights_ptr + token * NUM_CHOSEN + choice)
        total += weight * tl.load(y_ptr + row * SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + dims, total.to(out_ptr.dtype.element_ty), mask=is_dim)
