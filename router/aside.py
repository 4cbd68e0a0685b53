"""Requests that have stepped out of the line, since others have workers that they cannot use. Pure.

In lanes, one for those that wait for the same workers. A lane has the order of the line: by priority; of each those
that return first, the last of them before the others; then of the client that was served the fewest tokens, what it has
begun at another router before the rest; then first come, first served.

    push ──> in its lane, in turn ──first of a lane──> tried ──discard──> planned, in line again, or gone

A turn only grows, as clients' counters do (`growing_heap`). So a request that comes, or a worker that frees something,
costs as much beside ten thousand others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from router.fair_shares import Share
from router.growing_heap import GrowingHeap

Item = TypeVar("Item")
"""What waits. By identity."""


class Place(NamedTuple):
    """Of a request among all that wait, in line or aside. The smaller goes first."""

    priority: int
    is_first: int
    """0: it waited its turn before. Else 1."""
    counter: int
    """What its client was served."""

    @staticmethod
    def of(share: Share[Any], *, is_return: bool) -> Place:
        priority = share.owner.priority
        return Place(priority, 0, 0) if is_return else Place(priority, 1, share.counter)


class Turn(NamedTuple):
    """In a lane. The smaller goes first."""

    place: Place
    is_new: bool
    """It has not begun at another router."""
    number: int


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item]):
    item: Item
    share: Share[Item]
    num_tokens: int
    is_return: bool
    is_ahead: bool
    number: int
    is_gone: bool = False

    @property
    def turn(self) -> Turn:
        place = Place.of(self.share, is_return=self.is_return)
        return Turn(place, False, -self.number) if self.is_return else Turn(place, not self.is_ahead, self.number)


@dataclass(slots=True)
class _Lane(Generic[Item]):
    heap: GrowingHeap[_Waiting[Item]] = field(
        default_factory=lambda: GrowingHeap(lambda waiting: None if waiting.is_gone else waiting.turn)
    )
    num_waiting: int = 0
    num_tokens: int = 0
    num_waiting_of: Counter[Share[Item]] = field(default_factory=Counter)
    num_tokens_of: Counter[Share[Item]] = field(default_factory=Counter)

    def count(self, waiting: _Waiting[Item], sign: int) -> None:
        share, num_tokens = waiting.share, sign * waiting.num_tokens
        self.num_waiting += sign
        self.num_tokens += num_tokens
        self.num_waiting_of[share] += sign
        self.num_tokens_of[share] += num_tokens
        if not self.num_waiting_of[share]:
            del self.num_waiting_of[share], self.num_tokens_of[share]


class Aside(Generic[Item]):
    """All lanes."""

    def __init__(self) -> None:
        self._waiting: dict[Item, tuple[Hashable, _Waiting[Item]]] = {}
        """With its lane."""
        self._lanes: dict[Hashable, _Lane[Item]] = {}
        self._num_pushed = 0

    def __iter__(self) -> Iterator[Item]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: Item) -> bool:
        return item in self._waiting

    @property
    def lanes(self) -> list[Hashable]:
        return list(self._lanes)

    def push(
        self, lane: Hashable, share: Share[Item], item: Item, num_tokens: int, *, is_return: bool, is_ahead: bool
    ) -> None:
        """As `FairShares.push`."""
        self._num_pushed += 1
        waiting = _Waiting(item, share, num_tokens, is_return, is_ahead, self._num_pushed)
        self._waiting[item] = lane, waiting
        there = self._lanes.setdefault(lane, _Lane())
        there.heap.push(waiting)
        there.count(waiting, 1)

    def discard(self, item: Item) -> None:
        """It waits here no more."""
        lane, waiting = self._waiting.pop(item)
        waiting.is_gone = True
        there = self._lanes[lane]
        there.count(waiting, -1)
        if not there.num_waiting:
            del self._lanes[lane]
        else:
            there.heap.trim(there.num_waiting)

    def due(self) -> GrowingHeap[Hashable]:
        """All lanes as they are due, while whoever goes through them takes requests out of them, or leaves one whose
        workers are full."""
        due: GrowingHeap[Hashable] = GrowingHeap(
            lambda lane: None if (first := self.first_of(lane)) is None else first[0]
        )
        for lane in self._lanes:
            due.push(lane)
        return due

    def first_of(self, lane: Hashable) -> tuple[Turn, Item] | None:
        """What goes first in it. None: nothing waits there."""
        there = self._lanes.get(lane)
        waiting = None if there is None else there.heap.first()
        return None if waiting is None else (waiting.turn, waiting.item)

    def any_of(self, lane: Hashable) -> Item:
        """One that waits in it."""
        waiting = self._lanes[lane].heap.first()
        assert waiting is not None
        return waiting.item

    def in_turn(self, lanes: Iterable[Hashable]) -> list[Item]:
        """All of these lanes."""
        entries = [waiting for lane, waiting in self._waiting.values() if lane in lanes]
        return [waiting.item for waiting in sorted(entries, key=lambda waiting: waiting.turn)]

    def num_tokens(self, lane: Hashable) -> int:
        """Of all that wait in it."""
        there = self._lanes.get(lane)
        return 0 if there is None else there.num_tokens

    def num_tokens_before(self, lane: Hashable, priority: int, client: str) -> int:
        """Of those that wait in it, what a further request of `client` may expect to go before it: all that is more
        urgent, all of the client's own, and of every other one as much, or a request."""
        there = self._lanes.get(lane)
        if there is None:
            return 0
        held = there.num_tokens_of.items()
        num_own = sum(num for share, num in held if (share.owner.priority, share.client) == (priority, client))
        num_before = num_own
        for share, num in held:
            if share.owner.priority < priority:
                num_before += num
            elif share.owner.priority == priority and share.client != client:
                num_before += min(num, max(num_own, num // there.num_waiting_of[share]))
        return num_before
