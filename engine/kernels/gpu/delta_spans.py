"""Layers of gated delta rules (engine/models/delta_net.py): the rule for many tokens at once, in spans of 16 to 64.

Within a span, what a token finds missing depends on what earlier tokens added, which depends on what those found
missing: as many equations as tokens, in triangular form. With k, v, q and y the rows of a span, beta, the decays g from
its begin to each token, and S the state before it:

    A = beta * (k k^T) * (g_i / g_j), for j < i           added = (1 + A)^-1 beta * (v - g k S)
    P = (q k^T) * (g_i / g_j), for j <= i                 y     = g q S + P added
                                                          S     = g_end S + (g_end / g * k)^T added

First, one program for each span and head computes (1 + A)^-1 beta and P, which need no state. Then one program for each
sequence, head, and piece of its values goes from span to span. (Yang, Kautz, Hatamizadeh: Gated Delta Networks,
arXiv:2412.06464; the way of splitting it over programs is ours.)

Shapes: T tokens of a span, C channels, N value heads, K and V dims of keys and values, B blocks of 16 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.delta import delta_rule
from engine.kernels.gpu.gpu_kind import GpuKind, gpu_kind
from engine.kernels.gpu.spans import (
    FEWEST,
    decays_between,
    fits_spans,
    halves,
    last_of,
    logs_of_decays,
    num_spans_of,
    product,
    product_of_halves,
    product_with_halves,
    sequence_of_span,
    span_config,
    spans_before,
)
from engine.models.recurrent_reference import EPSILON
from engine.models.recurrent_states import RecurrentStep

BLOCK: tl.constexpr = tl.constexpr(16)


def delta_rule_in_spans(
    qkv_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
    kind: GpuKind | None = None,
) -> torch.Tensor:
    """A `DeltaRule` (engine/models/recurrent_ops.py). All but the rows of `matrices` are contiguous. `kind`: unless
    given, that of the tensors' device."""
    if not fits_spans(qkv_TC, matrices, step):
        return delta_rule(qkv_TC, decay_TN, beta_TN, matrices, step)
    _, num_heads, key_dim, value_dim = matrices.shape
    y_TNV = delta_rule(qkv_TC, decay_TN, beta_TN, matrices, step, fewer_than=FEWEST)
    config = span_config(kind or gpu_kind(qkv_TC.device), key_dim, num_stages=2)
    num_spans, span = num_spans_of(step, config), config.span
    solves = qkv_TC.new_empty(num_spans, num_heads, 4, span, span)
    factors = decay_TN.new_empty(num_spans, num_heads, 4, span)
    sizes = {
        "KEY_HEADS": (qkv_TC.shape[1] - num_heads * value_dim) // (2 * key_dim), "HEADS": num_heads,
        "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "FEWEST": FEWEST, "SPAN": span,
        "BLOCK_K": max(triton.next_power_of_2(key_dim), 16),
    }  # fmt: skip
    _solve_kernel[(num_spans, num_heads)](
        qkv_TC, decay_TN, beta_TN, step.firsts, step.lengths, solves, factors, len(step.slots), key_dim**-0.5,
        **sizes, EPSILON=EPSILON, num_warps=4,
    )  # fmt: skip
    _delta_spans_kernel[(len(step.slots), num_heads, triton.cdiv(value_dim, config.num_values))](
        qkv_TC, matrices, step.firsts, step.lengths, step.slots, step.is_new, solves, factors, y_TNV,
        matrices.stride(0),
        **sizes, BLOCK_V=config.num_values, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y_TNV


@triton.jit(do_not_specialize=["num_seqs"])
def _solve_kernel(
    qkv_ptr,
    decay_ptr,
    beta_ptr,
    firsts_ptr,
    lengths_ptr,
    solves_ptr,
    factors_ptr,
    num_seqs,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EPSILON: tl.constexpr,
    FEWEST: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (span, value head). Writes the halves of (1 + A)^-1 beta and of P, and what the next kernel multiplies
    tokens by: those of k S, of q S and of k, and the span's decay."""
    span, head = tl.program_id(0), tl.program_id(1)
    seq, first_span = sequence_of_span(lengths_ptr, num_seqs, span, FEWEST, SPAN)
    begin = (span - first_span) * SPAN
    rows_T = tl.arange(0, SPAN)
    is_token_T = rows_T < tl.load(lengths_ptr + seq) - begin
    tokens_T = tl.load(firsts_ptr + seq) + begin + rows_T
    keys_K = tl.arange(0, BLOCK_K)
    channels = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    q_ptrs = qkv_ptr + tokens_T[:, None] * channels + head // (HEADS // KEY_HEADS) * KEY_DIM + keys_K[None, :]
    is_key_TK = is_token_T[:, None] & (keys_K < KEY_DIM)[None, :]
    q_TK = tl.load(q_ptrs, mask=is_key_TK, other=0.0)
    k_TK = tl.load(q_ptrs + KEY_HEADS * KEY_DIM, mask=is_key_TK, other=0.0)
    q_norm_T = tl.rsqrt(_sums_of_squares(q_TK) + EPSILON) * scale
    k_norm_T = tl.rsqrt(_sums_of_squares(k_TK) + EPSILON)
    logs_T = logs_of_decays(decay_ptr + tokens_T * HEADS + head, is_token_T)
    beta_T = tl.load(beta_ptr + tokens_T * HEADS + head, mask=is_token_T, other=0.0)

    weights_TT = decays_between(logs_T, rows_T) * k_norm_T[None, :]
    k_KT = tl.trans(k_TK)
    a_TT = tl.dot(k_TK, k_KT) * weights_TT * (beta_T * k_norm_T)[:, None]
    inverse_TT = _inverse(tl.where(rows_T[:, None] > rows_T[None, :], a_TT, 0.0), rows_T)
    causal_TT = tl.dot(q_TK, k_KT) * weights_TT * q_norm_T[:, None]
    solve_ptrs = solves_ptr + (span * HEADS + head).to(tl.int64) * (4 * SPAN * SPAN)
    solve_ptrs += rows_T[:, None] * SPAN + rows_T[None, :]
    _store_halves(solve_ptrs, inverse_TT * beta_T[None, :], SPAN * SPAN)
    _store_halves(solve_ptrs + 2 * SPAN * SPAN, causal_TT, SPAN * SPAN)

    factor_ptrs = factors_ptr + (span * HEADS + head) * (4 * SPAN) + rows_T
    decays_T, end = tl.exp(logs_T), last_of(logs_T)
    tl.store(factor_ptrs, decays_T * k_norm_T)
    tl.store(factor_ptrs + SPAN, decays_T * q_norm_T)
    tl.store(factor_ptrs + 2 * SPAN, tl.exp(end - logs_T) * k_norm_T)
    tl.store(factor_ptrs + 3 * SPAN, tl.exp(end + tl.zeros_like(logs_T)))


@triton.jit
def _sums_of_squares(x_TK):
    x_TK = x_TK.to(tl.float32)
    return tl.sum(x_TK * x_TK, 1)


@triton.jit
def _store_halves(ptrs, x_TT, distance: tl.constexpr):
    high_TT, low_TT = halves(x_TT)
    tl.store(ptrs, high_TT)
    tl.store(ptrs + distance, low_TT)


@triton.jit
def _inverse(a_TT, rows_T):
    """(1 + a)^-1, where a is 0 on its diagonal and above it.

    Blocks of 16 on the diagonal are solved row by row, all at once, in float32. From them come the inverses of blocks
    of 32, and of all 64: of ((D, 0), (L, E)) the inverse is ((D^-1, 0), (-E^-1 L D^-1, E^-1)). (The series 1 - a + a^2
    - ... is finite, too. But where tokens are alike, its terms grow to millions of times what remains of them.)"""
    SPAN: tl.constexpr = a_TT.shape[0]
    BLOCKS: tl.constexpr = SPAN // BLOCK
    blocks_B, places_R = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    is_diagonal = blocks_B[:, None, None, None] == blocks_B[None, None, :, None]
    a_BRR = tl.sum(tl.where(is_diagonal, tl.reshape(a_TT, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    solved_BRR = tl.where(places_R[None, :, None] == places_R[None, None, :], 1.0, 0.0) + tl.zeros_like(a_BRR)
    for place in range(BLOCK - 1):
        factors_BR = tl.sum(tl.where(places_R[None, None, :] == place, a_BRR, 0.0), 2)
        row_BR = tl.sum(tl.where(places_R[None, :, None] == place, solved_BRR, 0.0), 1)
        solved_BRR -= factors_BR[:, :, None] * row_BR[:, None, :]
    solved_TT = tl.reshape(tl.where(is_diagonal, solved_BRR[:, :, None, :], 0.0), [SPAN, SPAN])
    if SPAN > BLOCK:
        solved_TT = _of_twice_the_size(a_TT, solved_TT, rows_T, BLOCK)
    if SPAN > 2 * BLOCK:
        solved_TT = _of_twice_the_size(a_TT, solved_TT, rows_T, 2 * BLOCK)
    return solved_TT


@triton.jit
def _of_twice_the_size(a_TT, solved_TT, rows_T, size: tl.constexpr):
    blocks_T = rows_T // size
    is_beside = (blocks_T[:, None] != blocks_T[None, :]) & (blocks_T[:, None] // 2 == blocks_T[None, :] // 2)
    return solved_TT - product(solved_TT, product(tl.where(is_beside, a_TT, 0.0), solved_TT))


@triton.jit
def _delta_spans_kernel(
    qkv_ptr,
    matrices_ptr,
    firsts_ptr,
    lengths_ptr,
    slots_ptr,
    is_new_ptr,
    solves_ptr,
    factors_ptr,
    y_ptr,
    row_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FEWEST: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (sequence, value head, piece of the values)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(firsts_ptr + seq), tl.load(lengths_ptr + seq)
    if length < FEWEST:
        return
    slot, is_new = tl.load(slots_ptr + seq), tl.load(is_new_ptr + seq)
    rows_T, keys_K = tl.arange(0, SPAN), tl.arange(0, BLOCK_K)
    values_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key_K, is_value_V = keys_K < KEY_DIM, values_V < VALUE_DIM
    is_real_KV = is_key_K[:, None] & is_value_V[None, :]
    channels = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    matrix_ptrs = matrices_ptr + slot * row_stride + head * (KEY_DIM * VALUE_DIM)
    matrix_ptrs += keys_K[:, None] * VALUE_DIM + values_V[None, :]
    matrix_KV = tl.load(matrix_ptrs, mask=is_real_KV & (is_new == 0), other=0.0)
    keys_TK = rows_T[:, None] * channels + head // (HEADS // KEY_HEADS) * KEY_DIM + keys_K[None, :]
    values_TV = rows_T[:, None] * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values_V[None, :]
    outputs_TV = (rows_T[:, None] * HEADS + head) * VALUE_DIM + values_V[None, :]
    place = spans_before(lengths_ptr, seq, FEWEST, SPAN).to(tl.int64) * HEADS + head
    places_TT = rows_T[:, None] * SPAN + rows_T[None, :]
    for begin in range(0, length, SPAN):
        is_token_T = begin + rows_T < length
        is_key_TK, is_value_TV = is_token_T[:, None] & is_key_K[None, :], is_token_T[:, None] & is_value_V[None, :]
        rows_ptr = qkv_ptr + (first + begin) * channels
        q_TK = tl.load(rows_ptr + keys_TK, mask=is_key_TK, other=0.0)
        k_TK = tl.load(rows_ptr + KEY_HEADS * KEY_DIM + keys_TK, mask=is_key_TK, other=0.0)
        v_TV = tl.load(rows_ptr + values_TV, mask=is_value_TV, other=0.0)
        factor_ptrs = factors_ptr + place * (4 * SPAN) + rows_T
        solve_ptrs = solves_ptr + place * (4 * SPAN * SPAN) + places_TT
        of_known_T, of_state_T = tl.load(factor_ptrs), tl.load(factor_ptrs + SPAN)
        of_added_T, decays_T = tl.load(factor_ptrs + 2 * SPAN), tl.load(factor_ptrs + 3 * SPAN)
        missing_TV = v_TV.to(tl.float32) - product_with_halves(k_TK, matrix_KV) * of_known_T[:, None]
        solve_high_TT, solve_low_TT = tl.load(solve_ptrs), tl.load(solve_ptrs + SPAN * SPAN)
        added_TV = product_of_halves(solve_high_TT, solve_low_TT, missing_TV)
        causal_high_TT, causal_low_TT = tl.load(solve_ptrs + 2 * SPAN * SPAN), tl.load(solve_ptrs + 3 * SPAN * SPAN)
        y_TV = product_with_halves(q_TK, matrix_KV) * of_state_T[:, None]
        y_TV += product_of_halves(causal_high_TT, causal_low_TT, added_TV)
        y_ptrs = y_ptr + (first + begin) * (HEADS * VALUE_DIM) + outputs_TV
        tl.store(y_ptrs, y_TV.to(y_ptr.dtype.element_ty), mask=is_value_TV)
        matrix_KV = matrix_KV * last_of(decays_T)
        matrix_KV += product_with_halves(tl.trans(k_TK), added_TV * of_added_T[:, None])
        place += HEADS
    tl.store(matrix_ptrs, matrix_KV, mask=is_real_KV)
