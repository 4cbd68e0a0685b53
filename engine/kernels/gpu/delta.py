"""Layers of gated delta rules (engine/models/delta_net.py): the causal convolution of each sequence's channels, and the
rule itself.

The rule computes a sequence's tokens one after the other, with a part of a head's matrix in registers. So a prompt
takes as many rounds as it has tokens. But a token's numbers depend neither on the chunks that its prompt comes in nor
on other sequences.

Shapes: T tokens, S sequences, C channels, J taps, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.delta_net import EPSILON, DeltaOps
from engine.models.recurrent_states import RecurrentStep

TOKENS_PER_PROGRAM = 16
CHANNELS_PER_PROGRAM = 128
NUMBERS_PER_PROGRAM = 4096
"""Numbers of a matrix that a program of four warps keeps in registers."""


def convolve(
    x_TC: torch.Tensor, weight_CJ: torch.Tensor, inputs: torch.Tensor, step: RecurrentStep, has_silu: bool
) -> torch.Tensor:
    """A `Convolve` (engine/models/delta_net.py). `x_TC` and `weight_CJ`: contiguous."""
    num_seqs, num_channels, num_taps = len(step.slots), x_TC.shape[1], weight_CJ.shape[1]
    y_TC = torch.empty_like(x_TC)
    # Written to the rows only after this launch: its programs read there what others would overwrite.
    kept = inputs.new_empty(num_seqs, num_taps - 1, num_channels)
    num_pieces = triton.cdiv(step.longest, TOKENS_PER_PROGRAM)
    _convolve_kernel[(num_seqs, num_pieces, triton.cdiv(num_channels, CHANNELS_PER_PROGRAM))](
        x_TC, weight_CJ, inputs, step.firsts, step.lengths, step.slots, step.is_new, y_TC, kept, inputs.stride(0),
        num_channels,
        HAS_SILU=has_silu, TAPS=num_taps, KEPT=triton.next_power_of_2(num_taps), BLOCK_T=TOKENS_PER_PROGRAM,
        BLOCK_C=CHANNELS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    inputs[step.slots] = kept
    return y_TC


def delta_rule(
    qkv_TC: torch.Tensor, decay_TN: torch.Tensor, beta_TN: torch.Tensor, matrices: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    """A `DeltaRule` (engine/models/delta_net.py). All but the rows of `matrices` are contiguous."""
    _, num_heads, key_dim, value_dim = matrices.shape
    num_tokens, num_channels = qkv_TC.shape
    num_key_heads = (num_channels - num_heads * value_dim) // (2 * key_dim)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(max(NUMBERS_PER_PROGRAM // block_k, 1), triton.next_power_of_2(value_dim))
    y_TNV = qkv_TC.new_empty(num_tokens, num_heads, value_dim)
    _delta_kernel[(len(step.slots), num_heads, triton.cdiv(value_dim, block_v))](
        qkv_TC, decay_TN, beta_TN, matrices, step.firsts, step.lengths, step.slots, step.is_new, y_TNV,
        matrices.stride(0), key_dim**-0.5,
        KEY_HEADS=num_key_heads, HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, EPSILON=EPSILON,
        BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return y_TNV


TRITON_DELTA_OPS = DeltaOps(convolve, delta_rule)


@triton.jit
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    inputs_ptr,
    firsts_ptr,
    lengths_ptr,
    slots_ptr,
    is_new_ptr,
    y_ptr,
    kept_ptr,
    row_stride,
    num_channels,
    HAS_SILU: tl.constexpr,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program (sequence, piece of its tokens, piece of the channels). The first piece of the tokens also tells the
    sequence's last inputs."""
    seq = tl.program_id(0)
    length = tl.load(lengths_ptr + seq)
    start = tl.program_id(1) * BLOCK_T
    if start < length:
        first, slot, is_new = tl.load(firsts_ptr + seq), tl.load(slots_ptr + seq), tl.load(is_new_ptr + seq)
        channels_C = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        is_channel_C = channels_C < num_channels
        state_ptr = inputs_ptr + slot * row_stride
        places_T = start + tl.arange(0, BLOCK_T)
        sum_TC = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            x_TC = _inputs_at(
                places_T + tap - (TAPS - 1), x_ptr, state_ptr, first, length, is_new, channels_C, is_channel_C,
                num_channels, TAPS,
            )  # fmt: skip
            weight_C = tl.load(weight_ptr + channels_C * TAPS + tap, mask=is_channel_C, other=0.0)
            sum_TC += x_TC.to(tl.float32) * weight_C.to(tl.float32)[None, :]
        y_TC = sum_TC / (1.0 + tl.exp(-sum_TC)) if HAS_SILU else sum_TC
        is_real_TC = (places_T < length)[:, None] & is_channel_C[None, :]
        y_ptrs = y_ptr + (first + places_T)[:, None] * num_channels + channels_C[None, :]
        tl.store(y_ptrs, y_TC.to(y_ptr.dtype.element_ty), mask=is_real_TC)
        if start == 0:
            last_J = tl.arange(0, KEPT)
            last_JC = _inputs_at(
                length + last_J - (TAPS - 1), x_ptr, state_ptr, first, length, is_new, channels_C, is_channel_C,
                num_channels, TAPS,
            )  # fmt: skip
            kept_ptrs = kept_ptr + (seq * (TAPS - 1) + last_J)[:, None] * num_channels + channels_C[None, :]
            tl.store(kept_ptrs, last_JC, mask=(last_J < TAPS - 1)[:, None] & is_channel_C[None, :])


@triton.jit
def _inputs_at(
    places_A, x_ptr, state_ptr, first, length, is_new, channels_C, is_channel_C, num_channels, TAPS: tl.constexpr
):
    """A sequence's inputs at places that are counted from its first token of the step; before it are those that its
    state keeps, none of a new sequence."""
    is_here_A = (places_A >= 0) & (places_A < length)
    is_kept_A = (places_A < 0) & (is_new == 0)
    here_ptrs = x_ptr + (first + places_A)[:, None] * num_channels + channels_C[None, :]
    kept_ptrs = state_ptr + (places_A + (TAPS - 1))[:, None] * num_channels + channels_C[None, :]
    here_AC = tl.load(here_ptrs, mask=is_here_A[:, None] & is_channel_C[None, :], other=0.0)
    kept_AC = tl.load(kept_ptrs, mask=is_kept_A[:, None] & is_channel_C[None, :], other=0.0)
    return tl.where(is_here_A[:, None], here_AC, kept_AC)


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
