"""The KV pool: its shape, its tensor, and operations on whole blocks.

Defines the pool's axes. The block manager decides who owns which block; the attention backend decides how a block is
laid out.

    [layer, block, part, kv_head, slot, head_dim]     parts: keys, values; slot and head_dim as the backend orders them
    [layer, block, 1, 1, slot, latent and key]        with latent attention (engine/models/latent_attention.py)

One block of one layer is contiguous, so that a transfer moves it as one piece. The worker allocates the pool once; it
lives as long as the engine.

A sequence's last block is rarely full. Attention reads whole blocks and masks the slots beyond the sequence's end. A
mask cannot hide a NaN (0 * NaN is NaN), so these slots must hold finite numbers: `clear_blocks` zeroes a block before
its first slot is written. Transferred and copied blocks were cleared where they were first written.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from engine.float8 import FLOAT8, saturated_float8
from engine.kv_shape import KVCacheShape
from engine.to_device import to_device

KV_ORDER = "layer block kv head slot dim"
"""The pool's axes, outermost first, in the terms of `KVLayout.order`."""

LATENT_KV_ORDER = "layer block kv head slot (latent, rotated key)"
"""For models with latent attention: rotated pairs are half a key apart, whatever their order in the checkpoint."""

PAIRED_KV_ORDER = "layer block kv head (keys: dim/2 slot 2, values: slot/2 dim 2)"
"""The CPU kernels' order: operands of one vector instruction are adjacent. It reorders the bytes within a head of a
block, where only the attention backend reads."""

PAIRED_LATENT_KV_ORDER = "layer block kv head ((latent, rotated key)/2 slot 2)"
"""The CPU kernels' order of latents."""

KV_FORMAT_VERSION = 1
"""Increased when equal weights and shapes would give other bytes in a block (another order, other RoPE pairs)."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that models compute in."""

KV_DTYPES = TORCH_DTYPES | {FLOAT8: torch.float8_e4m3fn}
"""The dtypes of a pool. 8-bit floats have no scale, as in vLLM without calibration."""

PIECE_BYTES = 16 << 20
"""A pool on a CPU is zeroed in pieces of this size, a multiple of huge pages."""
SLOWEST_BYTES_PER_S = 5e8
"""If huge pages are slower than this, the rest of the pool does not use them."""


def allocate_kv_pool(shape: KVCacheShape, device: str) -> torch.Tensor:
    """Allocate a pool, contiguous and zeroed. Raises `ValueError` if the host has not enough memory."""
    if device == "cpu":
        try:
            memory = mmap.mmap(-1, shape.pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ValueError(
                f"no memory for a KV pool of {shape.pool_bytes / 2**30:.1f} GiB ({error.strerror}); kv_cache_gib or "
                "num_kv_blocks must be smaller"
            ) from error
        return kv_pool_in(memory, shape)
    return torch.zeros(shape.axes, dtype=KV_DTYPES[shape.dtype], device=device)


def kv_pool_in(memory: mmap.mmap, shape: KVCacheShape) -> torch.Tensor:
    """Make a pool on a CPU from `memory`: `shape.pool_bytes` that were never written. The pool keeps `memory` alive."""
    data = torch.frombuffer(memory, dtype=torch.uint8)
    takes_huge_pages = hasattr(mmap, "MADV_HUGEPAGE")
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        start_s = time.thread_time()  # CPU time: without what other processes take of this core
        if takes_huge_pages:
            _ask_for_huge_pages(memory, first, len(piece))
        piece.zero_()
        takes_huge_pages &= time.thread_time() - start_s < len(piece) / SLOWEST_BYTES_PER_S
    return data.view(KV_DTYPES[shape.dtype]).view(shape.axes)


def _ask_for_huge_pages(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Attention reads blocks all over the pool; with pages of 4 KB most of its reads also wait for the page tables. In
    a virtual machine whose host must first find each huge page, 2 MB take 10 ms, and 1 GB 5 s."""
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes)


def rounded_for_pool(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert `x` from the model's dtype to a pool's `dtype`."""
    return saturated_float8(x) if dtype == torch.float8_e4m3fn else x


def as_movable(pool: torch.Tensor) -> torch.Tensor:
    """View a pool in a dtype that torch can copy, fill and index on every device: 8-bit floats become bytes."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def rows_of_blocks(pool: torch.Tensor, block_ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    """View a pool as [layer * block, numbers of a block in a layer], and find these blocks' rows in all layers. For a
    view across layers, torch would need one launch for every 2**31 numbers that the view spans."""
    num_layers, num_blocks = pool.shape[:2]
    rows = np.arange(num_layers)[:, None] * num_blocks + np.asarray(block_ids)
    return pool.view(num_layers * num_blocks, -1), to_device(rows.reshape(-1), pool.device)


def clear_blocks(pool: torch.Tensor, block_ids: npt.ArrayLike) -> None:
    """Zero these blocks in all layers."""
    flat, rows = rows_of_blocks(as_movable(pool), block_ids)
    flat.index_fill_(0, rows, 0)
