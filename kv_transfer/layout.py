"""The shape of a KV pool, and whether two pools can exchange blocks.

Owns no memory. A pool is bytes `[layer, block, block_bytes]`: one block of one layer is contiguous. The order and dtype
within a block are only compared here, never interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from protos import tandem_kv_transfer_pb2 as pb

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one element, by name."""
DIGEST = "xxh3_64"
"""The only block digest that this version computes."""
DIGEST_BYTES = 8
MAX_BLOCK_BYTES = 1 << 30
MAX_POOL_BYTES = 1 << 50

_BOUNDS = {
    "num_layers": 1 << 12,
    "num_blocks": 1 << 31,
    "block_size": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 14,
    "num_parts": 2,
}


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Raises `ValueError` naming the field and its bound."""

    num_layers: int
    num_blocks: int
    block_size: int
    """Slots (tokens) in a block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_parts: int = 2
    """Parts of a token in a layer: 2, keys and values; 1, latents."""
    order: str = "layer block kv head slot dim"
    """Axes, outermost first."""
    digest: str = DIGEST
    """Name of the block digest."""

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            if not 1 <= getattr(self, name) <= bound:
                raise ValueError(f"{name} must be between 1 and {bound}, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype[:40]!r}")
        if self.digest != DIGEST:
            raise ValueError(f"digest must be {DIGEST}, not {self.digest[:40]!r}")
        if not self.order.startswith("layer block ") or len(self.order) > 100:
            raise ValueError(
                f"order must start with 'layer block' and have at most 100 characters: {self.order[:40]!r}"
            )
        if self.block_bytes > MAX_BLOCK_BYTES or self.pool_bytes > MAX_POOL_BYTES:
            raise ValueError(f"a block of {self.block_bytes} bytes, a pool of {self.pool_bytes} bytes is too large")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.num_parts * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self.num_layers * self.num_blocks * self.block_bytes

    def digest_bytes(self, num_tokens: int) -> int:
        """Bytes of the digests of a prompt of `num_tokens` tokens in all layers: most of its Commit message."""
        return DIGEST_BYTES * self.num_layers * -(-num_tokens // self.block_size)

    def differences(self, other: KVLayout) -> list[str]:
        """Why two pools cannot exchange blocks, as "field: ours != theirs". `num_blocks` may differ."""
        names = [f.name for f in fields(self) if f.name != "num_blocks"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {ours!r} != {theirs!r}" for name, ours, theirs in pairs if ours != theirs]

    def differences_from_peer(self, message: pb.KVLayout) -> list[str]:
        """Like `differences`, for a layout that a peer has sent, which may be invalid."""
        try:
            return self.differences(KVLayout.from_proto(message))
        except ValueError as error:
            return [f"layout: {error}"]

    def to_proto(self) -> pb.KVLayout:
        return pb.KVLayout(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: pb.KVLayout) -> KVLayout:
        """Read a peer's layout. Raises `ValueError` if a number is out of bounds."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
