"""Which cached block goes first when memory is needed: the least recently used. Integers only.

    waiting (oldest first) ──make_ready──> ready (oldest first) ──evict──> gone
                                           what is ready is older than all that waits

Ready are those that lose nothing by it, as there is a copy elsewhere (`engine.scheduling.offloading`); without such
copies none is, and all wait.
"""

from __future__ import annotations

from collections import OrderedDict


class LRUEvictor:
    """Blocks that nobody uses but whose content may be wanted again, oldest first."""

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
        """The oldest that is not ready."""
        return next(iter(self._waiting), None)

    def add(self, block_id: int) -> None:
        """It was in use until now."""
        assert block_id not in self, f"block {block_id} is evictable already"
        self._waiting[block_id] = None

    def add_ready(self, block_id: int) -> None:
        """It was the oldest that waited."""
        assert block_id not in self, f"block {block_id} is evictable already"
        self._ready[block_id] = None

    def remove(self, block_id: int) -> None:
        del (self._ready if block_id in self._ready else self._waiting)[block_id]

    def evict(self) -> int:
        """Take out the oldest of those that are ready, or else of all."""
        return (self._ready or self._waiting).popitem(last=False)[0]
