"""`engine.sampling.sampler.draw` on the device that holds the logits, without waiting for the device.

It runs the same race with the same clocks: Philox over (seed, position, token id), in 64-bit integers, so that
a sequence could continue on a CPU with the same tokens. Filters cut at the same weights, but sums are computed in
another order, so that a token at the very edge of `top_p` may fall on its other side.

Shapes: R rows that draw, V vocabulary, B blocks of four token ids.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.sampling.random import KEY_INCREMENTS, MULTIPLIERS, NUM_ROUNDS
from engine.sampling.sampler import HOPELESS
from engine.scheduling.sequence import INVALID_TOKEN, Sequence
from engine.to_device import integers, to_device

_LOW_32 = 0xFFFFFFFF


def draw(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Draw one token per row: [R] int64. Temperatures must be above 0. Rows do not influence each other."""
    device = logits_RV.device
    weights_RV = filtered_weights(logits_RV, seqs)
    clocks_RV = exponentials(
        _column([seq.sampling_params.seed for seq in seqs], torch.int64, device),
        _column([seq.num_output_tokens for seq in seqs], torch.int64, device),
        weights_RV.shape[1],
    )
    clocks_RV /= weights_RV
    clocks_RV.masked_fill_(weights_RV <= HOPELESS, float("inf"))
    # On some devices argmin does not single out NaN, so that NaN is looked for separately.
    return torch.where(weights_RV.isnan().any(dim=1), INVALID_TOKEN, clocks_RV.argmin(dim=1))


def filtered_weights(logits_RV: torch.Tensor, seqs: Seq[Sequence]) -> torch.Tensor:
    """Like `engine.sampling.sampler.filtered_weights`: [R, V] float64, the largest of each row is 1."""
    params = [seq.sampling_params for seq in seqs]
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    weights_RV = logits_RV.double()
    weights_RV -= weights_RV.amax(dim=-1, keepdim=True)
    weights_RV /= _column([p.temperature for p in params], torch.float64, device)
    weights_RV.exp_()
    if any(p.min_p for p in params):
        min_p = _column([p.min_p for p in params], torch.float64, device)
        weights_RV.masked_fill_(weights_RV < min_p, 0)
    rows = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab_size]
    if rows:
        index_K = integers(rows, device)
        top_k = [params[row].top_k if 0 < params[row].top_k < vocab_size else vocab_size for row in rows]
        kept_KV = _cut(
            weights_RV[index_K],
            _column(top_k, torch.int64, device),
            _column([params[row].top_p for row in rows], torch.float64, device),
        )
        weights_RV[index_K] = kept_KV
    return weights_RV


def _cut(weights_KV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero the tokens that `top_k` drops, then those that `top_p` drops. Ties with the last kept token are kept."""
    sorted_KV = weights_KV.sort(dim=1, descending=True).values
    least = sorted_KV.gather(1, top_k - 1)
    weights_KV.masked_fill_(weights_KV < least, 0)
    sorted_KV.masked_fill_(sorted_KV < least, 0)
    sums_KV = sorted_KV.cumsum(dim=1)
    reached = torch.searchsorted(sums_KV, sums_KV[:, -1:] * top_p).clamp_(max=sums_KV.shape[1] - 1)
    least = torch.where(top_p < 1, sorted_KV.gather(1, reached), 0.0)
    return weights_KV.masked_fill_(weights_KV < least, 0)


def exponentials(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`random.exponentials` for all token ids: [R, V] float64. Arguments are [R, 1] int64; seeds are 64-bit
    patterns."""
    blocks_1B = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    zeros_RB = torch.zeros_like(seeds) + torch.zeros_like(blocks_1B)
    c0, c1, c2, c3 = zeros_RB + blocks_1B, zeros_RB, zeros_RB + positions, zeros_RB
    k0, k1 = seeds & _LOW_32, (seeds >> 32) & _LOW_32
    for _ in range(NUM_ROUNDS):
        # Products may overflow into the sign bit: the bits are right, and the mask after the shift drops the sign's.
        product_0, product_1 = c0 * int(MULTIPLIERS[0]), c2 * int(MULTIPLIERS[1])
        c0 = ((product_1 >> 32) & _LOW_32) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & _LOW_32) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW_32, product_0 & _LOW_32
        k0, k1 = (k0 + int(KEY_INCREMENTS[0])) & _LOW_32, (k1 + int(KEY_INCREMENTS[1])) & _LOW_32
    words_RV = torch.stack((c0, c1, c2, c3), dim=2).flatten(1)[:, :vocab_size]
    return -torch.log((words_RV.double() + 0.5) * 2.0**-32)


def _column(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(values), 1]"""
    return to_device(np.array(values), device).to(dtype).unsqueeze(1)
