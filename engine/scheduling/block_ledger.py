"""What a block manager says of its blocks: who owns them, how many each owns, and which prefixes they hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BlockOwner(IntEnum):
    """Kinds of block tables, strongest first."""

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
    """A prefix block became findable (`is_stored`) or was evicted."""

    is_stored: bool
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class HostLedger:
    """The host's blocks. What is neither free nor kept is on its way, from the pool or, forgotten, to it."""

    num_blocks: int = 0
    num_free: int = 0
    num_kept: int = 0
    num_saving: int = 0
    """Of the pool's cached blocks, as long as they are copied: they are not to be had."""
