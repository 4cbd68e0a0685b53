"""Paged attention for sequences that compute one token each; the context is split among programs (flash-decoding).

    split    per sequence, key head and piece of its context: softmax and weighted values of that piece alone
    reduce   per sequence and query head: combines the pieces, weighted by their sums

T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023. The query heads that share a
key head (J. Ainslie et al., "GQA", 2023) are the rows of one tile, so keys and values are read once for all of them.

Where a context is split depends only on its own length (and the window): a sequence gets the same numbers in any batch.
The grid depends on `max_context_len`, which the host knows, and on nothing in device memory, so a CUDA graph can
capture it; the surplus programs of a captured grid end at once. `max_context_len` limits the number of pieces but does
not move their boundaries: a sequence gets the same numbers from a graph captured for longer contexts.

Shapes: S sequences, N query heads, K key/value heads, H head dim, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.tile import (
    LOG2_E,
    MIN_SIDE,
    attend_tile,
    padded_head_dim,
    score_scales,
    with_sinks,
)
from engine.models.scores import Scores

MAX_PIECES = 32
"""A power of two: the reduction holds one row per piece in registers."""
MOST_NUMBERS, MOST_KEYS = 8192, 64
"""At most this many numbers, and this many keys, in a tile of keys; a tile of values has as many."""
MOST_BYTES = 74 << 10
"""Shared memory of a program with such tiles, for up to 16 query heads per key head."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Sizes of a launch. The kind of GPU determines them: nothing is tuned at run time."""

    block_n: int
    """Keys of a tile."""
    min_piece: int
    """The number of keys in a piece is a multiple of this, which is a multiple of `block_n`."""
    num_warps: int
    num_stages: int
    """Stages of the pipeline. A tile needs two dependent loads, block ids and then the blocks, so the compiler keeps
    only about half as many tiles in flight."""

    @staticmethod
    def of(kind: GpuKind, head_dim: int, itemsize: int, kv_itemsize: int | None = None) -> DecodeConfig:
        """With tensor cores, tiles in flight take at most 70 KB: three programs fit in 228 KB of shared memory, and two
        in an A100's 164 KB. If two would not fit, tiles are half as large. No registers spill
        (tests/unit/test_triton_compile.py). `kv_itemsize`: bytes of a number in the pool, if not those of the queries;
        with smaller numbers, more tiles are in flight, with as many bytes."""
        if itemsize == 4 and head_dim > 256:
            return DecodeConfig(block_n=MIN_SIDE, min_piece=256, num_warps=8, num_stages=1)
        if itemsize == 4:  # no tensor cores: correct, but slow
            return DecodeConfig(block_n=32, min_piece=256, num_warps=8, num_stages=3)
        if head_dim > 256:  # tiles of the fewest keys that tensor cores multiply
            num_stages = 3 if kind.shared_bytes < 2 * MOST_BYTES else 5
            return DecodeConfig(block_n=MIN_SIDE, min_piece=256, num_warps=8, num_stages=num_stages)
        num_stages = 9 if kv_itemsize == 1 else 5
        numbers = MOST_NUMBERS if kind.shared_bytes >= 2 * MOST_BYTES else MOST_NUMBERS // 2
        block_n = min(numbers // padded_head_dim(head_dim), MOST_KEYS)
        return DecodeConfig(block_n=block_n, min_piece=256, num_warps=4, num_stages=num_stages)


def num_pieces(max_context_len: int, window: int, config: DecodeConfig) -> int:
    """The number of pieces that the longest context may have: at least 1, at most MAX_PIECES."""
    span = min(max_context_len, window) if window else max_context_len
    return min(max(-(-span // config.min_piece), 1), MAX_PIECES)


def partial_size(num_seqs: int, num_heads: int, head_dim: int, max_context_len: int, config: DecodeConfig) -> int:
    """The most float32 numbers of scratch that `paged_decode` needs, for any window."""
    return num_seqs * num_heads * num_pieces(max_context_len, 0, config) * (head_dim + 1)


def paged_decode(
    q_SNH: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out_SNH: torch.Tensor,
    scratch: torch.Tensor,
    *,
    max_context_len: int,
    scores: Scores,
    config: DecodeConfig,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Compute the attention of each sequence's last token to its whole context, and write it to `out_SNH`.

    `q_SNH`, `out_SNH`: contiguous, of one dtype. `kv`: a layer of the pool, contiguous, of that dtype or 8-bit floats.
    `block_tables` [S, blocks] and `context_lens` [S]: int32; a context of 0 gives zeros. `scratch`: float32,
    `partial_size` numbers. `max_context_len`: no context is longer. `sinks_N`: float32, for each query head a score
    without a value.
    """
    num_seqs, num_heads, head_dim = q_SNH.shape
    num_kv_heads, block_size = kv.shape[2:4]
    num_groups = num_heads // num_kv_heads
    block_m = max(triton.next_power_of_2(num_groups), MIN_SIDE)
    pieces = num_pieces(max_context_len, scores.sliding_window, config)
    scale_in, scale_out = score_scales(scores)
    num_partials = num_seqs * num_heads * pieces
    partial, weight = scratch[: num_partials * head_dim], scratch[num_partials * head_dim :]
    shared = {
        "HEAD_DIM": head_dim,
        "WINDOW": scores.sliding_window,
        "BLOCK_H": padded_head_dim(head_dim),
        "MIN_PIECE": config.min_piece,
        "MAX_PIECES": MAX_PIECES,
    }
    # Pieces are the fastest axis: programs beyond a context's end, which end at once, are then spread among the others
    # instead of coming last.
    _split_kernel[(pieces, num_kv_heads, num_seqs)](
        q_SNH, kv, block_tables, context_lens, out_SNH, partial, weight, sinks_N, block_tables.stride(0), pieces,
        scale_in, scale_out,
        NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_groups, SLOTS=block_size, HAS_SOFT_CAP=scores.soft_cap > 0,
        BLOCK_M=block_m, BLOCK_N=config.block_n, IS_SPLIT=pieces > 1, **shared,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if pieces > 1:
        reduce_kernel[(num_seqs, num_heads)](
            context_lens, out_SNH, partial, weight, sinks_N, pieces, NUM_HEADS=num_heads, **shared, num_warps=4
        )


@triton.jit
def beside_pool(q_MH, kv_ptr):
    """Convert queries to the type in which keys and values are multiplied: usually their own.

    With a pool of 8-bit floats, bfloat16 queries become float16. float16 holds 8-bit floats just as exactly, and
    queries within its range (others are clamped). A GPU converts two 8-bit floats to float16 in one instruction, but to
    bfloat16 in three slow ones, with which an H100 took as long as with a 16-bit pool. Prompts, whose tiles of keys
    serve many rows, stay in bfloat16: with 256 numbers per head, registers have no room for the converted tiles.
    """
    MAX_FLOAT16: tl.constexpr = 65504.0
    if kv_ptr.dtype.element_ty.primitive_bitwidth == 8 and q_MH.dtype == tl.bfloat16:
        q_MH = q_MH.to(tl.float32)
        # A comparison with NaN is false: NaN stays NaN.
        q_MH = tl.where(q_MH > MAX_FLOAT16, MAX_FLOAT16, tl.where(q_MH < -MAX_FLOAT16, -MAX_FLOAT16, q_MH))
        q_MH = q_MH.to(tl.float16)
    return q_MH


@triton.jit
def piece_of(context_len, WINDOW: tl.constexpr, MIN_PIECE: tl.constexpr, MAX_PIECES: tl.constexpr):
    """(first position seen, positions per piece). A piece is the smallest multiple of MIN_PIECE that gives at most
    MAX_PIECES pieces."""
    span = context_len
    if WINDOW > 0:
        span = tl.minimum(context_len, WINDOW)
    return context_len - span, tl.maximum(tl.cdiv(span, MIN_PIECE * MAX_PIECES), 1) * MIN_PIECE


@triton.jit(do_not_specialize=["table_stride", "num_pieces"])
def _split_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    sinks_ptr,
    table_stride,
    num_pieces,
    scale_in,
    scale_out,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Program (piece, key head, sequence).

    Writes `partial` [S, N, P, H], and to `weight` [S, N, P] the logarithm of the piece's sum; or, unsplit, `out` [S, N,
    H].
    """
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    groups_M = tl.arange(0, BLOCK_M)
    dims_H = tl.arange(0, BLOCK_H)
    rows_M = (seq * NUM_KV_HEADS + kv_head) * NUM_GROUPS + groups_M
    is_row_M = groups_M < NUM_GROUPS
    is_real_MH = is_row_M[:, None] & (dims_H < HEAD_DIM)[None, :]
    # Loaded before it is known whether there is anything to do, so that both loads are in flight at once.
    q_MH = tl.load(q_ptr + rows_M[:, None] * HEAD_DIM + dims_H[None, :], mask=is_real_MH, other=0.0)
    q_MH = beside_pool(q_MH, kv_ptr)
    context_len = tl.load(context_lens_ptr + seq)
    first, piece_len = piece_of(context_len, WINDOW, MIN_PIECE, MAX_PIECES)
    begin = first + piece * piece_len
    end = tl.minimum(begin + piece_len, context_len)
    if IS_SPLIT:  # noqa: SIM102, one is known when this is compiled, the other is not
        if begin >= context_len:
            return

    acc_MH = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    # `first` already accounts for the window: here only the positions beyond the piece are masked.
    last_M = tl.zeros([BLOCK_M], dtype=tl.int32) + (end - 1)
    for start in range(begin, end, BLOCK_N):
        acc_MH, max_M, sum_M = attend_tile(
            q_MH, acc_MH, max_M, sum_M, kv_ptr, tables_ptr + seq * table_stride, kv_head, start, end, last_M,
            scale_in, scale_out, NUM_KV_HEADS, SLOTS, HEAD_DIM, 0, HAS_SOFT_CAP, BLOCK_N, BLOCK_H, False,
        )  # fmt: skip
    # Rows of empty sequences have seen no key.
    sum_M = tl.where(sum_M > 0, sum_M, 1.0)
    o_MH = acc_MH / sum_M[:, None]
    weights_M = max_M + tl.log2(sum_M)
    if IS_SPLIT:
        partials_M = rows_M * num_pieces + piece
        tl.store(partial_ptr + partials_M[:, None] * HEAD_DIM + dims_H[None, :], o_MH, mask=is_real_MH)
        tl.store(weight_ptr + partials_M, weights_M, mask=is_row_M)
    else:
        if sinks_ptr is not None:
            # Computed as in `reduce_kernel` with one piece, for the same bits.
            sinks_M = tl.load(sinks_ptr + kv_head * NUM_GROUPS + groups_M, mask=is_row_M, other=0.0) * LOG2_E
            o_MH = o_MH / with_sinks(1.0, weights_M, sinks_M)[:, None]
        out_ptrs = out_ptr + rows_M[:, None] * HEAD_DIM + dims_H[None, :]
        tl.store(out_ptrs, o_MH.to(out_ptr.dtype.element_ty), mask=is_real_MH)


@triton.jit(do_not_specialize=["num_pieces"])
def reduce_kernel(
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    sinks_ptr,
    num_pieces,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (sequence, query head): combines the pieces of one into `out` [S, N, H].

    Always has MAX_PIECES rows, most of them masked: the order of addition does not depend on the number of pieces in a
    launch.
    """
    seq = tl.program_id(0).to(tl.int64)
    row = seq * NUM_HEADS + tl.program_id(1)
    context_len = tl.load(context_lens_ptr + seq)
    first, piece_len = piece_of(context_len, WINDOW, MIN_PIECE, MAX_PIECES)
    pieces_P = tl.arange(0, MAX_PIECES)
    dims_H = tl.arange(0, BLOCK_H)
    is_piece_P = pieces_P < tl.cdiv(context_len - first, piece_len)
    partials_P = row * num_pieces + pieces_P
    weights_P = tl.load(weight_ptr + partials_P, mask=is_piece_P, other=float("-inf"))
    # Loaded before the weights are used, so that the machine code requests some of both at once.
    partial_PH = tl.load(
        partial_ptr + partials_P[:, None] * HEAD_DIM + dims_H[None, :],
        mask=is_piece_P[:, None] & (dims_H < HEAD_DIM)[None, :],
        other=0.0,
    )
    largest = tl.max(weights_P, 0)
    shares_P = tl.exp2(weights_P - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(shares_P, 0)
    if sinks_ptr is not None:
        total = with_sinks(total, largest, tl.load(sinks_ptr + tl.program_id(1)) * LOG2_E)
    o_H = tl.sum(partial_PH * shares_P[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dims_H, o_H.to(out_ptr.dtype.element_ty), mask=dims_H < HEAD_DIM)
