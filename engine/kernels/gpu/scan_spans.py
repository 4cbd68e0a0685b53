"""Mamba-2 layers (engine/models/mamba2.py): the scan of many tokens at once, in spans of 16 to 64.

With k, v, q and y the rows of a span, the decays g from its begin to each token, and S the state before it:

    P = (q k^T) * (g_i / g_j) * dt_j, for j <= i          y = g q S + P v + skip v
                                                          S = g_end S + (g_end / g * dt * k)^T v

(Dao, Gu: Transformers are SSMs, arXiv:2405.21060; the way of splitting it over programs is ours.)

Shapes: T tokens of a span, C channels, N heads, K and V dims of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.gpu_kind import GpuKind, gpu_kind
from engine.kernels.gpu.scan import scan
from engine.kernels.gpu.spans import (
    FEWEST,
    decays_between,
    fits_spans,
    halves,
    last_of,
    logs_of_decays,
    product_with_halves,
    span_config,
)
from engine.models.recurrent_states import RecurrentStep


def scan_in_spans(
    x_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    dt_TN: torch.Tensor,
    skip_N: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
    kind: GpuKind | None = None,
) -> torch.Tensor:
    """A `Scan` (engine/models/recurrent_ops.py). All but the rows of `matrices` are contiguous. `kind`: unless given,
    that of the tensors' device."""
    if not fits_spans(x_TC, matrices, step):
        return scan(x_TC, decay_TN, dt_TN, skip_N, matrices, step)
    _, num_heads, key_dim, value_dim = matrices.shape
    y_TNV = scan(x_TC, decay_TN, dt_TN, skip_N, matrices, step, fewer_than=FEWEST)
    config = span_config(kind or gpu_kind(x_TC.device), key_dim, num_stages=3)
    _scan_spans_kernel[(len(step.slots), num_heads, triton.cdiv(value_dim, config.num_values))](
        x_TC, decay_TN, dt_TN, skip_N, matrices, step.firsts, step.lengths, step.slots, step.is_new, y_TNV,
        matrices.stride(0),
        GROUPS=(x_TC.shape[1] - num_heads * value_dim) // (2 * key_dim), HEADS=num_heads,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, FEWEST=FEWEST, SPAN=config.span,
        BLOCK_K=max(triton.next_power_of_2(key_dim), 16), BLOCK_V=config.num_values,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y_TNV


@triton.jit
def _scan_spans_kernel(
    x_ptr,
    decay_ptr,
    dt_ptr,
    skip_ptr,
    matrices_ptr,
    firsts_ptr,
    lengths_ptr,
    slots_ptr,
    is_new_ptr,
    y_ptr,
    row_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FEWEST: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (sequence, head, piece of the values)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(firsts_ptr + seq), tl.load(lengths_ptr + seq)
    if length < FEWEST:
        return
    slot, is_new = tl.load(slots_ptr + seq), tl.load(is_new_ptr + seq)
    rows_T, keys_K = tl.arange(0, SPAN), tl.arange(0, BLOCK_K)
    values_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key_K, is_value_V = keys_K < KEY_DIM, values_V < VALUE_DIM
    is_real_KV = is_key_K[:, None] & is_value_V[None, :]
    channels = HEADS * VALUE_DIM + 2 * GROUPS * KEY_DIM
    matrix_ptrs = matrices_ptr + slot * row_stride + head * (KEY_DIM * VALUE_DIM)
    matrix_ptrs += keys_K[:, None] * VALUE_DIM + values_V[None, :]
    matrix_KV = tl.load(matrix_ptrs, mask=is_real_KV & (is_new == 0), other=0.0)
    skip = tl.load(skip_ptr + head)
    values_TV = rows_T[:, None] * channels + head * VALUE_DIM + values_V[None, :]
    keys_TK = rows_T[:, None] * channels + HEADS * VALUE_DIM + head // (HEADS // GROUPS) * KEY_DIM + keys_K[None, :]
    outputs_TV = (rows_T[:, None] * HEADS + head) * VALUE_DIM + values_V[None, :]
    for begin in range(0, length, SPAN):
        is_token_T = begin + rows_T < length
        is_key_TK, is_value_TV = is_token_T[:, None] & is_key_K[None, :], is_token_T[:, None] & is_value_V[None, :]
        rows_ptr = x_ptr + (first + begin) * channels
        k_TK = tl.load(rows_ptr + keys_TK, mask=is_key_TK, other=0.0)
        q_TK = tl.load(rows_ptr + GROUPS * KEY_DIM + keys_TK, mask=is_key_TK, other=0.0)
        v_TV = tl.load(rows_ptr + values_TV, mask=is_value_TV, other=0.0)
        scalars_T = (first + begin) * HEADS + rows_T * HEADS + head
        dt_T = tl.load(dt_ptr + scalars_T, mask=is_token_T, other=0.0)
        logs_T = logs_of_decays(decay_ptr + scalars_T, is_token_T)
        end = last_of(logs_T)
        y_TV = product_with_halves(q_TK, matrix_KV) * tl.exp(logs_T)[:, None] + v_TV.to(tl.float32) * skip
        causal_TT = tl.dot(q_TK, tl.trans(k_TK)) * decays_between(logs_T, rows_T) * dt_T[None, :]
        causal_high_TT, causal_low_TT = halves(causal_TT)
        y_TV = tl.dot(causal_high_TT, v_TV, tl.dot(causal_low_TT, v_TV, y_TV))
        y_ptrs = y_ptr + (first + begin) * (HEADS * VALUE_DIM) + outputs_TV
        tl.store(y_ptrs, y_TV.to(y_ptr.dtype.element_ty), mask=is_value_TV)
        added_TV = v_TV.to(tl.float32) * (tl.exp(end - logs_T) * dt_T)[:, None]
        matrix_KV = matrix_KV * tl.exp(end) + product_with_halves(tl.trans(k_TK), added_TV)
    tl.store(matrix_ptrs, matrix_KV, mask=is_real_KV)
