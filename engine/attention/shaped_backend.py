"""Attention for models whose layers have heads of several shapes: one backend for each.

    a layer's memory   [block 0            |block 1            | …     of the pool's shape, the largest
                       [0        |1        |2        |3        | …     as blocks of a shape of half the size

A layer's memory is taken for blocks of the layer's own shape, `parts` times as many as the pool has; only the first of
each `parts` is used. So every backend sees an ordinary layer, and a block's bytes stay where transfers expect them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from engine.attention.base import AttentionBackend, StepLayout
from engine.layers import CosSin, HeadProjection
from engine.models.head_shape import HeadShape, pool_shape
from engine.models.scores import Scores

ShapedPlan: TypeAlias = dict[int, Any]
"""By head dim: the plan of that backend."""


class _Shaped(NamedTuple):
    backend: AttentionBackend[Any]
    shape: HeadShape
    parts: int
    """How many blocks of this shape a block of the pool is."""

    def layer(self, kv: torch.Tensor) -> torch.Tensor:
        """A layer of the pool, as this backend knows it."""
        num_blocks, num_parts, _, block_size, _ = kv.shape
        return kv.view(num_blocks * self.parts, num_parts, self.shape.num_kv_heads, block_size, self.shape.head_dim)


class ShapedAttention(AttentionBackend[ShapedPlan]):
    def __init__(self, backends: Mapping[HeadShape, AttentionBackend[Any]], block_size: int) -> None:
        """`backends`: one for each shape; no two of them have the same head dim."""
        pool = pool_shape(backends)
        self._of = {
            shape.head_dim: _Shaped(backend, shape, pool.token_size // shape.token_size)
            for shape, backend in backends.items()
        }
        assert len(self._of) == len(backends)
        self._block_size = block_size

    def prepare(self, layout: StepLayout) -> ShapedPlan:
        return {
            head_dim: each.backend.prepare(_in_parts(layout, each.parts, self._block_size))
            for head_dim, each in self._of.items()
        }

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        for each in self._of.values():
            each.backend.keep_scratch(num_seqs, max_context_len)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> ShapedPlan:
        """As `PlanKeeper` in engine/running/decode_graphs.py has it, if the backends do."""
        return {
            head_dim: each.backend.reserve_decode_plan(num_seqs, max_context_len)  # type: ignore[attr-defined]
            for head_dim, each in self._of.items()
        }

    def refill(self, plan: ShapedPlan, layout: StepLayout) -> None:
        for head_dim, each in self._of.items():
            each.backend.refill(plan[head_dim], _in_parts(layout, each.parts, self._block_size))  # type: ignore[attr-defined]

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: ShapedPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        own = self._of[heads.head_dim]
        return own.backend.project(qkv_TX, own.layer(kv), plan[heads.head_dim], heads, cos_sin)

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: ShapedPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        head_dim = q_TNH.shape[2]
        own = self._of[head_dim]
        return own.backend.attend(q_TNH, own.layer(kv), plan[head_dim], scores, sinks_N)


def _in_parts(layout: StepLayout, parts: int, block_size: int) -> StepLayout:
    if parts == 1:
        return layout
    blocks, slots = layout.slot_mapping // block_size, layout.slot_mapping % block_size
    return replace(layout, block_tables=layout.block_tables * parts, slot_mapping=blocks * parts * block_size + slots)
