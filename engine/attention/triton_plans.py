"""The plans of the Triton backends: a step's arrays on the device.

A reserved plan has fixed addresses, so that a CUDA graph captured with it can replay other steps:

    plan = backend.reserve_decode_plan(num_seqs, max_context_len)   once; then capture with it
    backend.refill(plan, layout)                                    before every replay; fewer sequences fit, too

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionBackend, Needs, StepLayout
from engine.attention.step_arrays import IntArray, empty_decodes, fill_up_decodes, pack, unpack
from engine.float8 import FLOAT8, why_no_float8
from engine.kernels.gpu.pointwise import MAX_HIDDEN_SIZE
from engine.kernels.gpu.prefill import list_tiles
from engine.kernels.gpu.rotate import project_heads
from engine.layers import CosSin, HeadProjection
from engine.to_device import fill, to_device


def why_not_either(needs: Needs) -> str:
    """Why no Triton backend can serve, as a clause; empty if one might."""
    if needs.kv_dtype == FLOAT8 and needs.capability is not None and (why_not := why_no_float8(needs.capability)):
        return f"kv_cache_dtype is fp8, and {why_not}"
    if needs.model.hidden_size > MAX_HIDDEN_SIZE:
        return f"the model's hidden size must be at most {MAX_HIDDEN_SIZE}, is {needs.model.hidden_size}"
    return ""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's arrays, which are parts of `buffer`, in this order."""

    buffer: torch.Tensor
    """int32: the arrays below up to `prefill_tiles`"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    context_lens: torch.Tensor
    """[S] int32"""
    query_starts: torch.Tensor
    """[S + 1] int32"""
    block_tables: torch.Tensor
    """[S, blocks of the longest] int32"""
    prefill_tiles: torch.Tensor
    """[tiles, 2] int32: `engine.kernels.gpu.prefill.list_tiles` of the sequences after the first `num_decodes`"""
    num_decodes: int
    """How many leading sequences go to the decode kernel, which splits contexts."""
    max_context_len: int
    """Upper bound of the context lengths of these sequences."""
    scratch: torch.Tensor
    """float32, large enough for the pieces of decoding sequences. Shared by all plans."""


class WithTritonPlans(ABC):
    """The plans of a backend. They share scratch memory, since steps run one after the other."""

    def __init__(self, *, block_size: int, tokens_per_tile: int, device: str, splits_decodes: bool = True) -> None:
        """`tokens_per_tile`: of the prefill kernel. `splits_decodes`: if False, decoding sequences get a prefill tile
        each instead."""
        self._block_size, self._tokens_per_tile, self._device = block_size, tokens_per_tile, device
        self._splits_decodes = splits_decodes
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    @abstractmethod
    def _scratch_size(self, num_seqs: int, max_context_len: int) -> int:
        """How many float32 numbers the decode kernel needs."""

    def _plan_of(self, layout: StepLayout) -> TritonPlan:
        """The plan of a step."""
        decodes = self._num_split(layout)
        max_context_len = int(layout.context_lens[:decodes].max()) if decodes else 0
        return self._plan(layout, max_context_len, self._scratch_for(decodes, max_context_len))

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonPlan:
        """Make a plan for steps in which up to `num_seqs` sequences of up to `max_context_len` tokens decode, to be
        filled by `refill`. Rows without a sequence attend to nothing and write nothing."""
        layout = empty_decodes(num_seqs, -(-max_context_len // self._block_size))
        return self._plan(layout, max_context_len, self._scratch_for(num_seqs, max_context_len))

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        """See `PagedBackend.keep_scratch`."""
        self._scratch_for(num_seqs, max_context_len)

    def _scratch_for(self, num_seqs: int, max_context_len: int) -> torch.Tensor:
        size = self._scratch_size(num_seqs, max_context_len) if self._splits_decodes else 0
        if len(self._scratch) < size:
            # Grow at least twofold, so that older buffers, which reserved plans keep, add up to no more than the last.
            larger = max(size, 2 * len(self._scratch))
            self._scratch = torch.empty(larger, dtype=torch.float32, device=self._device)
        return self._scratch

    def refill(self, plan: TritonPlan, layout: StepLayout) -> None:
        """Put a decode step into a reserved plan, in stream order. Raises `ValueError` if the step does not fit."""
        num_seqs, num_blocks = plan.block_tables.shape
        filled = fill_up_decodes(layout, num_seqs, num_blocks, plan.max_context_len)
        fill(plan.buffer, pack(self._arrays(filled)))

    def _arrays(self, layout: StepLayout) -> list[IntArray]:
        """The step's arrays in the order of `TritonPlan`."""
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
        """`max_context_len`: of decoding sequences, in this step or in one that is put into the plan later."""
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


class TritonHeadsBackend(WithTritonPlans, AttentionBackend[TritonPlan]):
    """The common base of backends for the keys and values of heads."""

    def prepare(self, layout: StepLayout) -> TritonPlan:
        return self._plan_of(layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        return project_heads(qkv_TX, kv, plan.slot_mapping, heads, cos_sin)
