"""Paged attention that splits contexts, and in which a token has the same bits in a prompt and in decoding.

A context is split at multiples of PIECE, wherever it ends. Each piece has its own online softmax; `merged` combines the
pieces one after the other. This is the order of a token's sums in both cases:

    prompts    a program for a tile of tokens goes through all pieces that they see
    decoding   a program for each piece; `reduce` combines them

Both are launches of the same compiled kernel, so that the compiler cannot order the additions of a piece differently
for one of them; and `merged` leaves the compiler no choice. (That contexts should be split into pieces of fixed length,
not into a fixed number: H. He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025.)

Shapes: T tokens, S sequences, N query heads, K key/value heads, G = N / K, H head dim, P pieces, M rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.kernels.gpu.prefill import PrefillConfig
from engine.kernels.gpu.tile import LOG2_E, attend_tile, padded_head_dim, score_scales
from engine.models.scores import Scores

PIECE = 1024
"""Keys of a piece. Shorter pieces occupy more programs when few sequences decode, but prompts then combine pieces more
often."""


@dataclass(frozen=True, slots=True)
class PiecesConfig(PrefillConfig):
    """Sizes of a launch, the same for prompts and decoding."""

    @staticmethod
    def of(
        kind: GpuKind, head_dim: int, itemsize: int, num_groups: int, kv_itemsize: int | None = None
    ) -> PiecesConfig:
        """As few rows as Hopper's tensor cores support, since most of them are unused in decoding, and so little shared
        memory that two or three programs fit on a multiprocessor. No registers spill
        (tests/unit/test_triton_compile.py), although the two sums take many. `kv_itemsize`: bytes of a number in the
        pool, if not those of the queries."""
        rows = max(32, int(triton.next_power_of_2(num_groups)))
        if itemsize == 4:  # no tensor cores: correct, but slow
            return PiecesConfig(rows, block_n=16, num_warps=8, num_stages=1)
        is_narrow, cores = kv_itemsize == 1, kind.tensor_cores
        if head_dim > 128:
            block_n = 16 if is_narrow and cores is TensorCores.WGMMA else 32
            num_stages = 1 if not is_narrow and cores is TensorCores.TCGEN05 else 2
            return PiecesConfig(rows if cores is TensorCores.MMA else 64, block_n, num_warps=8, num_stages=num_stages)
        is_wide = cores is TensorCores.MMA or (cores is TensorCores.TCGEN05 and head_dim > 64 and not is_narrow)
        num_warps = 8 if is_wide else 4
        if head_dim <= 64:
            return PiecesConfig(block_m=64, block_n=64, num_warps=num_warps, num_stages=5)
        num_stages = 3 if cores is TensorCores.MMA else 5
        return PiecesConfig(block_m=64, block_n=32, num_warps=num_warps, num_stages=num_stages)


def num_pieces(max_context_len: int) -> int:
    """The number of pieces of the longest context: at least 1."""
    return max(-(-max_context_len // PIECE), 1)


def partial_size(num_seqs: int, num_heads: int, head_dim: int, max_context_len: int) -> int:
    """The number of float32 in the scratch that decoding sequences need."""
    return num_seqs * num_heads * num_pieces(max_context_len) * (head_dim + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecesCall:
    """The arguments that all launches of a layer share."""

    q: torch.Tensor
    """[T, N, H] contiguous."""
    kv: torch.Tensor
    """A layer of the pool, contiguous, of the queries' dtype or 8-bit floats."""
    block_tables: torch.Tensor
    """[S, blocks] int32"""
    context_lens: torch.Tensor
    """[S] int32, with this step's tokens; 0 gives zeros."""
    query_starts: torch.Tensor
    """[S + 1] int32, where each sequence's tokens begin among T."""
    out: torch.Tensor
    """[T, N, H], as `q` is."""
    scores: Scores
    config: PiecesConfig
    scratch: torch.Tensor
    """float32, `partial_size` numbers."""
    sinks: torch.Tensor | None = None
    """[N] float32, for each query head a score without a value."""

    def prefill(self, tiles: torch.Tensor) -> None:
        """Compute the causal attention of the tokens in `tiles`, from `engine.kernels.gpu.prefill.list_tiles`."""
        self._launch(len(tiles), 0, tiles)

    def decode(self, num_seqs: int, max_context_len: int) -> None:
        """Compute the attention of the only token of each of the first `num_seqs` sequences; none has a context longer
        than `max_context_len`."""
        pieces = num_pieces(max_context_len)
        _, num_heads, head_dim = self.q.shape
        self._launch(num_seqs * pieces, pieces, self.context_lens)  # stands in for tiles, which are not read
        num_kv_heads = self.kv.shape[2]
        num_groups = num_heads // num_kv_heads
        _reduce_pieces_kernel[(num_seqs, num_kv_heads)](
            self.context_lens, self.out, self.scratch, self.sinks, pieces,
            NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_groups, HEAD_DIM=head_dim, PIECE=PIECE,
            WINDOW=self.scores.sliding_window, BLOCK_M=triton.next_power_of_2(num_groups),
            BLOCK_H=padded_head_dim(head_dim), num_warps=4,
        )  # fmt: skip

    def _launch(self, num_programs: int, pieces: int, tiles: torch.Tensor) -> None:
        _, num_heads, head_dim = self.q.shape
        num_kv_heads, block_size = self.kv.shape[2:4]
        scale_in, scale_out = score_scales(self.scores)
        _pieces_kernel[(num_programs, num_kv_heads)](
            self.q, self.kv, self.block_tables, self.context_lens, self.query_starts, tiles, self.out,
            self.scratch, self.sinks, self.block_tables.stride(0), pieces, scale_in, scale_out,
            NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_heads // num_kv_heads, HEAD_DIM=head_dim, SLOTS=block_size,
            WINDOW=self.scores.sliding_window, HAS_SOFT_CAP=self.scores.soft_cap > 0, PIECE=PIECE,
            BLOCK_M=self.config.block_m, BLOCK_N=self.config.block_n, BLOCK_H=padded_head_dim(head_dim),
            num_warps=self.config.num_warps, num_stages=self.config.num_stages,
        )  # fmt: skip


@triton.jit
def merged(acc_MH, max_M, sum_M, piece_MH, piece_max_M, piece_sum_M):
    """The state of online softmax after a piece, from the state before it and the piece's own.

    From the initial state, the result is the piece's, to the bit; and a piece of which a row sees nothing changes
    nothing.
    """
    new_max_M = tl.maximum(max_M, piece_max_M)
    # For rows that have seen no key yet, -inf - -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    keep_M, add_M = tl.exp2(max_M - base_M), tl.exp2(piece_max_M - base_M)
    keep_MH, add_MH = tl.broadcast_to(keep_M[:, None], acc_MH.shape), tl.broadcast_to(add_M[:, None], acc_MH.shape)
    # Written with fma: in a sum of two products, the compiler may choose which product is rounded first.
    return (
        tl.fma(acc_MH, keep_MH, piece_MH * add_MH),
        new_max_M,
        tl.fma(sum_M, keep_M, piece_sum_M * add_M),
    )


@triton.jit
def _finished(acc_MH, max_M, sum_M, sinks_ptr, heads_M, is_row_M):
    """The result of attention, from the state after all pieces."""
    if sinks_ptr is not None:
        sinks_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0.0)
        base_M = tl.where(max_M == float("-inf"), 0.0, max_M)
        sum_M += tl.exp2(tl.fma(sinks_M, tl.zeros_like(sinks_M) + LOG2_E, -base_M))
    # Rows that are not tokens may have seen no key.
    return acc_MH / tl.where(sum_M > 0, sum_M, 1.0)[:, None]


@triton.jit(do_not_specialize=["table_stride", "num_pieces"])
def _pieces_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    context_lens_ptr,
    query_starts_ptr,
    tiles_ptr,
    out_ptr,
    partial_ptr,
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
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (tile, key head) if `num_pieces` is 0: writes to `out`. Otherwise program (sequence and piece, key head),
    for sequences with one token each: writes to `partial` [S, N, P, H + 2] the state after that piece alone, with sum
    and maximum last."""
    TOKENS: tl.constexpr = BLOCK_M // NUM_GROUPS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * NUM_GROUPS
    place, kv_head = tl.program_id(0), tl.program_id(1)
    if num_pieces > 0:
        seq = (place // num_pieces).to(tl.int64)
        first_query, first_piece = 0, place % num_pieces
    else:
        seq = tl.load(tiles_ptr + 2 * place).to(tl.int64)
        first_query, first_piece = tl.load(tiles_ptr + 2 * place + 1), 0
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + seq)
    first_position = context_len - query_len + first_query
    end = tl.minimum(first_position + TOKENS, context_len)
    end_piece = tl.cdiv(end, PIECE)
    if num_pieces > 0:
        if first_piece >= end_piece:
            return
        end_piece = first_piece + 1

    rows_M = tl.arange(0, BLOCK_M)
    dims_H = tl.arange(0, BLOCK_H)
    queries_M = first_query + rows_M // NUM_GROUPS
    # Further rows would belong to tokens of the next tile.
    is_row_M = (rows_M < TOKENS * NUM_GROUPS) & (queries_M < query_len)
    heads_M = kv_head * NUM_GROUPS + rows_M % NUM_GROUPS
    offsets_M = (query_start + queries_M).to(tl.int64) * NUM_HEADS + heads_M
    is_real_MH = is_row_M[:, None] & (dims_H < HEAD_DIM)[None, :]
    q_MH = tl.load(q_ptr + offsets_M[:, None] * HEAD_DIM + dims_H[None, :], mask=is_real_MH, other=0.0)
    last_M = context_len - query_len + queries_M

    acc_MH = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        first_piece = tl.maximum(first_piece, seen_from // PIECE)
    for piece in range(first_piece, end_piece):
        piece_MH = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
        piece_max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        piece_sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        begin = tl.maximum(piece * PIECE, seen_from)
        piece_end = tl.minimum(piece * PIECE + PIECE, end)
        # A single loop for all tiles: for tiles that need no mask, another loop might add up in another order.
        for start in range(begin, piece_end, BLOCK_N):
            piece_MH, piece_max_M, piece_sum_M = attend_tile(
                q_MH, piece_MH, piece_max_M, piece_sum_M, kv_ptr, tables_ptr + seq * table_stride, kv_head, start,
                end, last_M, scale_in, scale_out, NUM_KV_HEADS, SLOTS, HEAD_DIM, WINDOW, HAS_SOFT_CAP, BLOCK_N, BLOCK_H,
                False,
            )  # fmt: skip
        acc_MH, max_M, sum_M = merged(acc_MH, max_M, sum_M, piece_MH, piece_max_M, piece_sum_M)

    if num_pieces > 0:
        state_ptrs = partial_ptr + (offsets_M * num_pieces + place % num_pieces) * (HEAD_DIM + 2)
        tl.store(state_ptrs[:, None] + dims_H[None, :], acc_MH, mask=is_real_MH)
        tl.store(state_ptrs + HEAD_DIM, sum_M, mask=is_row_M)
        tl.store(state_ptrs + HEAD_DIM + 1, max_M, mask=is_row_M)
    else:
        o_MH = _finished(acc_MH, max_M, sum_M, sinks_ptr, heads_M, is_row_M)
        out_ptrs = out_ptr + offsets_M[:, None] * HEAD_DIM + dims_H[None, :]
        tl.store(out_ptrs, o_MH.to(out_ptr.dtype.element_ty), mask=is_real_MH)


@triton.jit(do_not_specialize=["num_pieces"])
def _reduce_pieces_kernel(
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    sinks_ptr,
    num_pieces,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (sequence, key head): combines the pieces in `partial` into `out` [S, N, H]."""
    seq, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context_len = tl.load(context_lens_ptr + seq)
    groups_M, dims_H = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    is_row_M = groups_M < NUM_GROUPS
    heads_M = kv_head * NUM_GROUPS + groups_M
    rows_M = seq * (NUM_KV_HEADS * NUM_GROUPS) + heads_M
    is_real_MH = is_row_M[:, None] & (dims_H < HEAD_DIM)[None, :]
    acc_MH = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    first_piece = 0
    if WINDOW > 0:
        first_piece = tl.maximum(context_len - WINDOW, 0) // PIECE
    for piece in range(first_piece, tl.cdiv(context_len, PIECE)):
        state_ptrs = partial_ptr + (rows_M * num_pieces + piece) * (HEAD_DIM + 2)
        piece_MH = tl.load(state_ptrs[:, None] + dims_H[None, :], mask=is_real_MH, other=0.0)
        piece_sum_M = tl.load(state_ptrs + HEAD_DIM, mask=is_row_M, other=0.0)
        piece_max_M = tl.load(state_ptrs + HEAD_DIM + 1, mask=is_row_M, other=float("-inf"))
        acc_MH, max_M, sum_M = merged(acc_MH, max_M, sum_M, piece_MH, piece_max_M, piece_sum_M)
    o_MH = _finished(acc_MH, max_M, sum_M, sinks_ptr, heads_M, is_row_M)
    tl.store(out_ptr + rows_M[:, None] * HEAD_DIM + dims_H[None, :], o_MH.to(out_ptr.dtype.element_ty), mask=is_real_MH)
