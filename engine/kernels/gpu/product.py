"""Products whose rows have the same bits in any batch: `x @ weight.T + bias`, with one weight or the weight of each
row's expert.

A library chooses the order of additions by the number of rows, so the last bits of a row depend on other rows. Here,
each output's sum runs through all inputs in one program, in one order, by the same instruction of the tensor cores, for
any number of rows: the sizes of tiles only determine which program computes what. (H. He and Thinking Machines Lab,
"Defeating Nondeterminism in LLM Inference", 2025.)

The product is computed transposed. The rows of a tile are outputs, of which Hopper's and Blackwell's tensor cores take
at least 64 (fewer would use other instructions). Its columns are tokens, of which 16 suffice.

Before the first request, `check_rows_agree` tests whether the device's tensor cores do add up this way.

Shapes: T rows (tokens), N outputs, K inputs, E experts, G tiles, H heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.eight_bits import ProductConfig, scaled_product
from engine.kernels.gpu.experts import TILE_FIELDS
from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores, gpu_kind

BLOCK_K = 64
"""Inputs of a tile, for all sizes of tiles: the order of a sum is given by the order of tiles, and by the instruction
within a tile."""
GROUP = 8
"""Tiles of rows that go through the outputs together, so that their inputs stay in the caches."""


CHECKED_ROWS, CHECKED_INPUTS, CHECKED_OUTPUTS = 1024, 512, 128
"""Sizes of the product that tests a device: it uses all sizes of tiles, and eight tiles of inputs."""


def row_config(kind: GpuKind, num_rows: int, itemsize: int) -> ProductConfig:
    """Sizes of a launch. For few rows, tiles are small and many are in flight, because reading the weight takes the
    time. For many rows, tiles are as large as registers allow. Nothing is tuned at run time."""
    if itemsize == 4:  # no tensor cores: correct, but slow
        return ProductConfig(block_t=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    is_mma = kind.tensor_cores is TensorCores.MMA
    if num_rows <= 16:
        return ProductConfig(block_t=16, block_n=64, block_k=BLOCK_K, num_warps=4, num_stages=8)
    if num_rows <= 32:
        return ProductConfig(block_t=32, block_n=64, block_k=BLOCK_K, num_warps=4, num_stages=7)
    if num_rows <= 64:
        return ProductConfig(block_t=64, block_n=64, block_k=BLOCK_K, num_warps=4, num_stages=5)
    if num_rows <= 512 or is_mma:
        num_stages = 3 if is_mma else 4
        return ProductConfig(block_t=128, block_n=128, block_k=BLOCK_K, num_warps=8, num_stages=num_stages)
    return ProductConfig(block_t=256, block_n=128, block_k=BLOCK_K, num_warps=8, num_stages=4)


def scaled_row_config(kind: GpuKind, num_rows: int, itemsize: int) -> ProductConfig:
    """The same for `scaled_product`, for any number of rows: there, the separate sum of each tile takes registers,
    too."""
    config = row_config(kind, num_rows, itemsize)
    return replace(config, block_t=min(config.block_t, 128))


def check_rows_agree(device: str, dtype: torch.dtype) -> None:
    """Raises `ValueError` if the device adds up a row differently in larger tiles, or at another place in a tile, than
    in the smallest ones; also tests 8-bit weights."""
    kind = gpu_kind(device)
    numbers = torch.arange(CHECKED_ROWS * CHECKED_INPUTS, dtype=torch.float32, device=device)
    x_TK = torch.sin(numbers * 0.7).view(CHECKED_ROWS, CHECKED_INPUTS).to(dtype)
    wide_NK = torch.cos(numbers[: CHECKED_OUTPUTS * CHECKED_INPUTS] * 1.3).view(CHECKED_OUTPUTS, -1)
    weight_NK, narrow_NK = wide_NK.to(dtype), (127 * wide_NK).to(torch.int8)
    scale_N = torch.ones_like(weight_NK[:, 0])

    def plain(num_rows: int, config: ProductConfig) -> torch.Tensor:
        return row_product(x_TK[:num_rows], weight_NK, None, config, torch.float32)

    def scaled(num_rows: int, config: ProductConfig) -> torch.Tensor:
        return scaled_product(x_TK[:num_rows], narrow_NK, scale_N, None, config=config)

    for product, config_of in ((plain, row_config), (scaled, scaled_row_config)):
        few = config_of(kind, 1, dtype.itemsize)
        # The largest number of rows for each size, up to CHECKED_ROWS.
        sizes = {config_of(kind, num_rows, dtype.itemsize): num_rows for num_rows in (16, 32, 64, 512, CHECKED_ROWS)}
        expected_TN = product(CHECKED_ROWS, few) if len(sizes) > 1 else None
        for many, num_rows in sizes.items():
            if expected_TN is not None and not torch.equal(product(num_rows, many), expected_TN[:num_rows]):
                raise ValueError(
                    f"batch_invariant cannot be kept on this GPU: its tensor cores add up products of {num_rows} rows "
                    "otherwise than those of one"
                )


def row_product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    config: ProductConfig,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, N], added up in float32 and rounded once to `out_dtype`, by default x's dtype.

    All contiguous; `x_TK` and `weight_NK` have the same dtype.
    """
    num_rows, size_k = x_TK.shape
    size_n = len(weight_NK)
    out_TN = x_TK.new_empty(num_rows, size_n, dtype=out_dtype or x_TK.dtype)
    _row_product_kernel[(triton.cdiv(num_rows, config.block_t) * triton.cdiv(size_n, config.block_n),)](
        x_TK, weight_NK, bias_N, out_TN, num_rows,
        SIZE_N=size_n, SIZE_K=size_k, X_STRIDE=size_k, X_HEAD=0, OUT_STRIDE=size_n, OUT_HEAD=0,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=GROUP,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_TN


def head_row_products(
    x_THK: torch.Tensor, weight_HNK: torch.Tensor, out_THN: torch.Tensor, config: ProductConfig
) -> None:
    """Compute `x[:, h] @ weight[h].T` for each head, and write it to `out_THN[:, h]`.

    All of one dtype; `weight_HNK` is contiguous, the others are contiguous in their last axis.
    """
    num_rows, num_heads, size_k = x_THK.shape
    size_n = weight_HNK.shape[1]
    assert x_THK.stride(2) == out_THN.stride(2) == 1
    num_programs = triton.cdiv(num_rows, config.block_t) * triton.cdiv(size_n, config.block_n)
    _row_product_kernel[(num_programs, num_heads)](
        x_THK, weight_HNK, None, out_THN, num_rows,
        SIZE_N=size_n, SIZE_K=size_k, X_STRIDE=x_THK.stride(0), X_HEAD=x_THK.stride(1), OUT_STRIDE=out_THN.stride(0),
        OUT_HEAD=out_THN.stride(1),
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=GROUP,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def expert_row_product(
    x_TK: torch.Tensor, weight_ENK: torch.Tensor, tiles_G3: torch.Tensor, config: ProductConfig
) -> torch.Tensor:
    """Each row times its expert's weight: [T, N] in x's dtype. All contiguous, of one dtype.

    `tiles_G3`: from `engine.kernels.gpu.experts.tiles_of`, for tiles of `config.block_t` rows.
    """
    num_rows, size_k = x_TK.shape
    size_n = weight_ENK.shape[1]
    out_TN = x_TK.new_empty(num_rows, size_n)
    # Programs of one tile of rows are adjacent; tiles without rows come last.
    _expert_row_product_kernel[(triton.cdiv(size_n, config.block_n), len(tiles_G3))](
        x_TK, weight_ENK, tiles_G3, out_TN,
        SIZE_N=size_n, SIZE_K=size_k, FIELDS=TILE_FIELDS,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_TN


@triton.jit
def _tile_of_sums(
    x_ptr,
    rows_T,
    is_row_T,
    weight_ptr,
    outs_N,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    X_STRIDE: tl.constexpr,  # of rows
    BLOCK_K: tl.constexpr,
):
    """[N, T] float32: these outputs of these rows. Values beyond the last output are undefined."""
    ins_K = tl.arange(0, BLOCK_K)
    # Outputs beyond the last one are computed from the last one, so weights need no mask.
    x_ptrs = x_ptr + rows_T[None, :].to(tl.int64) * X_STRIDE + ins_K[:, None]
    weight_ptrs = weight_ptr + tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    acc_NT = tl.zeros([outs_N.shape[0], rows_T.shape[0]], dtype=tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            weight_NK = tl.load(weight_ptrs + start)
            x_KT = tl.load(x_ptrs + start, mask=is_row_T[None, :], other=0.0)
        else:
            is_in_K = start + ins_K < SIZE_K
            weight_NK = tl.load(weight_ptrs + start, mask=is_in_K[None, :], other=0.0)
            x_KT = tl.load(x_ptrs + start, mask=is_in_K[:, None] & is_row_T[None, :], other=0.0)
        acc_NT = tl.dot(weight_NK, x_KT, acc_NT, input_precision="ieee")
    return acc_NT


@triton.jit(do_not_specialize=["num_rows"])
def _row_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_HEAD: tl.constexpr,  # from a head to the next one
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (tile of rows and of outputs, head): GROUP tiles of rows go through all outputs, then the next ones."""
    head = tl.program_id(1)
    x_ptr += head * X_HEAD
    out_ptr += head * OUT_HEAD
    weight_ptr += head.to(tl.int64) * (SIZE_N * SIZE_K)
    in_group = GROUP * tl.cdiv(SIZE_N, BLOCK_N)
    first_tile = tl.program_id(0) // in_group * GROUP
    num_tiles = tl.minimum(tl.cdiv(num_rows, BLOCK_T) - first_tile, GROUP)
    place = tl.program_id(0) % in_group
    rows_T = (first_tile + place % num_tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs_N = place // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T, is_out_N = rows_T < num_rows, outs_N < SIZE_N
    y_NT = _tile_of_sums(x_ptr, rows_T, is_row_T, weight_ptr, outs_N, SIZE_N, SIZE_K, X_STRIDE, BLOCK_K)
    if bias_ptr is not None:
        y_NT += tl.load(bias_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * OUT_STRIDE + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=is_out_N[:, None] & is_row_T[None, :])


@triton.jit
def _expert_row_product_kernel(
    x_ptr,
    weight_ptr,
    tiles_ptr,
    out_ptr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of outputs, tile of rows)."""
    tile_ptr = tiles_ptr + tl.program_id(1) * FIELDS
    first, end = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first >= end:
        return
    weight_ptr += tl.load(tile_ptr).to(tl.int64) * SIZE_N * SIZE_K
    rows_T = first + tl.arange(0, BLOCK_T)
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T = rows_T < end
    y_NT = _tile_of_sums(x_ptr, rows_T, is_row_T, weight_ptr, outs_N, SIZE_N, SIZE_K, SIZE_K, BLOCK_K)
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=(outs_N < SIZE_N)[:, None] & is_row_T[None, :])
