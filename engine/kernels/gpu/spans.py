"""What the kernels share that compute many tokens of a sequence at once, in layers that keep a state.

They take a sequence's tokens in spans of 16 to 64. Within a span, tensor cores multiply what its tokens have to do with
each other; from span to span, the state is carried on. The spans of all sequences that compute many tokens in a step
are numbered one after the other.

A sequence's first span begins where its tokens of the step begin. So a token's numbers depend, by some rounding, on the
chunks that its prompt comes in, as it does by the rounding of torch's products.

Tensor cores multiply numbers of 16 bits. A number of 32 bits is given to them as two of 16, its halves, whose sum has
16 of its 24 significant bits. (Where a text repeats itself, errors of its larger half alone, and of the 11 bits of
TF32, grow to several times those from rounding answers to bfloat16.)

Shapes: S sequences, T tokens of a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.gpu_kind import GpuKind, TensorCores
from engine.models.recurrent_shape import FEWEST_IN_SPANS
from engine.models.recurrent_states import RecurrentStep

FEWEST = FEWEST_IN_SPANS
MOST_KEY_DIM = 256
"""A program has a matrix of so many rows in registers."""
SEQS_AT_ONCE: tl.constexpr = tl.constexpr(128)
TINIEST_DECAY: tl.constexpr = tl.constexpr(1e-12)
"""A state that has decayed by more no longer counts beside what comes new. And logarithms stay finite."""


@dataclass(frozen=True, slots=True)
class SpanConfig:
    """How a launch computes spans: chosen such that no registers spill with the heads of Qwen3-Next, Falcon-H1-7B and
    Nemotron-Nano-9B-v2. With others, up to 16 do for up to 128 dims, and up to 32 for more."""

    span: int
    """Tokens of a span."""
    num_values: int
    """Of a matrix, the columns that a program carries from span to span."""
    num_warps: int
    num_stages: int


CONFIGS_OF_LARGE_KEYS = {
    TensorCores.MMA: SpanConfig(16, 16, 8, 2),
    TensorCores.WGMMA: SpanConfig(32, 16, 8, 3),
    TensorCores.TCGEN05: SpanConfig(64, 16, 8, 2),
}
"""For more than 128 dims."""


def span_config(kind: GpuKind, key_dim: int, num_stages: int) -> SpanConfig:
    """`num_stages`: where registers have room for them."""
    if key_dim > 128:
        return CONFIGS_OF_LARGE_KEYS[kind.tensor_cores]
    if kind.tensor_cores is TensorCores.MMA:
        return SpanConfig(32, 16, 8, 2)
    return SpanConfig(64, 32, 4, num_stages)


def fits_spans(x_TC: torch.Tensor, matrices: torch.Tensor, step: RecurrentStep) -> bool:
    """Whether a sequence computes many tokens, and the model's numbers need no halves."""
    return step.longest >= FEWEST and x_TC.dtype == torch.bfloat16 and matrices.shape[2] <= MOST_KEY_DIM


def num_spans_of(step: RecurrentStep, config: SpanConfig) -> int:
    """Of all sequences that compute many tokens."""
    lengths_S = step.lengths_on_host
    return int((-(-lengths_S[lengths_S >= FEWEST] // config.span)).sum())


@triton.jit
def spans_before(lengths_ptr, seq, FEWEST: tl.constexpr, SPAN: tl.constexpr):
    """Return the number of the sequence's first span."""
    num_spans = 0
    for begin in range(0, seq, SEQS_AT_ONCE):
        seqs_S = begin + tl.arange(0, SEQS_AT_ONCE)
        num_spans += tl.sum(_nums_of_spans(lengths_ptr, seqs_S, seqs_S < seq, FEWEST, SPAN), 0)
    return num_spans


@triton.jit
def sequence_of_span(lengths_ptr, num_seqs, span, FEWEST: tl.constexpr, SPAN: tl.constexpr):
    """Return whose the span is, and the number of that sequence's first one."""
    seq, num_before, num_spans = 0, 0, 0
    for begin in range(0, num_seqs, SEQS_AT_ONCE):
        seqs_S = begin + tl.arange(0, SEQS_AT_ONCE)
        nums_S = _nums_of_spans(lengths_ptr, seqs_S, seqs_S < num_seqs, FEWEST, SPAN)
        is_before_S = (num_spans + tl.cumsum(nums_S, 0) <= span) & (seqs_S < num_seqs)
        seq += tl.sum(is_before_S.to(tl.int32), 0)
        num_before += tl.sum(tl.where(is_before_S, nums_S, 0), 0)
        num_spans += tl.sum(nums_S, 0)
    return seq, num_before


@triton.jit
def _nums_of_spans(lengths_ptr, seqs_S, is_seq_S, FEWEST: tl.constexpr, SPAN: tl.constexpr):
    lengths_S = tl.load(lengths_ptr + seqs_S, mask=is_seq_S, other=0).to(tl.int32)
    return tl.where(lengths_S < FEWEST, 0, (lengths_S + SPAN - 1) // SPAN)


@triton.jit
def logs_of_decays(decay_ptrs, is_token_T):
    """The logarithm of what remains, after each token, of the state before the span."""
    decay_T = tl.load(decay_ptrs, mask=is_token_T, other=1.0)
    return tl.cumsum(tl.log(tl.maximum(decay_T, TINIEST_DECAY)), 0)


@triton.jit
def decays_between(logs_T, rows_T):
    """What remains, after each token, of what each earlier token added; of what later ones add, nothing.

    [T after, T of]"""
    is_past_TT = rows_T[:, None] >= rows_T[None, :]
    return tl.where(is_past_TT, tl.exp(tl.where(is_past_TT, logs_T[:, None] - logs_T[None, :], 0.0)), 0.0)


@triton.jit
def last_of(x_T):
    rows_T = tl.arange(0, x_T.shape[0])
    return tl.sum(tl.where(rows_T == x_T.shape[0] - 1, x_T, 0.0), 0)


@triton.jit
def halves(x):
    """Two of bfloat16 whose sum is `x`, float32."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product_with_halves(x, y):
    """`x`: bfloat16, `y`: float32."""
    y_high, y_low = halves(y)
    return tl.dot(x, y_high, tl.dot(x, y_low))


@triton.jit
def product_of_halves(x_high, x_low, y):
    """`y`: float32."""
    y_high, y_low = halves(y)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def product(x, y):
    """Of two of float32."""
    x_high, x_low = halves(x)
    return product_of_halves(x_high, x_low, y)
