"""Paged attention to latents: all query heads share one key of C + P numbers, whose first C are also the value.

    project    norm and rotation of the step's latents and keys, and their write into the pool; rotation of its queries
    decode     sequences that compute one token each, contexts split among programs; `decode.py` puts pieces together
    prefill    whole prompts and chunks of any lengths in one launch

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1, in absorbed form. A tile of latents is loaded once:
its two parts are keys, in two products that add up, and the first is the value. Rows of a tile are the query heads of a
token (of several, where a token has few), so that 128 heads read a latent twice and not 128 times. Splitting, online
softmax and what is promised about bits are those of `decode.py`, `prefill.py` and `tile.py`.

Shapes: T tokens, S sequences, N query heads, C numbers of a latent, P of a rotated key, R = C + P; M rows of a tile, K
keys of a tile; C and P padded to powers of two. A layer of the pool: [block, 1, 1, slot, R].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.float8 import MAX_FLOAT8
from engine.kernels.gpu.decode import MAX_PIECES, DecodeConfig, num_pieces, piece_of, reduce_kernel
from engine.kernels.gpu.rotate import VALUES_PER_PROGRAM
from engine.kernels.gpu.tile import MIN_SIDE

MAX_LATENT, MAX_ROTATED = 512, 64
"""Numbers of a latent and of a rotated key that a tile has room for."""
MAX_ROWS = 64
"""Of a tile: 64 rows of 512 numbers in float32 are half of a multiprocessor's registers."""


@dataclass(frozen=True, slots=True)
class LatentTileConfig(DecodeConfig):
    """Sizes of a launch. Fixed: nothing is tuned at run time. No registers spill, for latents of 512 numbers
    (tests/unit/test_triton_compile.py)."""

    block_m: int
    """Rows of a tile of queries."""

    @staticmethod
    def of_decode(num_heads: int, itemsize: int, kv_itemsize: int) -> LatentTileConfig:
        """Rows are heads of one token. `kv_itemsize`: of the pool; what is widened takes registers."""
        rows = max(int(triton.next_power_of_2(num_heads)), MIN_SIDE)
        if itemsize == 4:  # no tensor cores: right, not fast
            return LatentTileConfig(block_m=MIN_SIDE, block_n=16, min_piece=256, num_warps=8, num_stages=1)
        if rows == MIN_SIDE:
            num_warps = 8 if kv_itemsize == 1 else 4
            return LatentTileConfig(block_m=rows, block_n=32, min_piece=256, num_warps=num_warps, num_stages=5)
        rows, block_n = min(rows, MAX_ROWS), 16 if kv_itemsize == 1 else 32
        return LatentTileConfig(block_m=rows, block_n=block_n, min_piece=256, num_warps=8, num_stages=5)

    @staticmethod
    def of_prefill(itemsize: int, kv_itemsize: int) -> LatentTileConfig:
        """Rows are heads of as many whole tokens as fit, or a part of one token's."""
        if itemsize == 4:
            return LatentTileConfig(block_m=MIN_SIDE, block_n=16, min_piece=0, num_warps=8, num_stages=1)
        if kv_itemsize == 1:
            return LatentTileConfig(block_m=MAX_ROWS // 2, block_n=16, min_piece=0, num_warps=8, num_stages=5)
        return LatentTileConfig(block_m=MAX_ROWS, block_n=32, min_piece=0, num_warps=8, num_stages=5)

    def tokens_per_tile(self, num_heads: int) -> int:
        return max(self.block_m // num_heads, 1)


def rotate_and_store_latents(
    q_TX: torch.Tensor,
    latent_TR: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor,
    eps: float,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    out_TNR: torch.Tensor,
) -> None:
    """Latents, normed, and their keys, rotated, into the pool; queries, rotated, to the last P numbers of `out_TNR`.

    `q_TX`: [T, N * (Q + P)], contiguous. `latent_TR`: rows contiguous. `cos_sin`: [T, 1, P] each, contiguous, the sines
    with the sign of `RotaryEmbedding`. `norm_weight`: [C]. `kv`: a layer of the pool; of 8-bit floats, what is too
    large for them is saturated. `slot_mapping`: [T] int64; below 0 nothing is written. In float32, rounded as in
    `rotate.py`.
    """
    num_tokens, num_heads, size = out_TNR.shape
    latent_dim = len(norm_weight)
    rotated = size - latent_dim
    block_p = triton.next_power_of_2(rotated)
    heads_per_program = max(VALUES_PER_PROGRAM // block_p, 1)
    _latent_project_kernel[(num_tokens, triton.cdiv(num_heads, heads_per_program) + 1)](
        q_TX, latent_TR, *cos_sin, norm_weight, kv, slot_mapping, out_TNR, latent_TR.stride(0), eps,
        NUM_HEADS=num_heads, QUERY=q_TX.shape[1] // num_heads, LATENT=latent_dim, ROTATED=rotated,
        MAX_FLOAT8=MAX_FLOAT8, BLOCK_A=heads_per_program, BLOCK_C=triton.next_power_of_2(latent_dim), BLOCK_P=block_p,
        num_warps=4,
    )  # fmt: skip


def decode_latents(
    q_SNR: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out_SNC: torch.Tensor,
    scratch: torch.Tensor,
    *,
    scale: float,
    max_context_len: int,
    config: LatentTileConfig,
) -> None:
    """Attention of each sequence's last token to all of it: written to `out_SNC`.

    As `engine.kernels.gpu.decode.paged_decode`, whose other arguments these are. `scratch` is as large as
    `partial_size(S, N, C, max_context_len, config)` says. `scale`: what products of queries and keys are multiplied
    with.
    """
    num_seqs, num_heads, size = q_SNR.shape
    latent_dim = out_SNC.shape[2]
    pieces = num_pieces(max_context_len, 0, config)
    num_partials = num_seqs * num_heads * pieces
    partial, weight = scratch[: num_partials * latent_dim], scratch[num_partials * latent_dim :]
    block_c = max(triton.next_power_of_2(latent_dim), MIN_SIDE)
    cut = {"MIN_PIECE": config.min_piece, "MAX_PIECES": MAX_PIECES}
    _latent_decode_kernel[(pieces, triton.cdiv(num_heads, config.block_m), num_seqs)](
        q_SNR, kv, block_tables, context_lens, out_SNC, partial, weight, block_tables.stride(0), pieces,
        scale / math.log(2),
        NUM_HEADS=num_heads, LATENT=latent_dim, ROTATED=size - latent_dim, SLOTS=kv.shape[3], **cut,
        BLOCK_M=config.block_m, BLOCK_K=config.block_n, BLOCK_C=block_c,
        BLOCK_P=max(triton.next_power_of_2(size - latent_dim), MIN_SIDE), IS_SPLIT=pieces > 1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if pieces > 1:
        reduce_kernel[(num_seqs, num_heads)](
            context_lens, out_SNC, partial, weight, pieces,
            NUM_HEADS=num_heads, HEAD_DIM=latent_dim, WINDOW=0, **cut, BLOCK_H=block_c, num_warps=8,
        )  # fmt: skip


def prefill_latents(
    q_TNR: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tiles: torch.Tensor,
    out_TNC: torch.Tensor,
    *,
    scale: float,
    config: LatentTileConfig,
) -> None:
    """Causal attention of the tokens in `tiles` to their sequences: written to their rows of `out_TNC`.

    As `engine.kernels.gpu.prefill.paged_prefill`, whose other arguments these are; `tiles` are of
    `config.tokens_per_tile(N)` tokens.
    """
    num_heads, size = q_TNR.shape[1:]
    latent_dim = out_TNC.shape[2]
    tokens = config.tokens_per_tile(num_heads)
    _latent_prefill_kernel[(len(tiles), triton.cdiv(tokens * num_heads, config.block_m))](
        q_TNR, kv, block_tables, context_lens, query_starts, tiles, out_TNC, block_tables.stride(0),
        scale / math.log(2),
        NUM_HEADS=num_heads, TOKENS=tokens, LATENT=latent_dim, ROTATED=size - latent_dim, SLOTS=kv.shape[3],
        BLOCK_M=config.block_m, BLOCK_K=config.block_n, BLOCK_C=max(triton.next_power_of_2(latent_dim), MIN_SIDE),
        BLOCK_P=max(triton.next_power_of_2(size - latent_dim), MIN_SIDE),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["latent_stride"])
def _latent_project_kernel(
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    kv_ptr,
    slots_ptr,
    out_ptr,
    latent_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    MAX_FLOAT8: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (token, tile of A of its N heads; the last one: its latent and key)."""
    token = tl.program_id(0).to(tl.int64)
    dims_P = tl.arange(0, BLOCK_P)
    # A rotation takes each number together with the one half a head further on.
    others_P = (dims_P + ROTATED // 2) % ROTATED
    is_dim_P = dims_P < ROTATED
    cos_P = tl.load(cos_ptr + token * ROTATED + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)
    sin_P = tl.load(sin_ptr + token * ROTATED + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)
    if tl.program_id(1) * BLOCK_A < NUM_HEADS:
        heads_A = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
        is_real_AP = (heads_A < NUM_HEADS)[:, None] & is_dim_P[None, :]
        head_ptrs = q_ptr + (token * NUM_HEADS + heads_A)[:, None] * QUERY + (QUERY - ROTATED)
        a_AP = tl.load(head_ptrs + dims_P[None, :], mask=is_real_AP, other=0.0)
        b_AP = tl.load(head_ptrs + others_P[None, :], mask=is_real_AP, other=0.0)
        y_AP = a_AP.to(tl.float32) * cos_P[None, :] + b_AP.to(tl.float32) * sin_P[None, :]
        out_ptrs = out_ptr + (token * NUM_HEADS + heads_A)[:, None] * (LATENT + ROTATED) + LATENT + dims_P[None, :]
        tl.store(out_ptrs, y_AP.to(a_AP.dtype), mask=is_real_AP)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row_ptr, kv_row_ptr = latent_ptr + token * latent_stride, kv_ptr + slot * (LATENT + ROTATED)
    dims_C = tl.arange(0, BLOCK_C)
    is_dim_C = dims_C < LATENT
    x_C = tl.load(row_ptr + dims_C, mask=is_dim_C, other=0.0)
    h_C = x_C.to(tl.float32)
    h_C = (h_C * tl.rsqrt(tl.sum(h_C * h_C, 0) / LATENT + eps)).to(x_C.dtype).to(tl.float32)
    weight_C = tl.load(weight_ptr + dims_C, mask=is_dim_C, other=0.0).to(tl.float32)
    tl.store(kv_row_ptr + dims_C, _for_pool((h_C * weight_C).to(x_C.dtype), kv_ptr, MAX_FLOAT8), mask=is_dim_C)
    a_P = tl.load(row_ptr + LATENT + dims_P, mask=is_dim_P, other=0.0)
    b_P = tl.load(row_ptr + LATENT + others_P, mask=is_dim_P, other=0.0)
    y_P = (a_P.to(tl.float32) * cos_P + b_P.to(tl.float32) * sin_P).to(a_P.dtype)
    tl.store(kv_row_ptr + LATENT + dims_P, _for_pool(y_P, kv_ptr, MAX_FLOAT8), mask=is_dim_P)


@triton.jit
def _for_pool(x, kv_ptr, MAX_FLOAT8: tl.constexpr):
    """As the pool holds it."""
    if kv_ptr.dtype.element_ty == tl.float8e4nv:
        # A comparison with NaN is false: NaN stays what it is, as in plain torch.
        z = x.to(tl.float32)
        z = tl.where(z > MAX_FLOAT8, MAX_FLOAT8, tl.where(z < -MAX_FLOAT8, -MAX_FLOAT8, z))
        return z.to(tl.float8e4nv)
    else:
        return x


@triton.jit
def _load_queries(
    q_ptr,
    rows_M,
    is_row_M,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The two parts of queries, [M, C] and [M, P]: zeros where there are none."""
    dims_C, dims_P = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    row_ptrs = q_ptr + rows_M[:, None] * (LATENT + ROTATED)
    q_MC = tl.load(row_ptrs + dims_C[None, :], mask=is_row_M[:, None] & (dims_C < LATENT)[None, :], other=0.0)
    q_MP = tl.load(row_ptrs + LATENT + dims_P[None, :], mask=is_row_M[:, None] & (dims_P < ROTATED)[None, :], other=0.0)
    return q_MC, q_MP


@triton.jit
def _attend_latents(
    q_MC,
    q_MP,
    acc_MC,
    max_M,
    sum_M,
    kv_ptr,
    table_ptr,
    start,
    end,
    last_M,
    scale,
    SLOTS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The state (acc, max, sum) of online softmax after positions `start` .. `start + K` of one sequence: see
    `engine.kernels.gpu.tile.attend_tile`. `scale` has log2(e) in it."""
    positions_K = start + tl.arange(0, BLOCK_K)
    dims_C, dims_P = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    is_there_K = positions_K < end
    block_ids_K = tl.load(table_ptr + positions_K // SLOTS, mask=is_there_K, other=0)
    rows_K = block_ids_K.to(tl.int64) * SLOTS + positions_K % SLOTS
    row_ptrs = kv_ptr + rows_K[:, None] * (LATENT + ROTATED)
    c_KC = tl.load(row_ptrs + dims_C[None, :], mask=is_there_K[:, None] & (dims_C < LATENT)[None, :], other=0.0)
    p_KP = tl.load(
        row_ptrs + LATENT + dims_P[None, :], mask=is_there_K[:, None] & (dims_P < ROTATED)[None, :], other=0.0
    )
    # From a pool of 8-bit floats: exact. Otherwise nothing.
    c_KC = c_KC.to(q_MC.dtype)
    p_KP = p_KP.to(q_MC.dtype)
    s_MK = tl.dot(q_MP, tl.trans(p_KP), input_precision="ieee")
    s_MK = tl.dot(q_MC, tl.trans(c_KC), s_MK, input_precision="ieee") * scale
    s_MK = tl.where(positions_K[None, :] <= last_M[:, None], s_MK, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(s_MK, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    w_MK = tl.exp2(s_MK - base_M[:, None])
    shrink_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(w_MK, 1)
    acc_MC = tl.dot(w_MK.to(c_KC.dtype), c_KC, acc_MC * shrink_M[:, None], input_precision="ieee")
    return acc_MC, new_max_M, sum_M


@triton.jit(do_not_specialize=["table_stride", "num_pieces"])
def _latent_decode_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    context_lens_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    table_stride,
    num_pieces,
    scale,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    SLOTS: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Program (sequence, tile of its heads, piece).

    `partial` [S, N, pieces, C] and `weight` [S, N, pieces], the logarithm of the piece's sum; or, unsplit, `out`.
    """
    seq = tl.program_id(2).to(tl.int64)
    piece = tl.program_id(0)
    context_len = tl.load(context_lens_ptr + seq)
    _, piece_len = piece_of(context_len, 0, MIN_PIECE, MAX_PIECES)
    begin = piece * piece_len
    end = tl.minimum(begin + piece_len, context_len)
    if IS_SPLIT:  # noqa: SIM102, one is known when this is compiled, the other is not
        if begin >= context_len:
            return
    heads_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row_M = heads_M < NUM_HEADS
    rows_M = seq * NUM_HEADS + heads_M
    q_MC, q_MP = _load_queries(q_ptr, rows_M, is_row_M, LATENT, ROTATED, BLOCK_C, BLOCK_P)
    acc_MC = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    last_M = tl.zeros([BLOCK_M], dtype=tl.int32) + (end - 1)
    for start in range(begin, end, BLOCK_K):
        acc_MC, max_M, sum_M = _attend_latents(
            q_MC, q_MP, acc_MC, max_M, sum_M, kv_ptr, tables_ptr + seq * table_stride, start, end, last_M, scale,
            SLOTS, LATENT, ROTATED, BLOCK_K, BLOCK_C, BLOCK_P,
        )  # fmt: skip
    o_MC = acc_MC / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    dims_C = tl.arange(0, BLOCK_C)
    is_real_MC = is_row_M[:, None] & (dims_C < LATENT)[None, :]
    if IS_SPLIT:
        partials_M = rows_M * num_pieces + piece
        tl.store(partial_ptr + partials_M[:, None] * LATENT + dims_C[None, :], o_MC, mask=is_real_MC)
        tl.store(weight_ptr + partials_M, max_M + tl.log2(sum_M), mask=is_row_M)
    else:
        out_ptrs = out_ptr + rows_M[:, None] * LATENT + dims_C[None, :]
        tl.store(out_ptrs, o_MC.to(out_ptr.dtype.element_ty), mask=is_real_MC)


@triton.jit(do_not_specialize=["table_stride"])
def _latent_prefill_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    context_lens_ptr,
    query_starts_ptr,
    tiles_ptr,
    out_ptr,
    table_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (tile of tokens, tile of their heads)."""
    seq = tl.load(tiles_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first_query = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + seq)

    rows_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    queries_M = first_query + rows_M // NUM_HEADS
    # Rows beyond the tile's last whole token would be tokens of the next tile.
    is_row_M = (rows_M < TOKENS * NUM_HEADS) & (queries_M < query_len)
    offsets_M = (query_start + queries_M).to(tl.int64) * NUM_HEADS + rows_M % NUM_HEADS
    q_MC, q_MP = _load_queries(q_ptr, offsets_M, is_row_M, LATENT, ROTATED, BLOCK_C, BLOCK_P)
    acc_MC = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)
    last_M = context_len - query_len + queries_M
    end = tl.minimum(context_len - query_len + first_query + TOKENS, context_len)
    for start in range(0, end, BLOCK_K):
        acc_MC, max_M, sum_M = _attend_latents(
            q_MC, q_MP, acc_MC, max_M, sum_M, kv_ptr, tables_ptr + seq * table_stride, start, end, last_M, scale,
            SLOTS, LATENT, ROTATED, BLOCK_K, BLOCK_C, BLOCK_P,
        )  # fmt: skip
    # Rows that are no tokens may have seen nothing.
    o_MC = acc_MC / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    dims_C = tl.arange(0, BLOCK_C)
    out_ptrs = out_ptr + offsets_M[:, None] * LATENT + dims_C[None, :]
    tl.store(out_ptrs, o_MC.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & (dims_C < LATENT)[None, :])
