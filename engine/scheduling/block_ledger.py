"""What a block manager reports: the kinds of block owners, block counts by owner, and changes of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BlockOwner(IntEnum):
    """Kinds of block tables, strongest first: a block in several tables counts for the strongest."""

    SEQUENCE = 0
    GRANT = 1
    HELD = 2


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """Every block of a pool, counted by owner."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_sequence: int
    num_grant: int
    num_held: int

    @property
    def is_balanced(self) -> bool:
        owned = self.num_free + self.num_cached + self.num_sequence + self.num_grant + self.num_held
        return owned == self.num_blocks


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A prefix block was stored (`is_stored`) or evicted."""

    is_stored: bool
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class HostLedger:
    """Blocks in host memory. A block that is neither free nor kept is being saved to, or is forgotten but still being
    loaded from."""

    num_blocks: int = 0
    num_free: int = 0
    num_kept: int = 0
    num_saving: int = 0
    """Cached blocks of the pool that are being copied to the host: until that is done they cannot be evicted."""
