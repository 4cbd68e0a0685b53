"""A heap whose items' keys may grow. The heap updates an outdated key only when its item reaches the top. Pure.

So an item whose key has grown, or that is gone, costs nothing until it would be the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class GrowingHeap(Generic[T]):
    """A heap that contains each item once."""

    def __init__(self, key: Callable[[T], Any | None]) -> None:
        """`key`: the item's current key, unique among the items. None: the item is gone."""
        self._key = key
        self._heap: list[tuple[Any, T]] = []
        self._items: set[T] = set()
        """The items in the heap."""

    def __len__(self) -> int:
        """Includes items that are gone and not removed yet."""
        return len(self._heap)

    def push(self, item: T) -> None:
        """Add `item`, which must not be gone. Does nothing if it is in the heap already."""
        if item not in self._items:
            self._items.add(item)
            heappush(self._heap, (self._key(item), item))

    def first(self) -> T | None:
        """The item with the smallest key. None: all are gone."""
        while self._heap:
            known, item = self._heap[0]
            key = self._key(item)
            if key is None:
                self.pop()
            elif key != known:
                heapreplace(self._heap, (key, item))
            else:
                return item
        return None

    def pop(self) -> None:
        """Remove the item at the top."""
        _, item = heappop(self._heap)
        self._items.discard(item)

    def trim(self, num_there: int) -> None:
        """Remove the items that are gone if they are more than about half. `num_there`: how many are not gone."""
        if len(self._heap) > 2 * num_there + 64:
            self._heap = [entry for entry in self._heap if self._key(entry[1]) is not None]
            heapify(self._heap)
            self._items = {item for _, item in self._heap}
