"""The shape of a KV pool, and so its size. Integers only, no torch; `engine.kv_cache` makes the pool."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig
from engine.float8 import FLOAT8
from engine.models.model_shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}
"""Bytes of a number, by a pool's dtype."""


@dataclass(frozen=True, kw_only=True)
class KVCacheShape:
    """The shape of a pool and the meaning of its bytes."""

    num_layers: int
    num_blocks: int
    block_size: int
    """Slots, that is tokens, per block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    """One of DTYPE_BYTES."""
    num_parts: int = 2
    """Parts of a token in a layer: 2, keys and values; 1, latents."""

    @property
    def axes(self) -> tuple[int, ...]:
        """[layer, block, part, kv_head, slot, head_dim]"""
        return (self.num_layers, self.num_blocks, self.num_parts, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.num_parts * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def all_layers_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.all_layers_bytes


def kv_cache_shape(model: ModelShape | ModelConfig, *, num_blocks: int, block_size: int, kv_dtype: str) -> KVCacheShape:
    """The shape of an engine's pool, or of one rank's, if that is what `model` describes."""
    return KVCacheShape(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        num_parts=2 if model.mla is None else 1,
    )


def num_state_blocks_of(recurrent_bytes: int, all_layers_bytes: int) -> int:
    """How many blocks of the pool carry a sequence's recurrent states to another engine. `all_layers_bytes`: of one
    block."""
    return -(-recurrent_bytes // all_layers_bytes)


def kv_dtype_of(kv_cache_dtype: str, dtype: str) -> str:
    """The pool's dtype, from `EngineArgs.kv_cache_dtype` and the model's dtype."""
    return dtype if kv_cache_dtype == "auto" else FLOAT8
