"""Requests that have stepped out of the line because they cannot use the workers that others can use. Pure.

The requests wait in lanes; all requests of a lane wait for the same workers. A lane has the order of the line: by
priority; within a priority, returning requests first, the latest of them at the front; then by the client that was
served the fewest tokens, where answers begun at another router go before that client's other requests; then first come,
first served.

    push ──> in its lane, in turn ──first of a lane──> tried ──discard──> planned, in line again, or gone

A turn only grows, as clients' counters do (`growing_heap`). So a request that arrives, or a worker that frees
something, costs no more when ten thousand others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from router.fair_shares import Share
from router.growing_heap import GrowingHeap

Item = TypeVar("Item")
"""What waits. Compared by identity."""


class Place(NamedTuple):
    """The place of a request among all that wait, in line or aside. The smaller goes first."""

    priority: int
    is_new: bool
    """Whether it has not waited its turn before."""
    counter: int
    """The counter of its client's share; 0 if it has waited its turn before."""

    @staticmethod
    def of(share: Share[Any], *, is_return: bool) -> Place:
        priority = share.owner.priority
        return Place(priority, False, 0) if is_return else Place(priority, True, share.counter)


class Turn(NamedTuple):
    """The turn of a request in its lane. The smaller goes first."""

    place: Place
    is_new: bool
    """False: the request has waited its turn before, or its answer began at another router."""
    number: int
    """Order of arrival; negative for requests that have waited before, so that the latest of them goes first."""


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
    """The requests of all lanes."""

    def __init__(self) -> None:
        self._waiting: dict[Item, tuple[Hashable, _Waiting[Item]]] = {}
        """Each waiting item, with its lane."""
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
        """Let `item` wait in `lane`. The other arguments are those of `FairShares.push`."""
        self._num_pushed += 1
        waiting = _Waiting(item, share, num_tokens, is_return, is_ahead, self._num_pushed)
        self._waiting[item] = lane, waiting
        there = self._lanes.setdefault(lane, _Lane())
        there.heap.push(waiting)
        there.count(waiting, 1)

    def discard(self, item: Item) -> None:
        """`item` no longer waits here."""
        lane, waiting = self._waiting.pop(item)
        waiting.is_gone = True
        there = self._lanes[lane]
        there.count(waiting, -1)
        if not there.num_waiting:
            del self._lanes[lane]
        else:
            there.heap.trim(there.num_waiting)

    def due(self) -> GrowingHeap[Hashable]:
        """All lanes, ordered by the turn of their first request. The order stays right while the caller discards
        requests, or pops a lane whose workers are full."""
        due: GrowingHeap[Hashable] = GrowingHeap(
            lambda lane: None if (first := self.first_of(lane)) is None else first[0]
        )
        for lane in self._lanes:
            due.push(lane)
        return due

    def first_of(self, lane: Hashable) -> tuple[Turn, Item] | None:
        """The request that goes first in `lane`, with its turn. None: nothing waits there."""
        there = self._lanes.get(lane)
        waiting = None if there is None else there.heap.first()
        return None if waiting is None else (waiting.turn, waiting.item)

    def any_of(self, lane: Hashable) -> Item:
        """Some request that waits in `lane`, which must not be empty."""
        waiting = self._lanes[lane].heap.first()
        assert waiting is not None
        return waiting.item

    def in_turn(self, lanes: Iterable[Hashable]) -> list[Item]:
        """All requests of these lanes, in turn."""
        entries = [waiting for lane, waiting in self._waiting.values() if lane in lanes]
        return [waiting.item for waiting in sorted(entries, key=lambda waiting: waiting.turn)]

    def num_tokens(self, lane: Hashable) -> int:
        """The tokens of all requests that wait in `lane`."""
        there = self._lanes.get(lane)
        return 0 if there is None else there.num_tokens

    def num_tokens_before(self, lane: Hashable, priority: int, client: str) -> int:
        """The tokens waiting in `lane` that are expected to go before a further request of `client`: all of more urgent
        priorities, all of the client's own at `priority`, and from every other client as many tokens as the client's
        own, or at least one request's."""
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
