"""Mamba-2 layers (engine/models/mamba2.py): the scan.

It computes a sequence's tokens one after the other, with a part of a head's matrix in registers. So a token's numbers
depend neither on the chunks that its prompt comes in nor on other sequences, but a prompt takes as many rounds as it
has tokens. In bfloat16, prompts are computed in spans (scan_spans.py).

Shapes: T tokens, S sequences, C channels, N heads, K and V dims of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.recurrent_states import RecurrentStep

NUMBERS_PER_PROGRAM = 4096
"""Numbers of a matrix that a program of four warps keeps in registers."""
ALL = 1 << 30


def scan(
    x_TC: torch.Tensor,
    decay_TN: torch.Tensor,
    dt_TN: torch.Tensor,
    skip_N: torch.Tensor,
    matrices: torch.Tensor,
    step: RecurrentStep,
    fewer_than: int = ALL,
) -> torch.Tensor:
    """A `Scan` (engine/models/recurrent_ops.py). All but the rows of `matrices` are contiguous.

    Sequences of `fewer_than` tokens and more are left out."""
    _, num_heads, key_dim, value_dim = matrices.shape
    num_tokens, num_channels = x_TC.shape
    num_groups = (num_channels - num_heads * value_dim) // (2 * key_dim)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(max(NUMBERS_PER_PROGRAM // block_k, 1), triton.next_power_of_2(value_dim))
    y_TNV = x_TC.new_empty(num_tokens, num_heads, value_dim)
    _scan_kernel[(len(step.slots), num_heads, triton.cdiv(value_dim, block_v))](
        x_TC, decay_TN, dt_TN, skip_N, matrices, step.firsts, step.lengths, step.slots, step.is_new, y_TNV,
        matrices.stride(0), fewer_than,
        GROUPS=num_groups, HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=4,
    )  # fmt: skip
    return y_TNV


@triton.jit
def _scan_kernel(
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
    fewer_than,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (sequence, head, piece of the values)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(firsts_ptr + seq), tl.load(lengths_ptr + seq)
    if length >= fewer_than:
        return
    slot, is_new = tl.load(slots_ptr + seq), tl.load(is_new_ptr + seq)
    keys_K = tl.arange(0, BLOCK_K)
    values_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key_K, is_value_V = keys_K < KEY_DIM, values_V < VALUE_DIM
    is_real_KV = is_key_K[:, None] & is_value_V[None, :]
    channels = HEADS * VALUE_DIM + 2 * GROUPS * KEY_DIM
    matrix_ptrs = matrices_ptr + slot * row_stride + head * (KEY_DIM * VALUE_DIM)
    matrix_ptrs += keys_K[:, None] * VALUE_DIM + values_V[None, :]
    matrix_KV = tl.load(matrix_ptrs, mask=is_real_KV & (is_new == 0), other=0.0)
    skip = tl.load(skip_ptr + head)
    group = head // (HEADS // GROUPS)
    for token in range(first, first + length):
        v_ptrs = x_ptr + token * channels + head * VALUE_DIM + values_V
        k_ptrs = x_ptr + token * channels + HEADS * VALUE_DIM + group * KEY_DIM + keys_K
        v_V = tl.load(v_ptrs, mask=is_value_V, other=0.0).to(tl.float32)
        k_K = tl.load(k_ptrs, mask=is_key_K, other=0.0).to(tl.float32)
        q_K = tl.load(k_ptrs + GROUPS * KEY_DIM, mask=is_key_K, other=0.0).to(tl.float32)
        decay, dt = tl.load(decay_ptr + token * HEADS + head), tl.load(dt_ptr + token * HEADS + head)
        matrix_KV = matrix_KV * decay + k_K[:, None] * (v_V * dt)[None, :]
        y_V = tl.sum(matrix_KV * q_K[:, None], 0) + v_V * skip
        y_ptrs = y_ptr + (token * HEADS + head) * VALUE_DIM + values_V
        tl.store(y_ptrs, y_V.to(y_ptr.dtype.element_ty), mask=is_value_V)
    tl.store(matrix_ptrs, matrix_KV, mask=is_real_KV)
