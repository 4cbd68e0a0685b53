"""Paged attention for sequences that compute any number of tokens: whole prompts and chunks of them, in one launch.

All keys are read from the pool, including this step's, which are written before attention starts: a chunk's own tokens
and its cached context are one range of positions. The rows of a tile are the tokens of a sequence times the query heads
that share a key head, so keys are read once for all of them. This is FlashAttention-2 (T. Dao, 2023) over pages. The
host, which knows every length, lists the tiles of a batch, longest context first.

Tiles of keys begin at multiples of their size: a token gets the same numbers however its prompt was split into chunks.
(Not the same as from `decode`, which splits contexts.)

Shapes: T tokens, S sequences, N query heads, K key/value heads, G = N / K, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.kernels.gpu.tile import LOG2_E, attend_tile, padded_head_dim, score_scales, with_sinks
from engine.models.scores import Scores


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Sizes of a launch. The kind of GPU determines them: nothing is tuned at run time."""

    block_m: int
    """Rows of a tile of queries: tokens times G, as many whole tokens as fit."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Stages of the pipeline: see `DecodeConfig`."""

    @staticmethod
    def of(
        kind: GpuKind, head_dim: int, itemsize: int, num_groups: int, kv_itemsize: int | None = None
    ) -> PrefillConfig:
        """Registers hold `block_m` rows of the output without spilling, and shared memory holds the queries and tiles
        of keys and values (tests/unit/test_triton_compile.py). `kv_itemsize`: bytes of a number in the pool, if not
        those of the queries; converting 8-bit numbers takes registers. With MMA the operands pass through registers,
        too, so there must be fewer scores or rows."""
        if itemsize == 4:  # no tensor cores: correct, but slow
            block_m = 16 if head_dim > 256 else 32
            return PrefillConfig(
                max(block_m, triton.next_power_of_2(num_groups)), block_n=16, num_warps=8, num_stages=1
            )
        is_mma = kind.tensor_cores is TensorCores.MMA
        if head_dim > 256:
            return PrefillConfig(block_m=32, block_n=16, num_warps=8, num_stages=2)
        if head_dim > 128 and is_mma:
            return PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
        if head_dim > 128:
            return PrefillConfig(block_m=128, block_n=16 if kv_itemsize == 1 else 32, num_warps=8, num_stages=2)
        # With 3 or 4 stages, the program would wait for each tile right after requesting it: see `DecodeConfig`.
        return PrefillConfig(block_m=128, block_n=32 if is_mma and head_dim > 64 else 64, num_warps=8, num_stages=5)


MAX_GROUPS = 64
"""The most query heads per key head. A tile has room for at least one token."""
MAX_LARGE_GROUPS = 32
"""The same with more than 256 numbers per head."""


def list_tiles(
    query_lens: NDArray[np.int64], context_lens: NDArray[np.int64], first_seq: int, tokens_per_tile: int
) -> NDArray[np.int32]:
    """[tiles, 2]: (sequence, first token of the tile, counted from the sequence's first token of this step).

    For the sequences from `first_seq` on. Tiles that read the most keys come first: otherwise they would end last,
    alone.
    """
    num_tiles = -(-query_lens[first_seq:] // tokens_per_tile)
    seqs = np.repeat(np.arange(first_seq, len(query_lens)), num_tiles)
    firsts = (np.arange(len(seqs)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens_per_tile
    reads = (context_lens - query_lens)[seqs] + firsts
    return np.stack((seqs, firsts), axis=1)[np.argsort(-reads, kind="stable")].astype(np.int32)


def paged_prefill(
    q_TNH: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tiles: torch.Tensor,
    out_TNH: torch.Tensor,
    *,
    scores: Scores,
    config: PrefillConfig,
    sinks_N: torch.Tensor | None = None,
) -> None:
    """Compute the causal attention of the tokens in `tiles` to their sequences, and write it to their rows of
    `out_TNH`.

    `q_TNH`, `out_TNH`: contiguous, of one dtype. `kv`: a layer of the pool, contiguous, of that dtype or 8-bit floats.
    int32: `block_tables` [S, blocks], `context_lens` [S] including this step's tokens, `query_starts` [S + 1] where
    each sequence's tokens begin among T, `tiles` from `list_tiles` for block_m // G tokens. `sinks_N`: float32, for
    each query head a score without a value.
    """
    _, num_heads, head_dim = q_TNH.shape
    num_kv_heads, block_size = kv.shape[2:4]
    scale_in, scale_out = score_scales(scores)
    _prefill_kernel[(len(tiles), num_kv_heads)](
        q_TNH, kv, block_tables, context_lens, query_starts, tiles, out_TNH, sinks_N, block_tables.stride(0),
        scale_in, scale_out,
        NUM_KV_HEADS=num_kv_heads, NUM_GROUPS=num_heads // num_kv_heads, HEAD_DIM=head_dim, SLOTS=block_size,
        WINDOW=scores.sliding_window, HAS_SOFT_CAP=scores.soft_cap > 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_H=padded_head_dim(head_dim), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    context_lens_ptr,
    query_starts_ptr,
    tiles_ptr,
    out_ptr,
    sinks_ptr,
    table_stride,
    scale_in,
    scale_out,
    NUM_KV_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (tile, key head)."""
    TOKENS: tl.constexpr = BLOCK_M // NUM_GROUPS
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first_query = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + seq)
    table_ptr = tables_ptr + seq * table_stride

    rows_M = tl.arange(0, BLOCK_M)
    dims_H = tl.arange(0, BLOCK_H)
    queries_M = first_query + rows_M // NUM_GROUPS
    # Further rows would belong to tokens of the next tile.
    is_row_M = (rows_M < TOKENS * NUM_GROUPS) & (queries_M < query_len)
    heads_M = kv_head * NUM_GROUPS + rows_M % NUM_GROUPS
    offsets_M = (query_start + queries_M).to(tl.int64) * (NUM_KV_HEADS * NUM_GROUPS) + heads_M
    offsets_MH = offsets_M[:, None] * HEAD_DIM + dims_H[None, :]
    is_real_MH = is_row_M[:, None] & (dims_H < HEAD_DIM)[None, :]
    q_MH = tl.load(q_ptr + offsets_MH, mask=is_real_MH, other=0.0)

    acc_MH = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    first_position = context_len - query_len + first_query
    last_M = context_len - query_len + queries_M
    end = tl.minimum(first_position + TOKENS, context_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        # Whole tiles of keys that the tile's first token sees are seen by all its tokens: no mask.
        whole_end = (first_position + 1) // BLOCK_N * BLOCK_N
        for start in range(0, whole_end, BLOCK_N):
            acc_MH, max_M, sum_M = attend_tile(
                q_MH, acc_MH, max_M, sum_M, kv_ptr, table_ptr, kv_head, start, end, last_M,
                scale_in, scale_out, NUM_KV_HEADS, SLOTS, HEAD_DIM, 0, HAS_SOFT_CAP, BLOCK_N, BLOCK_H, True,
            )  # fmt: skip
        begin = whole_end
    for start in range(begin, end, BLOCK_N):
        acc_MH, max_M, sum_M = attend_tile(
            q_MH, acc_MH, max_M, sum_M, kv_ptr, table_ptr, kv_head, start, end, last_M,
            scale_in, scale_out, NUM_KV_HEADS, SLOTS, HEAD_DIM, WINDOW, HAS_SOFT_CAP, BLOCK_N, BLOCK_H, False,
        )  # fmt: skip
    if sinks_ptr is not None:
        sinks_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0.0) * LOG2_E
        sum_M = with_sinks(sum_M, max_M, sinks_M)
    # Rows that are not tokens may have seen no key.
    o_MH = acc_MH / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    tl.store(out_ptr + offsets_MH, o_MH.to(out_ptr.dtype.element_ty), mask=is_real_MH)
