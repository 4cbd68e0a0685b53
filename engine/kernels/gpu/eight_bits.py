"""Products with int8 weights, and rows of activations in 8-bit floats.

`int8_product`: a step that decodes is bound by the bytes of its weights, and int8 are half of them; so they are widened
after they are loaded, in registers, and multiplied on the tensor cores as 16-bit numbers (each int8 is one exactly).
The scale of an output is applied to its sum. The product is computed transposed, since tensor cores take their first
operand from registers.

Each output's sum runs over all inputs in one program, in tiles at fixed places.

Shapes: T rows (tokens), N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.float8 import MAX_FLOAT8

MAX_ROWS = 256
"""Beyond, the whole weight is widened first, and the library multiplies: so many rows are bound by arithmetic, of which
it makes more, and not by the 4 bytes more that each weight then costs. A guess: no GPU has measured it."""


@dataclass(frozen=True, slots=True)
class Int8Config:
    """Sizes of a launch. Fixed: nothing is tuned at run time."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(num_rows: int, itemsize: int) -> Int8Config:
        """By what fits: few rows in many small programs, since a weight of 4096 outputs is to keep 132 multiprocessors
        reading; many rows in large tiles."""
        if itemsize == 4:  # no tensor cores: right, not fast
            return Int8Config(block_t=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
        if num_rows <= 16:
            return Int8Config(block_t=16, block_n=32, block_k=256, num_warps=4, num_stages=4)
        if num_rows <= 32:
            return Int8Config(block_t=32, block_n=32, block_k=128, num_warps=4, num_stages=5)
        if num_rows <= 64:
            return Int8Config(block_t=64, block_n=64, block_k=128, num_warps=4, num_stages=4)
        return Int8Config(block_t=128, block_n=128, block_k=64, num_warps=8, num_stages=4)


def int8_product(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    scale_N: torch.Tensor,
    bias_N: torch.Tensor | None,
    config: Int8Config | None = None,
) -> torch.Tensor:
    """`x @ (weight * scale).T + bias` of up to MAX_ROWS rows: [T, N] in x's dtype. `weight_NK`: int8. Contiguous."""
    num_rows, size_k = x_TK.shape
    size_n = len(weight_NK)
    config = config or Int8Config.of(num_rows, x_TK.itemsize)
    out_TN = x_TK.new_empty(num_rows, size_n)
    # Programs that share a tile of the weight are neighbours.
    _int8_kernel[(triton.cdiv(num_rows, config.block_t), triton.cdiv(size_n, config.block_n))](
        x_TK, weight_NK, scale_N, scale_N if bias_N is None else bias_N, out_TN, num_rows,
        SIZE_N=size_n, SIZE_K=size_k, HAS_BIAS=bias_N is not None,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out_TN


@triton.jit(do_not_specialize=["num_rows"])
def _int8_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of rows, tile of outputs)."""
    rows_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins_K = tl.arange(0, BLOCK_K)
    # What lies beyond the last output is computed from the last one, and not stored: weights need no mask. Rows have
    # one, or a single row would be read again in place of the others: as many bytes as the weights have.
    is_row_T = rows_T < num_rows
    x_ptrs = x_ptr + rows_T[None, :].to(tl.int64) * SIZE_K + ins_K[:, None]
    weight_ptrs = weight_ptr + tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    acc_NT = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            weight_NK = tl.load(weight_ptrs + start)
            x_KT = tl.load(x_ptrs + start, mask=is_row_T[None, :], other=0.0)
        else:
            is_in_K = start + ins_K < SIZE_K
            weight_NK = tl.load(weight_ptrs + start, mask=is_in_K[None, :], other=0)
            x_KT = tl.load(x_ptrs + start, mask=is_in_K[:, None] & is_row_T[None, :], other=0.0)
        acc_NT = tl.dot(weight_NK.to(x_KT.dtype), x_KT, acc_NT, input_precision="ieee")
    is_out_N = outs_N < SIZE_N
    y_NT = acc_NT * tl.load(scale_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        y_NT += tl.load(bias_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows_T[None, :].to(tl.int64) * SIZE_N + outs_N[:, None]
    tl.store(out_ptrs, y_NT.to(out_ptr.dtype.element_ty), mask=is_out_N[:, None] & is_row_T[None, :])


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
    # Divisions to the nearest, as torch's: the approximate one is a bit off now and then.
    amax = tl.maximum(tl.max(tl.abs(x), 0), smallest_amax)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + MAX_FLOAT8)
    y = tl.div_rn(x, tl.zeros_like(x) + scale)
    # A comparison with NaN is false: NaN stays what it is.
    y = tl.where(y > MAX_FLOAT8, MAX_FLOAT8, tl.where(y < -MAX_FLOAT8, -MAX_FLOAT8, y))
    tl.store(out_ptr + row * SIZE + ins, y.to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(scale_ptr + row, scale)
