"""Layers of gated delta rules (engine/models/delta_net.py): the rule itself.

It computes a sequence's tokens one after the other, with a part of a head's matrix in registers. So a token's numbers
depend neither on the chunks that its prompt comes in nor on other sequences, but a prompt takes as many rounds as it
has tokens. In bfloat16, prompts are computed in spans (delta_spans.py).

Shapes: T tokens, S sequences, C channels, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.recurrent_reference import EPSILON
from engine.models.recurrent_states import RecurrentStep

NUMBERS_PER_PROGRAM = 4096
"""Numbers of a matrix that a program of four warps keeps in registers."""
ALL = 1 << 30


def delta_rule(
    qkv_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
    fewer_than: int = ALL,
) -> torch.Tensor:
    """A `DeltaRule` (engine/models/recurrent_ops.py). All but the rows of `matrices` are contiguous.

    Sequences of `fewer_than` tokens and more are left out."""
    _, num_heads, key_dim, value_dim = matrices.shape
    num_tokens, num_channels = qkv_TC.shape
    num_key_heads = (num_channels - num_heads * value_dim) // (2 * key_dim)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(max(NUMBERS_PER_PROGRAM // block_k, 1), triton.next_power_of_2(value_dim))
    y_TNV = qkv_TC.new_empty(num_tokens, num_heads, value_dim)
    _delta_kernel[(len(step.slots), num_heads, triton.cdiv(value_dim, block_v))](
        qkv_TC, decay_TN, beta_TN, matrices, step.firsts, step.lengths, step.slots, step.is_new, y_TNV,
        matrices.stride(0), fewer_than, key_dim**-0.5,
        KEY_HEADS=num_key_heads, HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, EPSILON=EPSILON,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return y_TNV


@triton.jit
def _delta_kernel(
    qkv_ptr,
    decay_ptr,
    beta_ptr,
    matrices_ptr,
    firsts_ptr,
    lengths_ptr,
    slots_ptr,
    is_new_ptr,
    y_ptr,
    row_stride,
    fewer_than,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (sequence, value head, piece of the values)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(firsts_ptr + seq), tl.load(lengths_ptr + seq)
    if length >= fewer_than:
        return
    slot, is_new = tl.load(slots_ptr + seq), tl.load(is_new_ptr + seq)
    keys_K = tl.arange(0, BLOCK_K)
    values_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key_K, is_value_V = keys_K < KEY_DIM, values_V < VALUE_DIM
    is_real_KV = is_key_K[:, None] & is_value_V[None, :]
    channels = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    matrix_ptrs = matrices_ptr + slot * row_stride + head * (KEY_DIM * VALUE_DIM)
    matrix_ptrs += keys_K[:, None] * VALUE_DIM + values_V[None, :]
    matrix_KV = tl.load(matrix_ptrs, mask=is_real_KV & (is_new == 0), other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    for token in range(first, first + length):
        q_ptrs = qkv_ptr + token * channels + key_head * KEY_DIM + keys_K
        q_K = tl.load(q_ptrs, mask=is_key_K, other=0.0).to(tl.float32)
        k_K = tl.load(q_ptrs + KEY_HEADS * KEY_DIM, mask=is_key_K, other=0.0).to(tl.float32)
        v_ptrs = qkv_ptr + token * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values_V
        v_V = tl.load(v_ptrs, mask=is_value_V, other=0.0).to(tl.float32)
        decay, beta = tl.load(decay_ptr + token * HEADS + head), tl.load(beta_ptr + token * HEADS + head)
        q_K = q_K * (tl.rsqrt(tl.sum(q_K * q_K, 0) + EPSILON) * scale)
        k_K = k_K * tl.rsqrt(tl.sum(k_K * k_K, 0) + EPSILON)
        matrix_KV = matrix_KV * decay
        missing_V = (v_V - tl.sum(matrix_KV * k_K[:, None], 0)) * beta
        matrix_KV += k_K[:, None] * missing_V[None, :]
        y_V = tl.sum(matrix_KV * q_K[:, None], 0)
        y_ptrs = y_ptr + (token * HEADS + head) * VALUE_DIM + values_V
        tl.store(y_ptrs, y_V.to(y_ptr.dtype.element_ty), mask=is_value_V)
    tl.store(matrix_ptrs, matrix_KV, mask=is_real_KV)
