"""Products with 4-bit weights (engine/int4_weight.py), whose values are integer * scale + offset.

Pieces of inputs, and the order of their sums, are those of eight_bits.py. A byte holds two numbers. Each is converted
in registers to exactly the value that `Int4Weight.dequantized` gives: one multiply-add in float32, rounded to x's
dtype. So tensor cores multiply the same values as all other code, and no sum is scaled.

A tile of inputs may span several groups: it is divided into parts, the largest that do not cross the end of a group,
and each output has a scale and an offset for each part.

Shapes: T rows (tokens), N outputs, K inputs, B = K / 2 bytes, G groups of inputs, P parts of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.int4_weight import Int4Weight
from engine.kernels.gpu.eight_bits import WIDENED_AT_ONCE, ProductConfig, in_pieces, store_tile
from engine.kernels.gpu.gpu_kind import GpuKind

LOWER, UPPER = 2.0**23, 2.0**19
"""In the float32 of LOWER, the lowest bit has the value 1; in that of UPPER, the fifth bit has: where the halves of a
byte have theirs. They are passed to kernels as arguments, because with constants the compiler uses one more instruction
for each number."""
MUCH_SHARED = 128 << 10
"""Bytes of shared memory."""


@dataclass(frozen=True, slots=True)
class ScaledInt4:
    """An `Int4Weight` as the kernels read it."""

    packed: torch.Tensor
    """[N, B] uint8."""
    scale: torch.Tensor
    """[N, G] float32. If `offset` is None, int32: both in bfloat16, the scale in the lower half of a word."""
    offset: torch.Tensor | None
    """[N, G] float32."""
    dtype: torch.dtype
    """Dtype of the model, which the weight's values are rounded to."""

    @staticmethod
    def of(weight: Int4Weight) -> ScaledInt4:
        """Store scales and offsets in half of their bytes if none loses precision by it: with groups of 32 inputs, this
        saves a sixth of all bytes."""
        pairs = torch.stack((weight.scale, weight.offset), dim=2)
        narrow = pairs.bfloat16()
        if not torch.equal(narrow.float(), pairs):
            return ScaledInt4(weight.packed, weight.scale, weight.offset, weight.dtype)
        return ScaledInt4(weight.packed, narrow.view(torch.int32).squeeze(2), None, weight.dtype)

    @property
    def num_inputs(self) -> int:
        return 2 * self.packed.shape[1]

    @property
    def group_size(self) -> int:
        return self.num_inputs // self.scale.shape[1]


def int4_config(kind: GpuKind, num_rows: int, itemsize: int) -> ProductConfig:
    """Sizes of a launch: those for 8-bit weights, with two exceptions. Tiles of more outputs and fewer inputs need
    fewer instructions per number: on an H200 6.0 instead of 7.6 with up to 16 rows, and 6.4 instead of 10.8 with up to
    32 rows. And converted weights go through shared memory, too: where that is small, fewer tiles are in flight."""
    config = ProductConfig.of(num_rows, itemsize)
    if config.block_t <= 32 and itemsize == 2:
        return replace(config, block_n=64, block_k=128, num_stages=4)
    return replace(config, num_stages=3) if config.block_t == 64 and kind.shared_bytes < MUCH_SHARED else config


def int4_product(
    x_TK: torch.Tensor, weight: ScaledInt4, bias_N: torch.Tensor | None, config: ProductConfig
) -> torch.Tensor:
    """`x @ weight.T + bias` of up to `eight_bits.MAX_ROWS` rows: [T, N] in x's dtype. All contiguous."""
    num_rows, size_k = x_TK.shape
    size_n = len(weight.packed)
    part_k = math.gcd(config.block_k, weight.group_size)

    def launch(grid: tuple[int, int, int], piece_k: int, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _int4_kernel[grid](
            x_TK, weight.packed, weight.scale, weight.offset, bias, out, num_rows, 1.0, LOWER, UPPER,
            SIZE_N=size_n, SIZE_K=size_k, PIECE_K=piece_k, GROUP_SIZE=weight.group_size, PART_K=part_k,
            BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    return in_pieces(x_TK, size_n, bias_N, config, launch)


@triton.jit
def _load_scales(scale_ptr, offset_ptr, places, mask):
    """(scales, offsets) in float32."""
    scale = tl.load(scale_ptr + places, mask=mask)
    if offset_ptr is None:
        offset = (scale & -65536).to(tl.float32, bitcast=True)
        scale = (scale << 16).to(tl.float32, bitcast=True)
    else:
        offset = tl.load(offset_ptr + places, mask=mask)
    return scale, offset


@triton.jit
def _numbers(pairs, scale, offset, lower, upper):
    """(numbers of the lower halves of bytes, numbers of the upper halves) in float32, rounded once.

    An integer is inserted below the bits of `LOWER` or `UPPER`, which is then subtracted: a conversion would take a GPU
    as long as four additions.
    """
    bits = pairs.to(tl.int32)
    lower_bits, upper_bits = tl.cast(lower, tl.int32, bitcast=True), tl.cast(upper, tl.int32, bitcast=True)
    low = (bits & 0x0F | lower_bits).to(tl.float32, bitcast=True) - lower
    high = (bits & 0xF0 | upper_bits).to(tl.float32, bitcast=True) - upper
    return tl.fma(low, scale, offset), tl.fma(high, scale, offset)


@triton.jit
def int4_tile(
    x_ptr,
    rows_T,
    is_row_T,
    packed_ptr,
    scale_ptr,
    offset_ptr,
    weights_N,
    first,
    end,
    one,
    lower,
    upper,  # numbers that the compiler does not know
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PART_K: tl.constexpr,  # inputs of a tile that share a scale
    BLOCK_K: tl.constexpr,
):
    """[N, T] float32: outputs `weights_N` [N, 1] int64, which must all exist, of these rows, summed over the tiles of
    inputs from `first` to `end`. The product is computed transposed, as in eight_bits.py."""
    NUM_GROUPS: tl.constexpr = SIZE_K // GROUP_SIZE
    BLOCK_N: tl.constexpr = weights_N.shape[0]
    PARTS: tl.constexpr = BLOCK_K // PART_K
    BLOCK_B: tl.constexpr = BLOCK_K // 2
    ins_K, bytes_B, parts_P = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B), tl.arange(0, PARTS)
    x_ptrs = x_ptr + rows_T[None, :].to(tl.int64) * SIZE_K + ins_K[:, None]
    byte_ptrs = packed_ptr + weights_N * (SIZE_K // 2) + bytes_B[None, :]
    acc_NT = tl.zeros([BLOCK_N, rows_T.shape[0]], dtype=tl.float32)
    for tile in range(first, end):
        groups_P = tile * PARTS + parts_P
        if PART_K != GROUP_SIZE:  # only here, so that elsewhere the compiler sees adjacent groups
            groups_P = (groups_P * PART_K) // GROUP_SIZE
        if SIZE_K % BLOCK_K == 0:
            pairs_NB = tl.load(byte_ptrs + tile * BLOCK_B)
            x_KT = tl.load(x_ptrs + tile * BLOCK_K, mask=is_row_T[None, :], other=0.0)
        else:
            # Beyond the last input, weights are the last group's offset, multiplied by a row's 0.
            groups_P = tl.minimum(groups_P, NUM_GROUPS - 1)
            is_in_B, is_in_K = tile * BLOCK_B + bytes_B < SIZE_K // 2, tile * BLOCK_K + ins_K < SIZE_K
            pairs_NB = tl.load(byte_ptrs + tile * BLOCK_B, mask=is_in_B[None, :], other=0)
            x_KT = tl.load(x_ptrs + tile * BLOCK_K, mask=is_in_K[:, None] & is_row_T[None, :], other=0.0)
        scale_NP, offset_NP = _load_scales(scale_ptr, offset_ptr, weights_N * NUM_GROUPS + groups_P[None, :], None)
        pairs_NPS = pairs_NB.reshape(BLOCK_N, PARTS, PART_K // 2)
        low_NPS, high_NPS = _numbers(pairs_NPS, scale_NP[:, :, None], offset_NP[:, :, None], lower, upper)
        weight_NPS = tl.interleave(low_NPS.to(x_KT.dtype), high_NPS.to(x_KT.dtype))
        weight_NK = weight_NPS.reshape(BLOCK_N, BLOCK_K)
        # The tensor cores do not accumulate: a tile's sum must be complete before the next weight is converted, into
        # registers that they would otherwise still be reading (see product_tile in eight_bits.py).
        acc_NT += tl.dot(weight_NK, x_KT, input_precision="ieee") * one
    return acc_NT


@triton.jit(do_not_specialize=["num_rows"])
def _int4_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    one,
    lower,
    upper,  # numbers that the compiler does not know
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    PIECE_K: tl.constexpr,  # a multiple of BLOCK_K
    GROUP_SIZE: tl.constexpr,
    PART_K: tl.constexpr,  # inputs of a tile that share a scale
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of rows, tile of outputs, piece of inputs): writes its piece of `out` [pieces, T, N]."""
    piece = tl.program_id(2)
    rows_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Outputs beyond the last one are computed from the last one, so weights need no mask.
    weights_N = tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64)
    first, end = 0, tl.cdiv(SIZE_K, BLOCK_K)
    if PIECE_K < SIZE_K:
        first = piece * (PIECE_K // BLOCK_K)
        end = tl.minimum(first + PIECE_K // BLOCK_K, end)
    acc_NT = int4_tile(
        x_ptr, rows_T, rows_T < num_rows, packed_ptr, scale_ptr, offset_ptr, weights_N, first, end, one, lower, upper,
        SIZE_K, GROUP_SIZE, PART_K, BLOCK_K,
    )  # fmt: skip
    store_tile(acc_NT, bias_ptr, out_ptr, piece, num_rows, rows_T, outs_N, SIZE_N)


def widen_int4(weight: ScaledInt4) -> torch.Tensor:
    """`Int4Weight.dequantized` in one pass: [N, K] in its dtype. Contiguous."""
    size_n, size_k = len(weight.packed), weight.num_inputs
    out_NK = torch.empty(size_n, size_k, dtype=weight.dtype, device=weight.packed.device)
    _widen_int4_kernel[(size_n, triton.cdiv(size_k, WIDENED_AT_ONCE))](
        weight.packed, weight.scale, weight.offset, out_NK, LOWER, UPPER, SIZE_K=size_k, GROUP_SIZE=weight.group_size,
        BLOCK=WIDENED_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return out_NK


@triton.jit
def _widen_int4_kernel(
    packed_ptr,
    scale_ptr,
    offset_ptr,
    out_ptr,
    lower,
    upper,
    SIZE_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (output, piece of its inputs)."""
    out = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    pairs_at, ins = first // 2 + tl.arange(0, BLOCK // 2), first + tl.arange(0, BLOCK)
    is_pair = pairs_at < SIZE_K // 2
    pairs = tl.load(packed_ptr + out * (SIZE_K // 2) + pairs_at, mask=is_pair, other=0)
    groups = out * (SIZE_K // GROUP_SIZE) + 2 * pairs_at // GROUP_SIZE
    scale, offset = _load_scales(scale_ptr, offset_ptr, groups, is_pair)
    low, high = _numbers(pairs, scale, offset, lower, upper)
    tl.store(out_ptr + out * SIZE_K + ins, tl.interleave(low, high).to(out_ptr.dtype.element_ty), mask=ins < SIZE_K)
