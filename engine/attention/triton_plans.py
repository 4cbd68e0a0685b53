"""A step's arrays on the device, as one copy: the plans of the Triton backends.

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
from numpy.typing import NDArray

from engine.attention.base import StepLayout
from engine.kernels.gpu.prefill import list_tiles
from engine.to_device import to_device

ALIGNMENT = 4
"""int32 numbers: 16 bytes. Arrays in one buffer begin at multiples of it, so that Triton compiles for one alignment."""


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
    """[tiles, 2] int32: `engine.kernels.gpu.prefill.list_tiles`"""
    num_decodes: int
    max_context_len: int
    """No decoding sequence's context is longer."""
    scratch: torch.Tensor
    """float32, of the pieces of decoding sequences"""


class TritonPlans:
    """Of one backend."""

    def __init__(
        self, *, block_size: int, tokens_per_tile: int, device: str, scratch_of: Callable[[int, int], torch.Tensor]
    ) -> None:
        """`tokens_per_tile`: of prefill. `scratch_of`: for so many decoding sequences, up to that many tokens long."""
        self._block_size, self._tokens_per_tile, self._device = block_size, tokens_per_tile, device
        self._scratch_of = scratch_of

    def prepare(self, layout: StepLayout) -> TritonPlan:
        decodes = layout.num_decodes
        arrays = self._arrays(layout)
        return self._plan(
            to_device(_pack(arrays), self._device),
            [array.shape for array in arrays],
            decodes,
            int(layout.context_lens[:decodes].max()) if decodes else 0,
        )

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonPlan:
        """A plan for steps in which up to `num_seqs` sequences decode, none longer than `max_context_len`; made by
        `refill`. Rows that it leaves empty attend to nothing and write nothing."""
        num_blocks = -(-max_context_len // self._block_size)
        shapes: list[tuple[int, ...]] = [(num_seqs,), (num_seqs,), (num_seqs + 1,), (num_seqs, num_blocks), (0, 2)]
        size = sum(_padded_size(shape, 2 if i == 0 else 1) for i, shape in enumerate(shapes))
        buffer = torch.zeros(size, dtype=torch.int32, device=self._device)
        plan = self._plan(buffer, shapes, num_seqs, max_context_len)
        plan.slot_mapping.fill_(-1)
        return plan

    def refill(self, plan: TritonPlan, layout: StepLayout) -> None:
        """Put a decoding step into a reserved plan, in stream order. Raises `ValueError` where it does not fit."""
        num_seqs, num_blocks = plan.block_tables.shape
        count, width = layout.block_tables.shape
        if layout.num_decodes < count or count > num_seqs or layout.context_lens.max() > plan.max_context_len:
            raise ValueError(
                f"a plan for {num_seqs} sequences that decode up to {plan.max_context_len} tokens has no room for "
                f"{count} sequences, {layout.num_decodes} of which decode, up to {layout.context_lens.max()} tokens"
            )
        empty = num_seqs - count
        width = min(width, num_blocks)
        padded = StepLayout(
            query_lens=np.ones(num_seqs, dtype=np.int64),
            context_lens=np.pad(layout.context_lens, (0, empty)),
            block_tables=np.pad(layout.block_tables[:, :width], ((0, empty), (0, num_blocks - width))),
            slot_mapping=np.pad(layout.slot_mapping, (0, empty), constant_values=-1),
            num_decodes=num_seqs,
        )
        plan.buffer.copy_(to_device(_pack(self._arrays(padded)), self._device), non_blocking=True)

    def _arrays(self, layout: StepLayout) -> list[NDArray[np.int32] | NDArray[np.int64]]:
        """In the order of `TritonPlan`."""
        starts = np.concatenate(([0], np.cumsum(layout.query_lens))).astype(np.int32)
        tiles = list_tiles(layout.query_lens, layout.context_lens, layout.num_decodes, self._tokens_per_tile)
        return [
            layout.slot_mapping.astype(np.int64, copy=False),
            layout.context_lens.astype(np.int32),
            starts,
            layout.block_tables.astype(np.int32),
            tiles,
        ]

    def _plan(
        self, buffer: torch.Tensor, shapes: list[tuple[int, ...]], num_decodes: int, max_context_len: int
    ) -> TritonPlan:
        parts, start = [], 0
        for i, shape in enumerate(shapes):
            words = 2 if i == 0 else 1
            part = buffer[start : start + words * int(np.prod(shape))]
            parts.append((part.view(torch.int64) if words == 2 else part).view(shape))
            start += _padded_size(shape, words)
        slot_mapping, context_lens, query_starts, block_tables, prefill_tiles = parts
        return TritonPlan(
            buffer=buffer,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
            query_starts=query_starts,
            block_tables=block_tables,
            prefill_tiles=prefill_tiles,
            num_decodes=num_decodes,
            max_context_len=max_context_len,
            scratch=self._scratch_of(num_decodes, max_context_len),
        )


def _padded_size(shape: tuple[int, ...], words: int) -> int:
    """int32 numbers that an array takes in a buffer."""
    return -(-words * int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT


def _pack(arrays: list[NDArray[np.int32] | NDArray[np.int64]]) -> NDArray[np.int32]:
    flat = [array.reshape(-1).view(np.int32) for array in arrays]
    return np.concatenate([np.pad(part, (0, -len(part) % ALIGNMENT)) for part in flat])
