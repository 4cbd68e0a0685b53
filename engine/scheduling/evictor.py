"""Which cached block goes first when memory is needed: the least recently used. Integers only."""

from __future__ import annotations

from collections import OrderedDict


class LRUEvictor:
    """Blocks that nobody uses but whose content may be wanted again, oldest first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def add(self, block_id: int) -> None:
        assert block_id not in self._blocks, f"block {block_id} is evictable already"
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        del self._blocks[block_id]

    def evict(self) -> int:
        """Take out the block that was added first."""
        return self._blocks.popitem(last=False)[0]
