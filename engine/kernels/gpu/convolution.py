"""The causal convolution of each sequence's channels, in layers that keep a state.

Shapes: T tokens, C channels, J taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.recurrent_ops import Convolution
from engine.models.recurrent_states import RecurrentStep

TOKENS_PER_PROGRAM = 16
CHANNELS_PER_PROGRAM = 128


def convolve(x_TC: torch.Tensor, of: Convolution, inputs: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """A `Convolve` (engine/models/recurrent_ops.py). `x_TC`: contiguous."""
    num_seqs, num_channels, num_taps = len(step.slots), x_TC.shape[1], of.weight.shape[1]
    y_TC = torch.empty_like(x_TC)
    # Written to the rows only after this launch: its programs read there what others would overwrite.
    kept = inputs.new_empty(num_seqs, num_taps - 1, num_channels)
    num_pieces = triton.cdiv(step.longest, TOKENS_PER_PROGRAM)
    bias_C = of.weight if of.bias is None else of.bias
    _convolve_kernel[(num_seqs, num_pieces, triton.cdiv(num_channels, CHANNELS_PER_PROGRAM))](
        x_TC, of.weight, bias_C, inputs, step.firsts, step.lengths, step.slots, step.is_new, y_TC, kept,
        inputs.stride(0), num_channels,
        HAS_BIAS=of.bias is not None, HAS_SILU=of.has_silu, TAPS=num_taps, KEPT=triton.next_power_of_2(num_taps),
        BLOCK_T=TOKENS_PER_PROGRAM, BLOCK_C=CHANNELS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    inputs[step.slots] = kept
    return y_TC


@triton.jit
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    inputs_ptr,
    firsts_ptr,
    lengths_ptr,
    slots_ptr,
    is_new_ptr,
    y_ptr,
    kept_ptr,
    row_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
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
        if HAS_BIAS:
            sum_TC += tl.load(bias_ptr + channels_C, mask=is_channel_C, other=0.0).to(tl.float32)[None, :]
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
