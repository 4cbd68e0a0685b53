"""Reads one tile of keys and values from the pool through a block table, and applies its step of online softmax.

The softmax is that of M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, as T. Dao uses it
in "FlashAttention-2", 2023 (algorithm 1): a running maximum and sum per query; old sums are scaled down when the
maximum grows; the division comes at the end. Exponentials have base 2, as in the hardware.

Scores arrive at the softmax in units of log2(e): `score_scales` folds that, the scale and the soft cap into two
factors. A soft cap c replaces a score s by c * tanh(s / c) (Gemma 2, 2024).

Shapes: M query rows of a tile, N keys of a tile, H head dim, padded to a power of two; K key/value heads. A layer of
the pool: [block, 2, K, slot, H].
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from engine.models.scores import Scores

LOG2_E: tl.constexpr = tl.constexpr(1 / math.log(2))
MAX_HEAD_DIM = 512
MIN_SIDE = 16
"""The smallest side of a tile that tensor cores multiply."""


def padded_head_dim(head_dim: int) -> int:
    """The head dim padded for a tile: a power of two."""
    return max(int(triton.next_power_of_2(head_dim)), MIN_SIDE)


def score_scales(scores: Scores) -> tuple[float, float]:
    """The factors for products of q and k before and after tanh; without a cap, only the first applies."""
    if scores.soft_cap:
        return scores.scale / scores.soft_cap, scores.soft_cap * LOG2_E.value
    return scores.scale * LOG2_E.value, 1.0


@triton.jit
def with_sinks(sum_M, max_M, sinks_M):
    """The sums of online softmax, each with one more score that has no value. All three arguments are in units of
    log2(e)."""
    # For a row that has seen no key, -inf - -inf would be NaN. Its result is divided by a sum above 0.
    base_M = tl.where(max_M == float("-inf"), 0.0, max_M)
    return sum_M + tl.exp2(sinks_M - base_M)


@triton.jit
def _load_kv(
    kv_ptr,
    table_ptr,
    kv_head,
    start,
    end,
    NUM_KV_HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Keys and values [N, H] of positions from `start` on, in the pool's type; zeros from `end` on, unless the whole
    tile lies before it (IS_WHOLE).

    Addresses have 64 bits: a pool has more than 2**31 numbers.
    """
    positions_N = start + tl.arange(0, BLOCK_N)
    dims_H = tl.arange(0, BLOCK_H)
    is_there_N = positions_N < end
    if IS_WHOLE:
        block_ids_N = tl.load(table_ptr + positions_N // SLOTS)
    else:
        block_ids_N = tl.load(table_ptr + positions_N // SLOTS, mask=is_there_N, other=0)
    rows_N = (block_ids_N.to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * SLOTS + positions_N % SLOTS
    k_ptrs = kv_ptr + rows_N[:, None] * HEAD_DIM + dims_H[None, :]
    v_ptrs = k_ptrs + NUM_KV_HEADS * SLOTS * HEAD_DIM
    if IS_WHOLE and HEAD_DIM == BLOCK_H:
        k_NH = tl.load(k_ptrs)
        v_NH = tl.load(v_ptrs)
    else:
        is_real_NH = is_there_N[:, None] & (dims_H < HEAD_DIM)[None, :]
        k_NH = tl.load(k_ptrs, mask=is_real_NH, other=0.0)
        v_NH = tl.load(v_ptrs, mask=is_real_NH, other=0.0)
    return k_NH, v_NH


@triton.jit
def attend_tile(
    q_MH,
    acc_MH,
    max_M,
    sum_M,
    kv_ptr,
    table_ptr,
    kv_head,
    start,
    end,
    last_M,
    scale_in,
    scale_out,
    NUM_KV_HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """The state (acc, max, sum) of online softmax after positions `start` .. `start + N` of one sequence.

    `last_M`: the last position that each row sees; `WINDOW` > 0: each row sees only that many positions up to it.
    `end`: the end of the positions that may be read. `IS_WHOLE`: every row sees the whole tile, so nothing is masked.
    """
    k_NH, v_NH = _load_kv(
        kv_ptr, table_ptr, kv_head, start, end, NUM_KV_HEADS, SLOTS, HEAD_DIM, BLOCK_N, BLOCK_H, IS_WHOLE
    )
    # Exact for a pool of 8-bit floats; for other pools this does nothing.
    k_NH = k_NH.to(q_MH.dtype)
    v_NH = v_NH.to(q_MH.dtype)
    # "ieee": float32 keeps its precision, of which tensor cores would keep only 10 bits; no effect on 16-bit types.
    s_MN = tl.dot(q_MH, tl.trans(k_NH), input_precision="ieee")
    scale = scale_in
    if HAS_SOFT_CAP:
        # tanh, written out because Triton has none that also runs interpreted. Exact at both infinities.
        s_MN = 1 - 2 / (tl.exp(2 * (s_MN * scale_in)) + 1)
        scale = scale_out
    if not IS_WHOLE:
        distance_MN = last_M[:, None] - (start + tl.arange(0, BLOCK_N))[None, :]
        is_seen_MN = distance_MN >= 0
        if WINDOW > 0:
            is_seen_MN = is_seen_MN & (distance_MN < WINDOW)
        s_MN = tl.where(is_seen_MN, s_MN, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(s_MN, 1) * scale)
    # For a row that has seen no key yet, -inf - -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    p_MN = tl.exp2(s_MN * scale - base_M[:, None])  # one instruction for product and difference
    shrink_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
    acc_MH = tl.dot(p_MN.to(v_NH.dtype), v_NH, acc_MH * shrink_M[:, None], input_precision="ieee")
    return acc_MH, new_max_M, sum_M
