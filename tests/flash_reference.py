"""FlashAttention's functions in float64, one sequence at a time, with the parameters, requirements and semantics of the
real ones.

These functions refuse what the real ones refuse (types, strides, page sizes, shapes), and also any call whose result
bits for a sequence could depend on the batch. Where the real ones silently skip work (queries beyond the given longest
query length, keys beyond the given longest context), the result here is NaN. The rules come from flash-attn 2.8.3
(csrc/flash_attn/flash_api.cpp), the `hopper` folder beside it, flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py),
and torch 2.13 (ATen/native/transformers/cuda).

Torch's real `varlen_attn` needs no stand-in: only the operator that it calls, `aten::_flash_attention_forward`, has no
CPU implementation (`aten_on_cpu` provides one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)
PAGE_MULTIPLE = 256


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, *numbers: torch.Tensor
) -> None:
    assert q.dtype in HALVES, "FlashAttention only supports fp16 and bf16"
    assert k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype"
    for tensor in (q, k, v, table):
        assert tensor.stride(-1) == 1, "contiguous last dimension"
    assert table.dtype == torch.int32
    for tensor in numbers:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    num_heads, head_dim = q.shape[-2:]
    assert head_dim <= 256
    assert head_dim % 8 == 0
    assert num_heads % k.shape[2] == 0
    assert k.dim() == v.dim() == 4
    assert k.shape == v.shape


def _attend(
    q_TNH: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    query_starts: list[int],
    context_lens: list[int],
    table: torch.Tensor,
    max_query_len: int,
    max_context_len: int,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """Queries are aligned to the end of the context: of L queries, the last sees all C keys, the first C - L + 1."""
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    groups = q_TNH.shape[1] // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    left, right = window[0], 0 if causal else window[1]
    out = torch.full_like(q_TNH, float("nan"))
    assert len(table) == len(context_lens) == len(query_starts) - 1 > 0, "batch size"
    for i, num_keys in enumerate(context_lens):
        assert num_keys <= table.shape[1] * page_size, "max(seqlens_k) exceeds the capacity addressable by block_table"
        first, last = query_starts[i], query_starts[i + 1]
        num_queries = last - first
        pages = table[i, : -(-num_keys // page_size)].long()
        k, v = (x[pages].flatten(0, 1)[:num_keys].double().repeat_interleave(groups, 1) for x in (k_pages, v_pages))
        positions = torch.arange(num_queries)[:, None] + num_keys - num_queries
        keys = torch.arange(num_keys)[None, :]
        is_hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        if right >= 0:
            is_hidden |= keys > positions + right
        if left >= 0:
            is_hidden |= keys < positions - left
        scores = torch.einsum("qnh,knh->nqk", q_TNH[first:last].double(), k) * scale
        weights = torch.softmax(scores.masked_fill(is_hidden, -math.inf), dim=-1).nan_to_num(0.0)
        o = torch.einsum("nqk,knh->qnh", weights, v)
        is_computed = num_queries <= max_query_len and num_keys <= max_context_len
        out[first:last] = o.to(q_TNH.dtype) if is_computed else float("nan")
    return out


# -- FlashAttention-2 -----------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    assert block_table is not None, "pages are what we have"
    assert max_seqlen_q > 1, "would choose a number of splits by the batch"
    _check_inputs(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    assert k.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256"
    return _attend(
        q, k, v, query_starts=cu_seqlens_q.tolist(), context_lens=cu_seqlens_k.diff().tolist(), table=block_table,
        max_query_len=max_seqlen_q, max_context_len=max_seqlen_k, causal=causal, window=window_size,
        scale=softmax_scale,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: torch.Tensor | None = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert block_table is not None
    assert cache_seqlens is not None
    assert num_splits == 1, "would depend on the batch"
    _check_inputs(q, k_cache, v_cache, block_table, cache_seqlens)
    assert k_cache.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256"
    return _attend_batch(q, k_cache, v_cache, cache_seqlens, block_table, causal, window_size, softmax_scale)


def _attend_batch(
    q_SLNH: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_lens: torch.Tensor, table: torch.Tensor,
    causal: bool, window: tuple[int, int], scale: float | None,
) -> torch.Tensor:  # fmt: skip
    num_seqs, query_len = q_SLNH.shape[:2]
    starts = list(range(0, (num_seqs + 1) * query_len, query_len))
    out = _attend(
        q_SLNH.flatten(0, 1), k, v, query_starts=starts, context_lens=context_lens.tolist(), table=table,
        max_query_len=query_len, max_context_len=table.shape[1] * k.shape[1], causal=causal, window=window, scale=scale,
    )  # fmt: skip
    return out.view_as(q_SLNH)


# -- FlashAttention-3 -----------------------------------------------------------------------------------------------


def flash_attn_3_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: Any = None, v: Any = None, qv: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert page_table is not None
    assert cache_seqlens is not None
    assert num_splits == 1, "would depend on the batch"
    _check_inputs(q, k_cache, v_cache, page_table, cache_seqlens)
    if cu_seqlens_q is None:
        return _attend_batch(q, k_cache, v_cache, cache_seqlens, page_table, causal, window_size, softmax_scale)
    assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
    _check_inputs(q, k_cache, v_cache, page_table, cu_seqlens_q)
    return _attend(
        q, k_cache, v_cache, query_starts=cu_seqlens_q.tolist(), context_lens=cache_seqlens.tolist(), table=page_table,
        max_query_len=max_seqlen_q, max_context_len=page_table.shape[1] * k_cache.shape[1], causal=causal,
        window=window_size, scale=softmax_scale,
    )  # fmt: skip


# -- FlashAttention-4 -----------------------------------------------------------------------------------------------


def flash_attn_4_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Any = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: torch.Tensor | None = None,
    gather_kv_indices: Any = None, page_table: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Any = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    assert page_table is not None
    assert seqused_k is not None
    assert num_splits == 1, "would depend on the batch"
    _check_inputs(q, k, v, page_table, seqused_k)
    assert q.shape[-1] % 16 == 0, "Paged KV does not support irregular head dim"
    for tensor in (q, k, v):
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1]), "would be copied"
    window = tuple(-1 if size is None else size for size in window_size)
    if cu_seqlens_q is None:
        return _attend_batch(q, k, v, seqused_k, page_table, causal, window, softmax_scale), None
    _check_inputs(q, k, v, page_table, cu_seqlens_q)
    return _attend(
        q, k, v, query_starts=cu_seqlens_q.tolist(), context_lens=seqused_k.tolist(), table=page_table,
        max_query_len=len(q) if max_seqlen_q is None else max_seqlen_q,
        max_context_len=max_seqlen_k or page_table.shape[1] * k.shape[1], causal=causal, window=window,
        scale=softmax_scale,
    ), None  # fmt: skip


# -- torch's own ----------------------------------------------------------------------------------------------------


def _flash_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool,
    *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert cum_seq_q is not None
    assert cum_seq_k is not None, "cumulative_sequence_length_q and _k must be both set or both not set"
    assert seqused_k is not None
    assert block_table is not None
    assert num_splits == 1, "would depend on the batch, and write to wrong places"
    _check_inputs(query, key, value, block_table, cum_seq_q, cum_seq_k, seqused_k)
    assert key.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256"
    out = _attend(
        query, key, value, query_starts=cum_seq_q.tolist(), context_lens=seqused_k.tolist(), table=block_table,
        max_query_len=max_q, max_context_len=max_k, causal=is_causal,
        window=tuple(-1 if size is None else size for size in (window_size_left, window_size_right)), scale=scale,
    )  # fmt: skip
    lse = torch.zeros(query.shape[1], len(query))
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.zeros(0)


@contextmanager
def aten_on_cpu() -> Iterator[None]:
    """Within this context torch's real `varlen_attn` works on CPU tensors: it calls the function above."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _flash_attention_forward, "CPU")
        yield
