"""The sampler's draws (`engine.sampling.sampler`, steps 6 to 10) in two launches: the same race with the same clocks.

    bounds   per row: its largest logit, and the smallest that `top_k` and `top_p` keep, found by bisection of its bits
    race     per row and piece of the vocabulary: the token with the smallest clock divided by its probability

Plain torch (`engine.sampling.device_draw`) makes some two hundred passes over [R, V] numbers of 8 bytes for a draw, and
sorts them for `top_k` and `top_p`: with 64 rows and 128k tokens, this takes longer than the rest of a step. Here each
logit is read once, or once per bit for a row with filters.

Clocks are Philox numbers of (seed, position, token id), and float64 from there on, as on a CPU. Weights for `top_p` are
summed in float32 and float64: a token at the very edge may be kept on one device and dropped on the other. The result
of a row depends only on the row.

Shapes: R rows that draw, V vocabulary, P pieces, B token ids of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
import triton
import triton.language as tl

from engine.sampling.sampler import HOPELESS
from engine.scheduling.sequence import INVALID_TOKEN, Sequence
from engine.to_device import to_device

PIECE = 8192
"""Token ids per program of the race: 64 rows of 128k tokens give a thousand programs, and one row still sixteen."""
BOUNDS_TILE = 16384
"""Token ids per tile of a `bounds` program, which reads its row 17 times or more: as many loads in flight as a
multiprocessor supports."""
RACE_BLOCKS = 256
"""Blocks of four token ids; the ids of one share a block of Philox."""


def draw(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Like `engine.sampling.sampler.draw`: draw one token per row, with temperatures above 0: [R] int64. Does not wait
    for the device."""
    num_rows, vocab_size = logits_RV.shape
    logits_RV = logits_RV.contiguous()
    device, params = logits_RV.device, [seq.sampling_params for seq in seqs]
    integers = np.array(
        [
            (p.seed, seq.num_output_tokens, p.top_k if 0 < p.top_k < vocab_size else 0, 0)
            for p, seq in zip(params, seqs, strict=True)
        ],
        dtype=np.int64,
    )
    floats = np.array([(p.temperature, p.min_p, p.top_p) for p in params], dtype=np.float64)
    packed = to_device(np.concatenate((integers.reshape(-1), floats.reshape(-1).view(np.int64))), device)
    # Rows of four: with three, the alignment of the floats would depend on the number of rows, and the kernel would be
    # compiled twice.
    integers_R4 = packed[: 4 * num_rows]
    floats_R3 = packed[4 * num_rows :].view(torch.float64)
    # The largest and the smallest kept logit; NaN in place of the former if the row has no next token.
    bounds_R2 = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
    tile = min(BOUNDS_TILE, int(triton.next_power_of_2(vocab_size)))
    _bounds_kernel[(num_rows,)](
        logits_RV, integers_R4, floats_R3, bounds_R2, VOCAB_SIZE=vocab_size,
        NUM_BITS=16 if logits_RV.dtype == torch.bfloat16 else 32, BLOCK=tile, num_warps=max(tile // 512, 1),
    )  # fmt: skip
    num_pieces = triton.cdiv(vocab_size, PIECE)
    clocks_RP = torch.empty(num_rows, num_pieces, dtype=torch.float64, device=device)
    ids_RP = torch.empty(num_rows, num_pieces, dtype=torch.int64, device=device)
    _race_kernel[(num_rows, num_pieces)](
        logits_RV, integers_R4, floats_R3, bounds_R2, clocks_RP, ids_RP, VOCAB_SIZE=vocab_size,
        HOPELESS=HOPELESS, PIECE=PIECE, BLOCKS=RACE_BLOCKS, num_warps=4,
    )  # fmt: skip
    chosen_R = ids_RP.gather(1, clocks_RP.argmin(dim=1, keepdim=True)).squeeze(1)
    return torch.where(bounds_R2[:, 0].isnan(), INVALID_TOKEN, chosen_R)


@triton.jit
def _key(x):
    """Integers ordered like the floats: -inf is the lowest."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    """The float of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, ids, VOCAB_SIZE: tl.constexpr):
    return tl.load(row_ptr + ids, mask=ids < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def _bounds_kernel(
    logits_ptr, integers_ptr, floats_ptr, bounds_ptr,
    VOCAB_SIZE: tl.constexpr, NUM_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row). Because the vocabulary's size is a constant, the compiler knows that rows are aligned for wide
    loads."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * VOCAB_SIZE
    ids_B = tl.arange(0, BLOCK)
    largest_B = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    is_nan_B = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        x_B = _load(row_ptr, start + ids_B, VOCAB_SIZE)
        is_nan_B = is_nan_B | (x_B != x_B).to(tl.int32)
        largest_B = tl.where(x_B > largest_B, x_B, largest_B)
    largest = tl.max(largest_B, 0)
    # A row with only -inf has no token either, nor has a row whose largest logit is inf.
    has_none = (tl.max(is_nan_B, 0) > 0) | (tl.abs(largest) == float("inf"))
    top_k = tl.load(integers_ptr + 4 * row + 2)
    # In float32 the smallest temperature would become 0, and 0 / 0 is NaN.
    temperature = tl.maximum(tl.load(floats_ptr + 3 * row).to(tl.float32), 1e-30)
    min_p = tl.load(floats_ptr + 3 * row + 1).to(tl.float32)
    top_p = tl.load(floats_ptr + 3 * row + 2)
    least = _key(tl.full([1], float("-inf"), dtype=tl.float32))
    if not has_none:
        if top_k > 0:
            least = _bisect(
                row_ptr, VOCAB_SIZE, largest, temperature, min_p, least, top_k.to(tl.float64), False, NUM_BITS, BLOCK
            )
        if top_p < 1:
            mass = _mass(row_ptr, VOCAB_SIZE, largest, temperature, min_p, least, True, BLOCK)
            least = _bisect(
                row_ptr, VOCAB_SIZE, largest, temperature, min_p, least, mass * top_p, True, NUM_BITS, BLOCK
            )
    tl.store(bounds_ptr + 2 * row, tl.where(has_none, float("nan"), largest))
    tl.store(bounds_ptr + 2 * row + 1 + tl.arange(0, 1), _float(least))


@triton.jit
def _bisect(
    row_ptr, VOCAB_SIZE: tl.constexpr, largest, temperature, min_p, least, wanted,
    IS_MASS: tl.constexpr, NUM_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens from it on have at least `wanted`; `least` if all tokens together have less.
    Determines the key bit by bit, from the highest, which is the sign."""
    key = tl.full([1], -2147483648, dtype=tl.int32)
    for i in range(NUM_BITS):
        # The key starts as the lowest integer: the first step clears its sign bit, the others set bits.
        tried = key ^ (tl.full([1], 1, dtype=tl.int32) << (31 - i))
        found = _mass(row_ptr, VOCAB_SIZE, largest, temperature, min_p, tried, IS_MASS, BLOCK)
        key = tl.where(found >= wanted, tried, key)
    return tl.maximum(key, least)


@triton.jit
def _mass(
    row_ptr, VOCAB_SIZE: tl.constexpr, largest, temperature, min_p, least, IS_MASS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of the weights, or the number, of the tokens from key `least` on that `min_p` keeps. float64."""
    ids_B = tl.arange(0, BLOCK)
    total = tl.zeros([1], dtype=tl.float64)
    for start in range(0, VOCAB_SIZE, BLOCK):
        x_B = _load(row_ptr, start + ids_B, VOCAB_SIZE)
        weights_B = tl.exp((x_B - largest) / temperature)
        is_kept_B = (_key(x_B) >= least) & (weights_B >= min_p) & (x_B > float("-inf"))
        counted_B = weights_B if IS_MASS else tl.full([BLOCK], 1.0, dtype=tl.float32)
        total += tl.sum(tl.where(is_kept_B, counted_B, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _race_kernel(
    logits_ptr, integers_ptr, floats_ptr, bounds_ptr, clocks_ptr, ids_ptr,
    VOCAB_SIZE: tl.constexpr, HOPELESS: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (row, piece): the smallest clock of the piece, and its token."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    row_ptr = logits_ptr + row * VOCAB_SIZE
    seed = tl.load(integers_ptr + 4 * row)
    position = tl.load(integers_ptr + 4 * row + 1).to(tl.uint32)
    temperature = tl.load(floats_ptr + 3 * row)
    min_p = tl.load(floats_ptr + 3 * row + 1)
    largest = tl.load(bounds_ptr + 2 * row).to(tl.float64)
    # Compared as weights: tokens as probable as the last one kept are kept, even at temperatures that make all logits
    # equal.
    least_weight = tl.exp((tl.load(bounds_ptr + 2 * row + 1).to(tl.float64) - largest) / temperature)
    blocks_B = tl.arange(0, BLOCKS)
    zeros_B = tl.zeros([BLOCKS], dtype=tl.uint32)
    best_B = tl.full([BLOCKS], float("inf"), dtype=tl.float64)
    best_ids_B = tl.zeros([BLOCKS], dtype=tl.int64)
    first = piece * PIECE
    for start in range(first, first + PIECE, 4 * BLOCKS):
        philox_B = start // 4 + blocks_B
        words = tl.philox(seed, philox_B.to(tl.uint32), zeros_B, zeros_B + position, zeros_B)
        for i in tl.static_range(4):
            ids_B = start + 4 * blocks_B + i
            x_B = _load(row_ptr, ids_B, VOCAB_SIZE)
            weights_B = tl.exp((x_B.to(tl.float64) - largest) / temperature)
            uniform_B = (words[i].to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
            is_running_B = (weights_B > HOPELESS) & (weights_B >= min_p) & (weights_B >= least_weight)
            clocks_B = -tl.log(uniform_B) / tl.where(is_running_B, weights_B, 1.0)
            clocks_B = tl.where(is_running_B, clocks_B, float("inf"))
            is_first_B = clocks_B < best_B
            best_B = tl.where(is_first_B, clocks_B, best_B)
            best_ids_B = tl.where(is_first_B, ids_B.to(tl.int64), best_ids_B)
    best = tl.min(best_B, 0)
    # Of equal clocks, the lowest id wins, as on a CPU.
    best_id = tl.min(tl.where(best_B == best, best_ids_B, 1 << 62), 0)
    num_pieces = tl.num_programs(1)
    tl.store(clocks_ptr + row * num_pieces + piece, best)
    tl.store(ids_ptr + row * num_pieces + piece, best_id)
