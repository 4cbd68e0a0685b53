"""Whose turn it is among requests of one priority: of the client that was served the fewest tokens. Pure: integers.

Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A client is whatever name
a request gives. Its own requests go first come, first served, those ahead before the others, and so do those of clients
with equal counters.

    enter ──> push ──> waits ──first, remove──> served, and charged as tokens come ──> leave
                └─ the client had nothing waiting: its counter is lifted to the floor, so that idle time earns nothing

The floor only grows: to the smallest counter of those that wait, and while nobody waits to the largest of all, since
nobody goes short then. A client with nothing open whose counter is not above it is as one never seen, and is forgotten.
Where more than `MAX_REMEMBERED` others are kept, the floor is raised to the middle one.

Counters of clients that wait differ by at most what one client is charged for a prompt, and for the answers that it has
under way then: who was picked last had the smallest counter, and whoever came later began at that, or above. (Twice as
much where the floor was raised.) What two that wait all the while are served differs by at most twice that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.growing_heap import GrowingHeap

ANSWER_WEIGHT = 2
"""What a token of an answer costs, in tokens of a prompt: as in the paper, and in what providers charge."""
MAX_REMEMBERED = 1024
"""Clients with nothing open whose counters are above the floor."""

Item = TypeVar("Item")
"""What waits. By identity."""


@dataclass(slots=True, eq=False)
class Share(Generic[Item]):
    """One client that has something open."""

    owner: FairShares[Item]
    client: str
    counter: int
    """Tokens that it was served, weighted, and what it was lifted by."""
    num_open: int = 0
    """Requests of its that have entered and not left."""
    waiting: OrderedDict[Item, tuple[int, int]] = field(default_factory=OrderedDict)
    """In turn: the turn, and tokens. Without those that return, and those ahead."""
    ahead: OrderedDict[Item, tuple[int, int]] = field(default_factory=OrderedDict)
    """The same of those that go before them."""
    num_waiting_tokens: int = 0
    num_rest_tokens: int = 0
    """Of these, behind the first."""

    def charge_prompt(self, num_tokens: int) -> None:
        """So many tokens of a prompt will be computed."""
        self._charge(num_tokens)

    def charge_answer(self, num_tokens: int) -> None:
        """So many tokens of an answer have come."""
        self._charge(ANSWER_WEIGHT * num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self.counter += num_tokens
        self.owner.most = max(self.owner.most, self.counter)

    @property
    def key(self) -> tuple[int, int]:
        """While it waits: of all shares the one with the smallest key goes first. A key only grows."""
        turn, _ = next(iter(self._in_turn.values()))
        return self.counter, turn

    @property
    def first(self) -> Item:
        """While it waits: what goes first of its own."""
        return next(iter(self._in_turn))

    @property
    def waits(self) -> bool:
        return bool(self._in_turn)

    @property
    def _in_turn(self) -> OrderedDict[Item, tuple[int, int]]:
        """That in which its first one is."""
        return self.ahead or self.waiting

    def add(self, item: Item, turn: int, num_tokens: int, *, is_ahead: bool) -> None:
        if is_ahead:
            # In the turn of the one before which it goes, or with which: else the key would shrink when it has gone.
            turn, _ = next(iter(self._in_turn.values()), (turn, 0))
            self.ahead[item] = (turn, num_tokens)
        else:
            self.waiting[item] = (turn, num_tokens)
        self._count(num_tokens)

    def take(self, item: Item) -> int:
        """Returns its tokens."""
        _, num_tokens = (self.ahead if item in self.ahead else self.waiting).pop(item)
        self._count(-num_tokens)
        return num_tokens

    def _count(self, num_tokens: int) -> None:
        self.num_waiting_tokens += num_tokens
        _, num_first = next(iter(self._in_turn.values()), (0, 0))
        self.num_rest_tokens = self.num_waiting_tokens - num_first
        if self.num_rest_tokens:
            self.owner.with_rest.add(self)
        else:
            self.owner.with_rest.discard(self)


class FairShares(Generic[Item]):
    """The requests of one priority."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.num_waiting = 0
        self.num_tokens = 0
        """Of all that wait."""
        self.most = 0
        """The largest counter."""
        self.with_rest: set[Share[Item]] = set()
        """Clients with more than one request waiting."""
        self._floor = 0
        self._open: dict[str, Share[Item]] = {}
        self._idle: dict[str, int] = {}
        """Counters of clients with nothing open, above the floor (or a little while ago)."""
        self._returned: OrderedDict[Item, int] = OrderedDict()
        """Tokens of those that waited their turn before. The last goes first."""
        self._lines: GrowingHeap[Share[Item]] = GrowingHeap(lambda share: share.key if share.waits else None)
        self._num_lines = 0
        """Clients with something waiting."""
        self._num_turns = 0

    @property
    def num_open_clients(self) -> int:
        return len(self._open)

    @property
    def num_known_clients(self) -> int:
        """Whose counters are kept."""
        return len(self._open) + len(self._idle)

    # -- coming and going ---------------------------------------------------------------------------------------

    def enter(self, client: str) -> Share[Item]:
        """A request of `client` begins. Its counter is kept until as many have left."""
        share = self._open.get(client)
        if share is None:
            share = self._open[client] = Share(self, client, self._idle.pop(client, 0))
        share.num_open += 1
        return share

    def leave(self, share: Share[Item]) -> None:
        """One of the requests that entered has ended. It waits no more."""
        share.num_open -= 1
        if share.num_open:
            return
        del self._open[share.client]
        self._raise_floor()
        if share.counter > self._floor:
            self._idle[share.client] = share.counter
            if len(self._idle) > MAX_REMEMBERED:
                self._forget_half()

    def push(
        self, share: Share[Item], item: Item, num_tokens: int, *, is_return: bool = False, is_ahead: bool = False
    ) -> None:
        """`item`, with `num_tokens` tokens to compute, waits. `is_return`: in front of all, it waited before.
        `is_ahead`: in front of the client's own, but for those ahead already."""
        self.num_waiting += 1
        self.num_tokens += num_tokens
        if is_return:
            self._returned[item] = num_tokens
            return
        if not share.waits:
            self._raise_floor()
            share.counter = max(share.counter, self._floor)
            self._num_lines += 1
        self._num_turns += 1
        share.add(item, self._num_turns, num_tokens, is_ahead=is_ahead)
        self._lines.push(share)

    def remove(self, share: Share[Item], item: Item) -> None:
        """`item` waits no more: it is planned, or gone."""
        if item in self._returned:
            num_tokens = self._returned.pop(item)
        else:
            num_tokens = share.take(item)
            if not share.waits:
                self._num_lines -= 1
                self._lines.trim(self._num_lines)
        self.num_waiting -= 1
        self.num_tokens -= num_tokens

    # -- whose turn it is ---------------------------------------------------------------------------------------

    def first(self) -> Item | None:
        """Whose turn it is now. None: nobody waits."""
        if self._returned:
            return next(reversed(self._returned))
        share = self._lines.first()
        return None if share is None else share.first

    def num_tokens_before(self, client: str) -> int:
        """Of those that wait, what a further request of `client` may expect to go before it: what returns, all of the
        client's own, and of every other one the first request, and behind that as much as the client's own.

        As if counters were equal, which they nearly are, and answers as long for their prompts: how long they become
        nobody knows yet. With one client alone it is all that waits, and with one request of each.
        """
        own = self._open.get(client)
        num_own = own.num_waiting_tokens if own is not None else 0
        rests = (share.num_rest_tokens for share in self.with_rest if share is not own)
        return self.num_tokens - sum(rest - num_own for rest in rests if rest > num_own)

    # -- what is forgotten --------------------------------------------------------------------------------------

    def _raise_floor(self) -> None:
        share = self._lines.first()
        if share is None:
            self._floor = self.most
            self._idle.clear()
        else:
            self._floor = max(self._floor, share.counter)

    def _forget_half(self) -> None:
        """At least: those at the floor, and if they are too few, it is raised for all who come."""
        counters = sorted(self._idle.values())
        self._floor = max(self._floor, counters[len(counters) // 2])
        self._idle = {client: counter for client, counter in self._idle.items() if counter > self._floor}
