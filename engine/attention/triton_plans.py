"""A step's arrays on the device: the plans of the Triton backends.

A plan can keep its addresses, so that a CUDA graph captured over it replays other steps:

    plan = plans.reserve_decode_plan(num_seqs, max_context_len)     once; then capture with it
    plans.refill(plan, layout)                                      before every replay; fewer sequences fit too

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Needs, StepLayout
from engine.attention.step_arrays import IntArray, empty_decodes, fill_up_decodes, pack, unpack
from engine.float8 import FLOAT8, why_no_float8
from engine.kernels.gpu.pointwise import MAX_HIDDEN_SIZE
from engine.kernels.gpu.prefill import list_tiles
from engine.kernels.gpu.rotate import project_heads
from engine.layers import HeadProjection
from engine.to_device import fill, to_device


def why_not_either(needs: Needs) -> str:
    """What is in the way of both Triton backends, as a clause; empty if nothing is."""
    if needs.kv_dtype == FLOAT8 and needs.capability is not None and (why_not := why_no_float8(needs.capability)):
        return f"kv_cache_dtype is fp8, and {why_not}"
    if needs.model.hidden_size > MAX_HIDDEN_SIZE:
        return f"the model's hidden size must be at most {MAX_HIDDEN_SIZE}, is {needs.model.hidden_size}"
    return ""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's arrays: parts of `buffer`, in this order."""

    buffer: torch.Tensor
    """[all of the below] int32"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    context_lens: torch.Tensor
    """[S] int32"""
    query_starts: torch.Tensor
    """[S + 1] int32"""
    block_tables: torch.Tensor
    """[S, blocks of the longest] int32"""
    prefill_tiles: torch.Tensor
    """[tiles, 2] int32: `engine.kernels.gpu.prefill.list_tiles`, of the other sequences"""
    num_decodes: int
    """The first so many sequences are left to the kernel that splits contexts."""
    max_context_len: int
    """No decoding sequence's context is longer."""
    scratch: torch.Tensor
    """float32, at least what the pieces of decoding sequences take. Plans share it."""


class TritonPlans:
    """Of one backend. They share their scratch: steps run one after the other."""

    def __init__(
        self,
        *,
        block_size: int,
        tokens_per_tile: int,
        device: str,
        scratch_size: Callable[[int, int], int],
        splits_decodes: bool = True,
    ) -> None:
        """`tokens_per_tile`: of prefill. `scratch_size`: float32 numbers for so many decoding sequences, up to that
        many tokens long. `splits_decodes`: otherwise sequences that decode have tiles as prompts have, one each."""
        self._block_size, self._tokens_per_tile, self._device = block_size, tokens_per_tile, device
        self._splits_decodes = splits_decodes
        self._scratch_size = scratch_size
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    def prepare(self, layout: StepLayout) -> TritonPlan:
        decodes = self._num_split(layout)
        max_context_len = int(layout.context_lens[:decodes].max()) if decodes else 0
        return self._plan(layout, max_context_len, self.scratch(decodes, max_context_len))

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonPlan:
        """A plan for steps in which up to `num_seqs` sequences decode, none longer than `max_context_len`; made by
        `refill`. Rows that it leaves empty attend to nothing and write nothing."""
        layout = empty_decodes(num_seqs, -(-max_context_len // self._block_size))
        return self._plan(layout, max_context_len, self.scratch(num_seqs, max_context_len))

    def scratch(self, num_seqs: int, max_context_len: int) -> torch.Tensor:
        """That of steps in which up to so many sequences decode, none longer; kept from then on."""
        size = self._scratch_size(num_seqs, max_context_len) if self._splits_decodes else 0
        if len(self._scratch) < size:
            # Twice as large at least: what reserved plans keep of it is together no larger than the last one.
            larger = max(size, 2 * len(self._scratch))
            self._scratch = torch.empty(larger, dtype=torch.float32, device=self._device)
        return self._scratch

    def refill(self, plan: TritonPlan, layout: StepLayout) -> None:
        """Put a decoding step into a reserved plan, in stream order. Raises `ValueError` where it does not fit."""
        num_seqs, num_blocks = plan.block_tables.shape
        filled = fill_up_decodes(layout, num_seqs, num_blocks, plan.max_context_len)
        fill(plan.buffer, pack(self._arrays(filled)))

    def _arrays(self, layout: StepLayout) -> list[IntArray]:
        """In the order of `TritonPlan`."""
        starts = np.concatenate(([0], np.cumsum(layout.query_lens))).astype(np.int32)
        tiles = list_tiles(layout.query_lens, layout.context_lens, self._num_split(layout), self._tokens_per_tile)
        return [
            layout.slot_mapping.astype(np.int64, copy=False),
            layout.context_lens.astype(np.int32),
            starts,
            layout.block_tables.astype(np.int32),
            tiles,
        ]

    def _num_split(self, layout: StepLayout) -> int:
        return layout.num_decodes if self._splits_decodes else 0

    def _plan(self, layout: StepLayout, max_context_len: int, scratch: torch.Tensor) -> TritonPlan:
        """`max_context_len`: of sequences that decode, in this step or in one that is put into the plan later."""
        arrays, num_decodes = self._arrays(layout), self._num_split(layout)
        buffer = to_device(pack(arrays), self._device)
        slot_mapping, context_lens, query_starts, block_tables, prefill_tiles = unpack(buffer, arrays)
        return TritonPlan(
            buffer=buffer,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
            query_starts=query_starts,
            block_tables=block_tables,
            prefill_tiles=prefill_tiles,
            num_decodes=num_decodes,
            max_context_len=max_context_len,
            scratch=scratch,
        )


class WithReservedPlans:
    """A backend's part of this: what it does with plans that keep their addresses it leaves to `_plans`, which it
    makes."""

    _plans: TritonPlans

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        self._plans.scratch(num_seqs, max_context_len)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonPlan:
        """See `TritonPlans`."""
        return self._plans.reserve_decode_plan(num_seqs, max_context_len)

    def refill(self, plan: TritonPlan, layout: StepLayout) -> None:
        """See `TritonPlans`."""
        self._plans.refill(plan, layout)


class WithTritonPlans(WithReservedPlans):
    """The same of all plans, and what those for keys and values of heads do with them alike."""

    def prepare(self, layout: StepLayout) -> TritonPlan:
        return self._plans.prepare(layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        heads: HeadProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        return project_heads(qkv_TX, kv, plan.slot_mapping, heads, cos_sin)
