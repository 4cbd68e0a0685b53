"""Chooses which cached block is evicted when memory is needed: the least recently used. Integers only.

    waiting (oldest first) ──remove, a copy is made, add_ready──> ready (oldest first) ──remove──> gone
                                                                  what is ready is older than all that waits

A block is ready if it has a copy in host memory (`engine.scheduling.offloading`), so that evicting it loses nothing.
Without host memory all blocks are waiting.
"""

from __future__ import annotations

from collections import OrderedDict


class LRUEvictor:
    """Blocks that are in no table but whose content may be needed again, oldest first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._ready: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ready)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._waiting or block_id in self._ready

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def next_waiting(self) -> int | None:
        """The oldest block that is not ready, or None."""
        return next(iter(self._waiting), None)

    def add(self, block_id: int) -> None:
        """Add a block whose last reference was just dropped."""
        assert block_id not in self, f"block {block_id} is evictable already"
        self._waiting[block_id] = None

    def add_ready(self, block_id: int) -> None:
        """Add a block that has a copy. It must have been the oldest waiting block before."""
        assert block_id not in self, f"block {block_id} is evictable already"
        self._ready[block_id] = None

    def make_oldest(self, block_id: int) -> None:
        """Evict this waiting block before all others that wait."""
        self._waiting.move_to_end(block_id, last=False)

    def remove(self, block_id: int) -> None:
        del (self._ready if block_id in self._ready else self._waiting)[block_id]

    @property
    def oldest(self) -> int:
        """What to evict: the oldest ready block, or the oldest waiting one if none is ready. There must be one."""
        return next(iter(self._ready or self._waiting))
