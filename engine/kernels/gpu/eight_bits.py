"""Products with 8-bit weights, and conversion of rows of activations to 8-bit floats.

`scaled_product`: the time of a decoding step is bound by the bytes of its weights, and 8 bits are half of them. So
weights are converted in registers after they are loaded, and multiplied on the tensor cores as 16-bit numbers (which
represent each int8 or float8_e4m3fn exactly). The scale of an output, or of a group of its inputs, is applied to the
sum over each tile of inputs. The product is computed transposed, because tensor cores take their first operand from
registers.

Each output's sum runs over its inputs in tiles at fixed positions: in one program, or, if there are too few outputs to
occupy all multiprocessors, in pieces by several programs, whose sums are then added up in order (split-K).

Shapes: T rows (tokens), N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from engine.float8 import MAX_FLOAT8

MAX_ROWS = 256
"""For more rows, the whole weight is converted first and the library multiplies: so many rows are bound by arithmetic,
which the library does faster, and not by the 4 more bytes that each weight then costs. A guess: not measured on any
GPU."""
FEW_ROWS = 64
"""Up to this many rows, this kernel multiplies weights in 8-bit floats; for more, `torch._scaled_mm` does, with rows in
8 bits, too. With 8-bit rows, an H100 took 131 to 140 µs for a layer of Llama-3.1-8B, for any number of rows; with this
kernel 123 µs for 64 rows and 86 µs for one."""
MAX_STAGES = 7
MAX_PIECES = 8
MIN_PIECE = 512
"""Inputs of a piece: with fewer there is little to read ahead."""
SUMMED_AT_ONCE = 1024
"""Outputs of a row that one program adds up from pieces."""
WIDENED_AT_ONCE = 2048
"""Inputs of an output that one program of `widen` converts: 16 for each thread."""

Launch = Callable[[tuple[int, int, int], int, torch.Tensor | None, torch.Tensor], None]
"""Called with a grid, the inputs of a piece, a bias (None if pieces are added up later) and the tensor for the results
of each piece: [pieces, T, N]."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Sizes of a launch. Fixed: nothing is tuned at run time."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_programs: int = 0
    """Programs that run at once on a multiprocessor, if inputs may be split into pieces to occupy as many; 0: inputs
    are not split."""

    @staticmethod
    def of(num_rows: int, itemsize: int) -> ProductConfig:
        """Sizes for `num_rows` rows. For few rows, programs are small and their inputs are split, because a weight of
        4096 outputs must keep 132 multiprocessors reading. For many rows, tiles are large: a tile of rows is read again
        for each tile of outputs, and with 64 rows and tiles of 64 outputs, this reads as many bytes from the cache as
        the weight has."""
        if itemsize == 4:  # no tensor cores: correct, but slow
            return ProductConfig(block_t=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
        if num_rows <= 16:
            return ProductConfig(block_t=16, block_n=32, block_k=256, num_warps=4, num_stages=4, num_programs=3)
        if num_rows <= 32:
            return ProductConfig(block_t=32, block_n=32, block_k=128, num_warps=4, num_stages=5, num_programs=3)
        if num_rows <= 64:
            return ProductConfig(block_t=64, block_n=128, block_k=128, num_warps=8, num_stages=4, num_programs=1)
        return ProductConfig(block_t=128, block_n=128, block_k=64, num_warps=8, num_stages=4)

    def within(self, group_size: int) -> ProductConfig:
        """The same sizes with tiles that do not cross the end of a group, and about as many bytes in flight."""
        block_k = math.gcd(self.block_k, group_size)
        num_in_flight = (self.num_stages - 1) * (self.block_k // block_k)
        return replace(self, block_k=block_k, num_stages=min(num_in_flight + 1, MAX_STAGES))


def num_pieces(config: ProductConfig, num_rows: int, size_n: int, size_k: int, num_multiprocessors: int) -> int:
    """The number of pieces of the inputs that takes the least time, estimated in bytes. The last wave of programs takes
    as long as a full one. The sums of a piece are written and read, from the cache, twice as fast. A tile counts as
    full, because there is no separate kernel for fewer rows."""
    num_tiles = -(-num_rows // config.block_t) * -(-size_n // config.block_n)
    at_once = config.num_programs * num_multiprocessors
    if not at_once or not num_tiles:
        return 1

    def cost(pieces: int) -> float:
        num_programs = num_tiles * pieces
        waves = -(-num_programs // at_once) * at_once / num_programs
        return waves * size_n * size_k + (4 * pieces * config.block_t * size_n if pieces > 1 else 0)

    return min(range(1, 1 + max(1, min(MAX_PIECES, size_k // MIN_PIECE))), key=cost)


def scaled_product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    scale: torch.Tensor,
    bias_N: torch.Tensor | None,
    group_size: int | None = None,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """`x @ (weight * scale).T + bias` of up to MAX_ROWS rows: [T, N] in x's dtype.

    `weight_NK`: int8 or float8_e4m3fn. `scale`: [N], or [N, G] of groups of `group_size` inputs, a multiple of 16; the
    last may have fewer. All contiguous.
    """
    num_rows, size_k = x_TK.shape
    size_n = len(weight_NK)
    config = config or ProductConfig.of(num_rows, x_TK.itemsize)
    if group_size is not None:
        config = config.within(group_size)

    def launch(grid: tuple[int, int, int], piece_k: int, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _product_kernel[grid](
            x_TK, weight_NK, scale, bias, out, num_rows,
            SIZE_N=size_n, SIZE_K=size_k, PIECE_K=piece_k, GROUP_SIZE=group_size or 0, ZERO=zero_of(weight_NK),
            BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    return in_pieces(x_TK, size_n, bias_N, config, launch)


def in_pieces(
    x_TK: torch.Tensor, size_n: int, bias_N: torch.Tensor | None, config: ProductConfig, launch: Launch
) -> torch.Tensor:
    """Compute [T, N] in x's dtype with a kernel whose programs are (tile of rows, tile of outputs, piece of inputs)."""
    num_rows, size_k = x_TK.shape
    pieces = num_pieces(config, num_rows, size_n, size_k, num_multiprocessors(x_TK.device))
    piece_k = triton.cdiv(triton.cdiv(size_k, pieces), config.block_k) * config.block_k
    pieces = triton.cdiv(size_k, piece_k)
    out_TN = x_TK.new_empty(num_rows, size_n)
    sums = out_TN if pieces == 1 else x_TK.new_empty(pieces, num_rows, size_n, dtype=torch.float32)
    # Adjacent programs share a tile of the weight.
    grid = triton.cdiv(num_rows, config.block_t), triton.cdiv(size_n, config.block_n), pieces
    launch(grid, piece_k, bias_N if pieces == 1 else None, sums)
    if pieces > 1:
        _sum_pieces_kernel[(num_rows, triton.cdiv(size_n, SUMMED_AT_ONCE))](
            sums, bias_N, out_TN, num_rows, SIZE_N=size_n, PIECES=pieces, BLOCK=SUMMED_AT_ONCE, num_warps=4
        )
    return out_TN


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of the device's multiprocessors; on a CPU, where kernels are interpreted, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@triton.jit
def widened(weight, like):
    """Convert to the type of `like`, exactly. An 8-bit float becomes bfloat16 through float16 and float32: a GPU
    converts two of them to float16 in one instruction, but few float16 to bfloat16 per cycle (this takes a quarter less
    time on an H100)."""
    if like.dtype == tl.bfloat16 and weight.dtype == tl.float8e4nv:
        weight = weight.to(tl.float16).to(tl.float32)
    return weight.to(like.dtype)


@triton.jit
def product_tile(
    x_ptr,
    rows_T,
    is_row_T,
    weight_ptr,
    scale_ptr,
    outs_N,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 0: a scale for all inputs
    ZERO: tl.constexpr,  # of the weight's kind
    BLOCK_K: tl.constexpr,
    begin=0,
    PIECE_K: tl.constexpr = None,
):
    """[N, T] float32: these outputs of these rows. Values beyond the last output are undefined.

    `PIECE_K`: sum over this many inputs from `begin` on, both multiples of BLOCK_K; None: over all inputs.
    """
    ins_K = tl.arange(0, BLOCK_K)
    # Outputs beyond the last one are computed from the last one, so weights need no mask. Rows have a mask: otherwise a
    # single row would be read again in place of the missing ones, as many bytes as the weights have.
    x_ptrs = x_ptr + rows_T[None, :].to(tl.int64) * SIZE_K + ins_K[:, None]
    weight_ptrs = weight_ptr + tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    scale_ptrs = scale_ptr + tl.minimum(outs_N, SIZE_N - 1) * (tl.cdiv(SIZE_K, GROUP_SIZE) if GROUP_SIZE else 1)
    if not GROUP_SIZE:
        scale_N = tl.load(scale_ptrs).to(tl.float32)
    acc_NT = tl.zeros([outs_N.shape[0], rows_T.shape[0]], dtype=tl.float32)
    end = SIZE_K
    if PIECE_K is not None:
        end = tl.minimum(begin + PIECE_K, SIZE_K)
    for start in range(begin, end, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            weight_NK = tl.load(weight_ptrs + start)
            x_KT = tl.load(x_ptrs + start, mask=is_row_T[None, :], other=0.0)
        else:
            is_in_K = start + ins_K < SIZE_K
            weight_NK = tl.load(weight_ptrs + start, mask=is_in_K[None, :], other=ZERO)
            x_KT = tl.load(x_ptrs + start, mask=is_in_K[:, None] & is_row_T[None, :], other=0.0)
        if GROUP_SIZE:
            scale_N = tl.load(scale_ptrs + start // GROUP_SIZE).to(tl.float32)
        # Each tile's sum is scaled, although a scale for all inputs could be applied at the end: this forces the tile's
        # sum to be complete before the next weight is converted. Hopper's tensor cores run asynchronously, and Triton
        # lets one product continue into the next iteration of the loop, where the next weight would overwrite the
        # registers that it still reads (triton issue 9433; tests/machine_code.py looks for this in the compiled code).
        acc_NT += tl.dot(widened(weight_NK, x_KT), x_KT, input_precision="ieee") * scale_N[:, None]
    return acc_NT


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    PIECE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # 0: a scale for all inputs
    ZERO: tl.constexpr,  # of the weight's kind
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of rows, tile of outputs, piece of inputs): writes its piece of `out` [pieces, T, N]."""
    piece = tl.program_id(2)
    rows_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T = rows_T < num_rows
    if PIECE_K >= SIZE_K:
        y_NT = product_tile(
            x_ptr, rows_T, is_row_T, weight_ptr, scale_ptr, outs_N, SIZE_N, SIZE_K, GROUP_SIZE, ZERO, BLOCK_K
        )
    else:
        y_NT = product_tile(
            x_ptr, rows_T, is_row_T, weight_ptr, scale_ptr, outs_N, SIZE_N, SIZE_K, GROUP_SIZE, ZERO, BLOCK_K,
            piece * PIECE_K, PIECE_K,
        )  # fmt: skip
    store_tile(y_NT, bias_ptr, out_ptr, piece, num_rows, rows_T, outs_N, SIZE_N)


@triton.jit
def store_tile(y_NT, bias_ptr, out_ptr, piece, num_rows, rows_T, outs_N, SIZE_N: tl.constexpr):
    """Add the bias, if any, and store a tile into a piece of `out` [pieces, T, N]."""
    is_out_N = outs_N < SIZE_N
    if bias_ptr is not None:
        y_NT += tl.load(bias_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + (piece * num_rows + rows_T[None, :]).to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=is_out_N[:, None] & (rows_T < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _sum_pieces_kernel(
    sums_ptr, bias_ptr, out_ptr, num_rows, SIZE_N: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, some outputs): adds up their pieces in order."""
    row = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = outs < SIZE_N
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        y += tl.load(sums_ptr + (piece * num_rows + row) * SIZE_N + outs, mask=is_out, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE_N + outs, y.to(out_ptr.dtype.element_ty), mask=is_out)


def widen(weight_NK: torch.Tensor, scale_NG: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """`ScaledWeight.dequantized` in one pass: [N, K] in `dtype`. Arguments as for `scaled_product`."""
    size_n, size_k = weight_NK.shape
    out_NK = torch.empty_like(weight_NK, dtype=dtype)
    _widen_kernel[(size_n, triton.cdiv(size_k, WIDENED_AT_ONCE))](
        weight_NK, scale_NG, out_NK, SIZE_K=size_k, GROUP_SIZE=group_size, ZERO=zero_of(weight_NK),
        BLOCK=WIDENED_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return out_NK


def zero_of(weight: torch.Tensor) -> float:
    """0 or 0.0: Triton cannot convert an integer to an 8-bit float."""
    return 0.0 if weight.is_floating_point() else 0


@triton.jit
def _widen_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (output, piece of its inputs)."""
    out = tl.program_id(0).to(tl.int64)
    ins = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = ins < SIZE_K
    weight = tl.load(weight_ptr + out * SIZE_K + ins, mask=is_in, other=ZERO).to(tl.float32)
    scale = tl.load(scale_ptr + out * tl.cdiv(SIZE_K, GROUP_SIZE) + ins // GROUP_SIZE, mask=is_in, other=0.0)
    tl.store(out_ptr + out * SIZE_K + ins, (weight * scale).to(out_ptr.dtype.element_ty), mask=is_in)


def quantize_rows(x_TK: torch.Tensor, smallest_amax: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`engine.quantization.quantize_float8` of a contiguous [T, K] in one pass: float8_e4m3fn [T, K], scales [T, 1]."""
    num_rows, size = x_TK.shape
    out_TK = torch.empty_like(x_TK, dtype=torch.float8_e4m3fn)
    scale_T1 = x_TK.new_empty(num_rows, 1, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _quantize_kernel[(num_rows,)](
        x_TK, out_TK, scale_T1, smallest_amax, SIZE=size, MAX_FLOAT8=MAX_FLOAT8, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out_TK, scale_T1


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, smallest_amax, SIZE: tl.constexpr, MAX_FLOAT8: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    ins = tl.arange(0, BLOCK)
    is_in = ins < SIZE
    x = tl.load(x_ptr + row * SIZE + ins, mask=is_in, other=0.0).to(tl.float32)
    # Divisions are rounded to nearest, as in torch: the approximate division is sometimes off by one bit.
    amax = tl.maximum(tl.max(tl.abs(x), 0), smallest_amax)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + MAX_FLOAT8)
    y = tl.div_rn(x, tl.zeros_like(x) + scale)
    # A comparison with NaN is false: NaN stays NaN.
    y = tl.where(y > MAX_FLOAT8, MAX_FLOAT8, tl.where(y < -MAX_FLOAT8, -MAX_FLOAT8, y))
    tl.store(out_ptr + row * SIZE + ins, y.to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(scale_ptr + row, scale)
