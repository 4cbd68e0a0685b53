"""Attention in plain torch to keys and values that are unfolded from latents. Unfolds some heads at a time, to limit
the memory of keys and values; heads are independent, so their results need no merging.

Owns the memory for keys and values. Pads values to the length of keys: torch's fast CPU kernel refuses shorter values,
and the other one writes all scores to memory. The padding is cut off the result.

Shapes: U unfolded tokens, N query heads, H of them at a time; C latent dim, P rotated key dim, R = C + P; Q dim of a
head's query without positions, V dim of its value, X = max(Q + P, V); B sequences of a group, L its longest query, S
the slots of its gathered blocks, Y = B * S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812

from engine.attention.latent_forms import Part
from engine.attention.paged_groups import Group
from engine.layers import CosSin, LatentProjection


class UnfoldedHeads:
    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: limit of the memory for keys and values, unless one head of a group needs more."""
        self._max_bytes = max_bytes
        self._room: torch.Tensor | None = None

    def attend(
        self, q_UNX: torch.Tensor, latent_BSR: torch.Tensor, group: Group, heads: LatentProjection, scale: float
    ) -> torch.Tensor:
        """[tokens of the group, N, V]. `q_UNX`: the result of `unfolded_queries`."""
        B, L, N, V = group.num_seqs, group.query_len, q_UNX.shape[1], heads.up_value.shape[2]
        q_BNLX = group.queries(q_UNX)
        o_BNLV = q_UNX.new_empty(B, L, N, V).transpose(1, 2)
        for some, k_BHSX, v_BHSX in self._unfold(latent_BSR, heads, q_UNX.shape[2]):
            num_keys = L if group.mask is None else k_BHSX.shape[2]
            o_BHLX = F.scaled_dot_product_attention(
                q_BNLX[:, some],
                k_BHSX[:, :, :num_keys],
                v_BHSX[:, :, :num_keys],
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=scale,
            )
            o_BNLV[:, some] = o_BHLX[..., :V]
        return group.results(o_BNLV)

    def _unfold(
        self, latent_BSR: torch.Tensor, heads: LatentProjection, size: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield slices of heads with their keys and values, which are valid until the next ones."""
        B, S, R = latent_BSR.shape
        (N, Q, C), V, X = heads.up_key.shape, heads.up_value.shape[2], size
        at_once = min(N, max(1, self._max_bytes // (2 * B * S * X * latent_BSR.itemsize)))
        latent_YR = latent_BSR.view(B * S, R)
        for first in range(0, N, at_once):
            some = slice(first, min(first + at_once, N))
            k_HYX, v_HYX = self._room_for((some.stop - first, B * S, X), latent_BSR)
            heads.unfold(latent_YR[:, :C], k_HYX[..., :Q], v_HYX[..., :V], some)
            k_HYX[..., Q : Q + R - C] = latent_YR[:, C:]
            k_HYX[..., Q + R - C :] = 0
            k_BHSX, v_BHSX = (x.view(-1, B, S, X).transpose(0, 1) for x in (k_HYX, v_HYX))
            yield some, k_BHSX, v_BHSX

    def _room_for(self, shape: tuple[int, int, int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that is kept: on a CPU, page faults of new memory per layer would cost more than writing to it."""
        size = 2 * math.prod(shape)
        if self._room is None or len(self._room) < size or self._room.dtype != like.dtype:
            self._room = like.new_empty(size)
        k, v = self._room[:size].view(2, *shape).unbind(0)
        return k, v


def unfolded_queries(q_TX: torch.Tensor, cos_sin: CosSin, heads: LatentProjection, part: Part) -> torch.Tensor:
    """[U, N, X]: the rotated queries of the part's tokens, padded with zeros if values are longer."""
    (N, Q, _), V = heads.up_key.shape, heads.up_value.shape[2]
    size = q_TX.shape[1] // N
    q_UNX = q_TX.new_zeros(part.num_tokens, N, max(size, V))
    cos, sin = cos_sin
    for run in part.runs:
        q_RX = q_TX[run.step]
        q_UNX[run.part, :, :Q] = q_RX.view(len(q_RX), N, -1)[:, :, :Q]
        q_UNX[run.part, :, Q:size] = heads.rotated(q_RX, (cos[run.step], sin[run.step]))
    return q_UNX
