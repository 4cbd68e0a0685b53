"""Causal attention of prompts to contiguous keys and values of heads, which were unfolded from latents.

FlashAttention-2 (T. Dao, 2023) over a slice of contexts (engine/attention/unfolded_slices.py), with the keys and values
of DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1. The rows of a tile are tokens of a sequence, for
one head. A key has two parts. The part with positions is shared by all heads and is stored behind the latent, so a
score is the sum of two products, and the parts need not be concatenated first. The guarantees about bits are those of
`prefill.py`; a softmax that continues in the next slice keeps its state in float32, so the end of a slice does not
change any bits.

Shapes: T tokens, N query heads, Q numbers of a head's query without positions, P with them, V of its value; S rows of
the slice, R numbers of each of its latents and rotated keys; M rows of a tile, K keys of a tile; Q, P and V padded to
powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.kernels.gpu.tile import MIN_SIDE

MAX_QUERY, MAX_VALUE = 128, 128
"""The largest query and value, in numbers, that fit in a tile, beside the rotated part (`latents.MAX_ROTATED`)."""


@dataclass(frozen=True, slots=True)
class UnfoldedConfig:
    """Sizes of a launch. The kind of GPU determines them: nothing is tuned at run time. No registers spill for the
    largest heads (tests/unit/test_triton_compile.py)."""

    block_m: int
    """Tokens of a tile."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int

    @staticmethod
    def of(kind: GpuKind, itemsize: int) -> UnfoldedConfig:
        if itemsize == 4:  # no tensor cores: correct, but slow
            return UnfoldedConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)
        # Keys are contiguous, so with 3 stages one tile is in flight while another is multiplied; with 2 stages none
        # is.
        block_n = 32 if kind.tensor_cores is TensorCores.MMA else 64
        return UnfoldedConfig(block_m=128, block_n=block_n, num_warps=8, num_stages=3)


def attend_unfolded(
    q_TX: torch.Tensor,
    rotated_TNP: torch.Tensor,
    k_NSQ: torch.Tensor,
    v_NSV: torch.Tensor,
    latent_SR: torch.Tensor,
    tiles: torch.Tensor,
    out_TNV: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float,
    config: UnfoldedConfig,
) -> None:
    """Compute the attention of the tokens in `tiles` to a slice. The result is written to the tokens' rows of `out_TNV`
    if this is their last slice, otherwise to `state`, from which the next slice continues.

    All contiguous, of one dtype. `q_TX`: [T, N * (Q + P)]; the last P numbers of each head are not read, `rotated_TNP`
    has them. `latent_SR`: the last P numbers of each row are its key's. `tiles`: [tiles, 6] int32, from
    `unfolded_slices.Slice` for `config.block_m` tokens. `state`: float32, `state_size` numbers; unused if all tiles
    begin and end in this slice. `scale`: factor for products of queries and keys; above 0.
    """
    num_heads, num_slots, query_dim = k_NSQ.shape
    rotated_dim, value_dim = rotated_TNP.shape[2], v_NSV.shape[2]
    blocks = [max(triton.next_power_of_2(size), MIN_SIDE) for size in (query_dim, rotated_dim, value_dim)]
    _unfolded_kernel[(len(tiles), num_heads)](
        q_TX, rotated_TNP, k_NSQ, v_NSV, latent_SR, tiles, out_TNV, state, num_slots, scale / math.log(2),
        NUM_HEADS=num_heads, QUERY=query_dim, ROTATED=rotated_dim, VALUE=value_dim, ROW=latent_SR.shape[1],
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_Q=blocks[0], BLOCK_P=blocks[1], BLOCK_V=blocks[2],
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def state_size(num_tokens: int, num_heads: int, value_dim: int) -> int:
    """The number of float32 in the softmax state: for each token and head its sums, their maximum and the sum of
    weights."""
    return num_tokens * num_heads * (value_dim + 2)


@triton.jit
def _attend_keys(
    q_MQ,
    q_MP,
    acc_MV,
    max_M,
    sum_M,
    k_ptr,
    v_ptr,
    rotated_ptr,
    start,
    num_keys,
    last_M,
    scale,
    QUERY: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """The state (acc, max, sum) of online softmax after keys `start` .. `start + K` of a sequence's part of the slice:
    see `engine.kernels.gpu.tile.attend_tile`. `scale` includes log2(e). Pointers refer to the part's first key."""
    keys_K = start + tl.arange(0, BLOCK_N)
    dims_Q, dims_P, dims_V = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    k_ptrs = k_ptr + keys_K[:, None] * QUERY + dims_Q[None, :]
    p_ptrs = rotated_ptr + keys_K[:, None] * ROW + dims_P[None, :]
    v_ptrs = v_ptr + keys_K[:, None] * VALUE + dims_V[None, :]
    if IS_WHOLE and QUERY == BLOCK_Q and ROTATED == BLOCK_P and VALUE == BLOCK_V:
        k_KQ, p_KP, v_KV = tl.load(k_ptrs), tl.load(p_ptrs), tl.load(v_ptrs)
    else:
        is_there_K1 = (keys_K < num_keys)[:, None]
        k_KQ = tl.load(k_ptrs, mask=is_there_K1 & (dims_Q < QUERY)[None, :], other=0.0)
        p_KP = tl.load(p_ptrs, mask=is_there_K1 & (dims_P < ROTATED)[None, :], other=0.0)
        v_KV = tl.load(v_ptrs, mask=is_there_K1 & (dims_V < VALUE)[None, :], other=0.0)
    s_MK = tl.dot(q_MP, tl.trans(p_KP), input_precision="ieee")
    s_MK = tl.dot(q_MQ, tl.trans(k_KQ), s_MK, input_precision="ieee")
    if not IS_WHOLE:
        s_MK = tl.where(keys_K[None, :] <= last_M[:, None], s_MK, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(s_MK, 1) * scale)
    # For a row that has seen no key yet, -inf - -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    w_MK = tl.exp2(s_MK * scale - base_M[:, None])  # one instruction for product and difference
    shrink_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(w_MK, 1)
    acc_MV = tl.dot(w_MK.to(v_KV.dtype), v_KV, acc_MV * shrink_M[:, None], input_precision="ieee")
    return acc_MV, new_max_M, sum_M


@triton.jit(do_not_specialize=["num_slots"])
def _unfolded_kernel(
    q_ptr,
    rotated_ptr,
    k_ptr,
    v_ptr,
    latent_ptr,
    tiles_ptr,
    out_ptr,
    state_ptr,
    num_slots,
    scale,
    NUM_HEADS: tl.constexpr,
    QUERY: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile, head)."""
    tile_ptr, head = tiles_ptr + 6 * tl.program_id(0), tl.program_id(1)
    first_token, num_tokens, first_row = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    num_seen, num_keys, marks = tl.load(tile_ptr + 3), tl.load(tile_ptr + 4), tl.load(tile_ptr + 5)

    rows_M = tl.arange(0, BLOCK_M)
    dims_Q, dims_P, dims_V = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    is_row_M1 = (rows_M < num_tokens)[:, None]
    heads_M1 = ((first_token + rows_M).to(tl.int64) * NUM_HEADS + head)[:, None]
    q_ptrs = q_ptr + heads_M1 * (QUERY + ROTATED) + dims_Q[None, :]
    q_MQ = tl.load(q_ptrs, mask=is_row_M1 & (dims_Q < QUERY)[None, :], other=0.0)
    p_ptrs = rotated_ptr + heads_M1 * ROTATED + dims_P[None, :]
    q_MP = tl.load(p_ptrs, mask=is_row_M1 & (dims_P < ROTATED)[None, :], other=0.0)

    is_real_MV = is_row_M1 & (dims_V < VALUE)[None, :]
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    state_ptrs = state_ptr + heads_M1 * (VALUE + 2) + dims_V[None, :]
    of_row_M = state_ptr + ((first_token + rows_M).to(tl.int64) * NUM_HEADS + head) * (VALUE + 2) + VALUE
    if marks % 2 == 0:
        acc_MV = tl.load(state_ptrs, mask=is_real_MV, other=0.0)
        max_M = tl.load(of_row_M, mask=rows_M < num_tokens, other=float("-inf"))
        sum_M = tl.load(of_row_M + 1, mask=rows_M < num_tokens, other=0.0)

    # 64 bits: the keys and values of a long context may have more than 2**31 numbers.
    head_row = head.to(tl.int64) * num_slots + first_row
    k_ptr += head_row * QUERY
    v_ptr += head_row * VALUE
    keys_ptr = latent_ptr + first_row.to(tl.int64) * ROW + (ROW - ROTATED)
    last_M = tl.minimum(num_seen - 1 + rows_M, num_keys - 1)
    # Whole tiles of keys that the tile's first token sees are seen by all its tokens: no mask.
    whole_end = tl.minimum(tl.maximum(num_seen, 0), num_keys) // BLOCK_N * BLOCK_N
    for start in range(0, whole_end, BLOCK_N):
        acc_MV, max_M, sum_M = _attend_keys(
            q_MQ, q_MP, acc_MV, max_M, sum_M, k_ptr, v_ptr, keys_ptr, start, num_keys, last_M, scale,
            QUERY, ROTATED, VALUE, ROW, BLOCK_N, BLOCK_Q, BLOCK_P, BLOCK_V, True,
        )  # fmt: skip
    for start in range(whole_end, num_keys, BLOCK_N):
        acc_MV, max_M, sum_M = _attend_keys(
            q_MQ, q_MP, acc_MV, max_M, sum_M, k_ptr, v_ptr, keys_ptr, start, num_keys, last_M, scale,
            QUERY, ROTATED, VALUE, ROW, BLOCK_N, BLOCK_Q, BLOCK_P, BLOCK_V, False,
        )  # fmt: skip
    if marks >= 2:
        # Rows that are not tokens see the same keys, with zero queries: their sums are above 0.
        out_ptrs = out_ptr + heads_M1 * VALUE + dims_V[None, :]
        tl.store(out_ptrs, (acc_MV / sum_M[:, None]).to(out_ptr.dtype.element_ty), mask=is_real_MV)
    else:
        tl.store(state_ptrs, acc_MV, mask=is_real_MV)
        tl.store(of_row_M, max_M, mask=rows_M < num_tokens)
        tl.store(of_row_M + 1, sum_M, mask=rows_M < num_tokens)
