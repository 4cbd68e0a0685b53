"""The KV pool: its shape, its one tensor, and what is done to whole blocks of it.

Owns the meaning of the pool's axes. Which block belongs to whom is the block manager's business; what is in a block is
the attention backend's.

    [layer, block, part, kv_head, slot, head_dim]     parts: keys, values; slot and head_dim as the backend orders them
    [layer, block, 1, 1, slot, latent and key]        where attention is latent (engine/models/latent_attention.py)

One block of one layer is contiguous, so that a transfer moves it as one piece. The pool is allocated once, by the
worker, and lives as long as the engine.

A sequence's last block is rarely full. Attention reads whole blocks and masks the slots beyond the sequence's end, and
a mask cannot hide a NaN (0 * NaN is NaN), so those slots must hold finite numbers: `clear_blocks` zeroes a block when
its first slot is about to be written, and whatever travels or is copied has been cleared by whoever began it.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.config import ModelConfig
from engine.float8 import FLOAT8, saturated_float8
from engine.to_device import to_device

KV_ORDER = "layer block kv head slot dim"
"""The pool's axes, outermost first, in the words of `KVLayout.order`."""

LATENT_KV_ORDER = "layer block kv head slot (latent, rotated key)"
"""Of models with latent attention: rotated pairs half a key apart, whatever order the checkpoint has them in."""

PAIRED_KV_ORDER = "layer block kv head (keys: dim/2 slot 2, values: slot/2 dim 2)"
"""As the CPU kernels keep it: what one vector instruction multiplies lies side by side. The same bytes in another order
within a head of a block; nothing but the attention backend looks there."""

KV_FORMAT_VERSION = 1
"""Raised when equal weights and shapes would yield other bytes in a block (another order, other RoPE pairs)."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What models compute in."""

KV_DTYPES = TORCH_DTYPES | {FLOAT8: torch.float8_e4m3fn}
"""What a pool may hold. 8-bit floats without a scale, as in vLLM where none was calibrated."""

PIECE_BYTES = 16 << 20
"""Of a pool on a CPU, zeroed at once. A multiple of the size of huge pages."""
SLOWEST_BYTES_PER_S = 5e8
"""Where huge pages come slower than this, the rest of a pool goes without."""


@dataclass(frozen=True, kw_only=True)
class KVCacheShape:
    """What a pool's bytes mean."""

    num_layers: int
    num_blocks: int
    block_size: int
    """Slots, that is tokens, in one block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """One of KV_DTYPES."""
    num_parts: int = 2
    """What a token has in a layer: 2, keys and values; 1, latents."""

    @property
    def axes(self) -> tuple[int, ...]:
        """[layer, block, part, kv_head, slot, head_dim]"""
        return (self.num_layers, self.num_blocks, self.num_parts, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.num_parts * self.num_kv_heads * self.block_size * self.head_dim * KV_DTYPES[self.dtype].itemsize

    @property
    def all_layers_bytes(self) -> int:
        """Of one block."""
        return self.num_layers * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.all_layers_bytes


def kv_cache_shape(model: ModelConfig, *, num_blocks: int, block_size: int, kv_dtype: str) -> KVCacheShape:
    """Of an engine's pool."""
    return KVCacheShape(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        num_parts=model.num_kv_parts,
    )


def allocate_kv_pool(shape: KVCacheShape, device: str) -> torch.Tensor:
    """The pool, contiguous and zeroed. Raises `ValueError` where a CPU has not so much memory."""
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
    """`memory`, of `shape.pool_bytes` that nothing was written to, as a pool on a CPU; it keeps the memory."""
    data = torch.frombuffer(memory, dtype=torch.uint8)
    takes_huge_pages = hasattr(mmap, "MADV_HUGEPAGE")
    for first in range(0, len(data), PIECE_BYTES):
        piece = data[first : first + PIECE_BYTES]
        start_s = time.thread_time()  # not what others take of this core meanwhile
        if takes_huge_pages:
            _ask_for_huge_pages(memory, first, len(piece))
        piece.zero_()
        takes_huge_pages &= time.thread_time() - start_s < len(piece) / SLOWEST_BYTES_PER_S
    return data.view(KV_DTYPES[shape.dtype]).view(shape.axes)


def _ask_for_huge_pages(memory: mmap.mmap, first: int, num_bytes: int) -> None:
    """Attention reads blocks from all over the pool, and in pages of 4 KB most of its reads wait for the page tables
    as well. Where the host of a virtual machine has to find each huge page first, 2 MB take 10 ms, and 1 GB 5 s."""
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, first, num_bytes)


def kv_dtype_of(kv_cache_dtype: str, dtype: str) -> str:
    """The pool's, of what `EngineArgs.kv_cache_dtype` says and the model's dtype."""
    return dtype if kv_cache_dtype == "auto" else FLOAT8


def rounded_for_pool(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x`, in the model's dtype, as a pool of `dtype` holds it."""
    return saturated_float8(x) if dtype == torch.float8_e4m3fn else x


def as_movable(pool: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy, fill and index everywhere: bytes, where it holds 8-bit floats."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def clear_blocks(pool: torch.Tensor, block_ids: npt.ArrayLike) -> None:
    """Zero these blocks in all layers."""
    num_layers, num_blocks = pool.shape[:2]
    # As rows: across layers, torch would split a pool of tens of gigabytes into as many launches as it has times 2**31.
    rows = np.arange(num_layers)[:, None] * num_blocks + np.asarray(block_ids)
    flat = as_movable(pool).view(num_layers * num_blocks, -1)
    flat.index_fill_(0, to_device(rows.reshape(-1), pool.device), 0)
