"""Packs a step's index arrays into one buffer, so that one copy brings them to a device; and pads steps to the size of
a plan with fixed addresses.

Owns nothing. numpy on the host, torch on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.base import StepLayout

IntArray = NDArray[np.int32] | NDArray[np.int64]

ALIGNMENT = 4
"""In int32 numbers: 16 bytes. Arrays begin at multiples of it, as the compiled kernels expect."""
_FILLING = np.zeros(ALIGNMENT, dtype=np.int32)


def pack(arrays: Sequence[IntArray]) -> NDArray[np.int32]:
    """Concatenate all arrays, aligned: [int32 numbers]."""
    flat = [array.reshape(-1).view(np.int32) for array in arrays]
    return np.concatenate([each for part in flat for each in (part, _FILLING[: -len(part) % ALIGNMENT])])


def unpack(buffer: torch.Tensor, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
    """Split a copy of `pack(arrays)`, on any device, into views with the arrays' shapes and types."""
    parts, start = [], 0
    for array in arrays:
        num_words = array.nbytes // 4
        part = buffer[start : start + num_words]
        parts.append((part.view(torch.int64) if array.dtype == np.int64 else part).view(array.shape))
        start += -(-num_words // ALIGNMENT) * ALIGNMENT
    return parts


def empty_decodes(num_seqs: int, num_blocks: int) -> StepLayout:
    """A step of `num_seqs` rows without a sequence: contexts of length 0, so that they attend to nothing, and slots of
    -1, so that nothing is written."""
    return StepLayout(
        query_lens=np.ones(num_seqs, dtype=np.int64),
        context_lens=np.zeros(num_seqs, dtype=np.int64),
        block_tables=np.zeros((num_seqs, num_blocks), dtype=np.int64),
        slot_mapping=np.full(num_seqs, -1, dtype=np.int64),
        num_decodes=num_seqs,
    )


def fill_up_decodes(layout: StepLayout, num_seqs: int, num_blocks: int, max_context_len: int) -> StepLayout:
    """Pad a decode step to `num_seqs` with rows without a sequence. Raises `ValueError` if the step does not fit."""
    count, width = layout.block_tables.shape
    if layout.num_decodes < count or count > num_seqs or layout.context_lens.max() > max_context_len:
        raise ValueError(
            f"a plan for {num_seqs} sequences that decode up to {max_context_len} tokens has no room for "
            f"{count} sequences, {layout.num_decodes} of which decode, up to {layout.context_lens.max()} tokens"
        )
    filled = empty_decodes(num_seqs, num_blocks)
    width = min(width, num_blocks)
    filled.context_lens[:count] = layout.context_lens
    filled.block_tables[:count, :width] = layout.block_tables[:, :width]
    filled.slot_mapping[:count] = layout.slot_mapping
    return filled
