"""Paged attention to latents: all query heads share one key of C + P numbers, of which the first C are also the value.

    decode     sequences that compute one token each, contexts split among programs; `decode.py` combines the pieces
    prefill    whole prompts and chunks of any lengths in one launch

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1, in absorbed form. A tile of latents is loaded once:
its two parts are keys, in two products that are added, and the first part is the value. The rows of a tile are the
query heads of one token (of several tokens, if a token has few heads), so 128 heads read a latent twice and not 128
times. Splitting, online softmax and the guarantees about bits are those of `decode.py`, `prefill.py` and `tile.py`.

Shapes: T tokens, S sequences, N query heads, C numbers of a latent, P of a rotated key, R = C + P; M rows of a tile, K
keys of a tile; C and P padded to powers of two. A layer of the pool: [block, 1, 1, slot, R].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.decode import MAX_PIECES, DecodeConfig, num_pieces, piece_of, reduce_kernel
from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.kernels.gpu.tile import MIN_SIDE

MAX_LATENT, MAX_ROTATED = 512, 64
"""The largest latent and rotated key, in numbers, that fit in a tile."""
Tiles = dict[TensorCores, tuple[tuple[int, int], tuple[int, int]]]
"""Rows and keys of a tile, for a pool of 16-bit numbers, and for one of 8-bit numbers, whose conversion takes
registers. 64 rows of 512 numbers in float32 are half of a multiprocessor's registers."""
DECODE_TILES: Tiles = {
    TensorCores.WGMMA: ((64, 32), (64, 16)),
    TensorCores.TCGEN05: ((64, 16), (32, 16)),
    TensorCores.MMA: ((32, 32), (32, 16)),
}
PREFILL_TILES: Tiles = {
    TensorCores.WGMMA: ((64, 32), (32, 16)),
    TensorCores.TCGEN05: ((64, 16), (32, 32)),
    TensorCores.MMA: ((32, 32), (32, 16)),
}
LARGE_BYTES = 113_152
"""Shared memory of a program with 32 rows and 32 keys and 5 stages; with 16 keys it is 75,008."""


@dataclass(frozen=True, slots=True)
class LatentTileConfig(DecodeConfig):
    """Sizes of a launch. The kind of GPU determines them: nothing is tuned at run time. No registers spill for latents
    of 512 numbers (tests/unit/test_triton_compile.py)."""

    block_m: int
    """Rows of a tile of queries."""

    @staticmethod
    def of_decode(kind: GpuKind, num_heads: int, itemsize: int, kv_itemsize: int) -> LatentTileConfig:
        """Rows are heads of one token. `kv_itemsize`: bytes of a number in the pool; 8-bit numbers are converted, which
        takes registers."""
        rows = max(int(triton.next_power_of_2(num_heads)), MIN_SIDE)
        if itemsize == 4:  # no tensor cores: correct, but slow
            return LatentTileConfig(block_m=MIN_SIDE, block_n=16, min_piece=256, num_warps=8, num_stages=1)
        if rows == MIN_SIDE:
            num_warps = 8 if kv_itemsize == 1 else 4
            return LatentTileConfig(block_m=rows, block_n=32, min_piece=256, num_warps=num_warps, num_stages=5)
        most_rows, block_n = _tile_of(DECODE_TILES, kind, kv_itemsize)
        return LatentTileConfig(block_m=min(rows, most_rows), block_n=block_n, min_piece=256, num_warps=8, num_stages=5)

    @staticmethod
    def of_prefill(kind: GpuKind, itemsize: int, kv_itemsize: int) -> LatentTileConfig:
        """Rows are heads of as many whole tokens as fit, or a part of one token's."""
        if itemsize == 4:
            return LatentTileConfig(block_m=MIN_SIDE, block_n=16, min_piece=0, num_warps=8, num_stages=1)
        block_m, block_n = _tile_of(PREFILL_TILES, kind, kv_itemsize)
        return LatentTileConfig(block_m=block_m, block_n=block_n, min_piece=0, num_warps=8, num_stages=5)

    def tokens_per_tile(self, num_heads: int) -> int:
        return max(self.block_m // num_heads, 1)


def _tile_of(tiles: Tiles, kind: GpuKind, kv_itemsize: int) -> tuple[int, int]:
    rows, keys = tiles[kind.tensor_cores][kv_itemsize == 1]
    return rows, keys if kind.shared_bytes >= LARGE_BYTES else min(keys, 16)


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
    """Compute the attention of each sequence's last token to its whole context, and write it to `out_SNC`.

    Like `engine.kernels.gpu.decode.paged_decode`, which describes the other arguments. `scratch` has the size
    `partial_size(S, N, C, max_context_len, config)`. `scale`: factor for products of queries and keys.
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
            context_lens, out_SNC, partial, weight, None, pieces,
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
    """Compute the causal attention of the tokens in `tiles` to their sequences, and write it to their rows of
    `out_TNC`.

    Like `engine.kernels.gpu.prefill.paged_prefill`, which describes the other arguments; `tiles` are for
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
    """The two parts of queries, [M, C] and [M, P]: zeros for missing rows."""
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
    `engine.kernels.gpu.tile.attend_tile`. `scale` includes log2(e)."""
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
    # Exact for a pool of 8-bit floats; for other pools this does nothing.
    c_KC = c_KC.to(q_MC.dtype)
    p_KP = p_KP.to(q_MC.dtype)
    s_MK = tl.dot(q_MP, tl.trans(p_KP), input_precision="ieee")
    s_MK = tl.dot(q_MC, tl.trans(c_KC), s_MK, input_precision="ieee") * scale
    s_MK = tl.where(positions_K[None, :] <= last_M[:, None], s_MK, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(s_MK, 1))
    # For a row that has seen no key yet, -inf - -inf would be NaN.
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

    Writes `partial` [S, N, pieces, C], and to `weight` [S, N, pieces] the logarithm of the piece's sum; or, unsplit,
    `out`.
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
    # Further rows would belong to tokens of the next tile.
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
    # Rows that are not tokens may have seen no key.
    o_MC = acc_MC / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    dims_C = tl.arange(0, BLOCK_C)
    out_ptrs = out_ptr + offsets_M[:, None] * LATENT + dims_C[None, :]
    tl.store(out_ptrs, o_MC.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & (dims_C < LATENT)[None, :])
