"""Orders requests of one priority fairly: next is the client that was served the fewest tokens. Pure: integers.

Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A client is whatever name
a request gives. Requests of one client, and of clients with equal counters, go first come, first served; within a
client, requests pushed with `is_ahead` go before the others.

    enter ──> push ──> waits ──first, remove──> served, and charged as tokens come ──> leave
                └─ the client had nothing waiting: its counter is lifted to the floor, so that idle time earns nothing

The floor only grows: to the smallest counter of the waiting clients, or, while no client waits, to the largest counter
of all, since nobody is kept waiting then. A client with nothing open whose counter is not above the floor is like a new
one, and is forgotten. If more than `MAX_REMEMBERED` idle clients are kept, the floor is raised to their median counter.

The counters of waiting clients differ by at most what one client is charged for a prompt and for the answers that it
has under way: the client picked last had the smallest counter, and clients that came later began at that value or
above. (Twice as much where the floor was raised to the median.) What two clients that wait all the time are served
differs by at most twice that.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.growing_heap import GrowingHeap

ANSWER_WEIGHT = 2
"""The cost of an answer's token in tokens of a prompt, as in the paper and in providers' prices."""
MAX_REMEMBERED = 1024
"""How many clients with nothing open are kept, all with counters above the floor."""

Item = TypeVar("Item")
"""What waits. Compared by identity."""


@dataclass(slots=True, eq=False)
class Share(Generic[Item]):
    """One client that has requests open at this priority."""

    owner: FairShares[Item]
    client: str
    counter: int
    """Weighted tokens that the client was served, plus what its counter was lifted by."""
    num_open: int = 0
    """Its requests that have entered and not left."""
    waiting: OrderedDict[Item, tuple[int, int]] = field(default_factory=OrderedDict)
    """Its waiting requests in turn, each with (turn, tokens), without returning ones and those in `ahead`."""
    ahead: OrderedDict[Item, tuple[int, int]] = field(default_factory=OrderedDict)
    """Likewise: its requests that go before those in `waiting`."""
    num_waiting_tokens: int = 0
    num_rest_tokens: int = 0
    """The waiting tokens without those of its first request."""

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge `num_tokens` tokens of a prompt that will be computed."""
        self._charge(num_tokens)

    def charge_answer(self, num_tokens: int) -> None:
        """Charge `num_tokens` tokens of an answer that have come."""
        self._charge(ANSWER_WEIGHT * num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self.counter += num_tokens
        self.owner.most = max(self.owner.most, self.counter)

    @property
    def key(self) -> tuple[int, int]:
        """Only while the client waits: the share with the smallest key goes first. A key only grows."""
        turn, _ = next(iter(self._in_turn.values()))
        return self.counter, turn

    @property
    def first(self) -> Item:
        """Only while the client waits: its own first request."""
        return next(iter(self._in_turn))

    @property
    def waits(self) -> bool:
        return bool(self._in_turn)

    @property
    def _in_turn(self) -> OrderedDict[Item, tuple[int, int]]:
        """The dict that holds its first request."""
        return self.ahead or self.waiting

    def add(self, item: Item, turn: int, num_tokens: int, *, is_ahead: bool) -> None:
        if is_ahead:
            # It takes the turn of the client's first request: with a turn of its own, a later removal would make the
            # key shrink.
            turn, _ = next(iter(self._in_turn.values()), (turn, 0))
            self.ahead[item] = (turn, num_tokens)
        else:
            self.waiting[item] = (turn, num_tokens)
        self._count(num_tokens)

    def take(self, item: Item) -> int:
        """Remove `item`. Returns its number of tokens."""
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
        """Tokens of all waiting requests."""
        self.most = 0
        """The largest counter of any client."""
        self.with_rest: set[Share[Item]] = set()
        """Clients with more than one request waiting."""
        self._floor = 0
        self._open: dict[str, Share[Item]] = {}
        self._idle: dict[str, int] = {}
        """Counters of clients with nothing open. Each was above the floor when the client became idle."""
        self._returned: OrderedDict[Item, int] = OrderedDict()
        """Requests that have waited their turn before, with their tokens. The last one goes first."""
        self._lines: GrowingHeap[Share[Item]] = GrowingHeap(lambda share: share.key if share.waits else None)
        self._num_lines = 0
        """Clients with something waiting."""
        self._num_turns = 0

    @property
    def num_open_clients(self) -> int:
        return len(self._open)

    @property
    def num_known_clients(self) -> int:
        """Clients whose counters are kept."""
        return len(self._open) + len(self._idle)

    # -- requests enter and leave -------------------------------------------------------------------------------

    def enter(self, client: str) -> Share[Item]:
        """A request of `client` begins. The client's counter is kept at least until all its requests have left."""
        share = self._open.get(client)
        if share is None:
            share = self._open[client] = Share(self, client, self._idle.pop(client, 0))
        share.num_open += 1
        return share

    def leave(self, share: Share[Item]) -> None:
        """One of the requests that entered has ended. It must not be waiting any more."""
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
        """Let `item`, with `num_tokens` tokens to compute, wait. `is_return`: in front of all requests, since it has
        waited before. `is_ahead`: in front of the client's other requests, behind those already ahead."""
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
        """`item` no longer waits: it is planned, or gone."""
        if item in self._returned:
            num_tokens = self._returned.pop(item)
        else:
            num_tokens = share.take(item)
            if not share.waits:
                self._num_lines -= 1
                self._lines.trim(self._num_lines)
        self.num_waiting -= 1
        self.num_tokens -= num_tokens

    # -- order --------------------------------------------------------------------------------------------------

    def first(self) -> Item | None:
        """The request whose turn it is now. None: none waits."""
        if self._returned:
            return next(reversed(self._returned))
        share = self._lines.first()
        return None if share is None else share.first

    def num_tokens_before(self, client: str) -> int:
        """The waiting tokens that are expected to go before a further request of `client`: those of returning requests,
        all of the client's own, and from every other client its first request and, behind that, as many tokens as the
        client's own.

        The estimate takes counters as equal, which they nearly are, and answers as equally long for their prompts,
        since nobody knows their lengths yet. If only one client waits, or each client has one request, all waiting
        tokens count.
        """
        own = self._open.get(client)
        num_own = own.num_waiting_tokens if own is not None else 0
        rests = (share.num_rest_tokens for share in self.with_rest if share is not own)
        return self.num_tokens - sum(rest - num_own for rest in rests if rest > num_own)

    # -- forgetting counters ------------------------------------------------------------------------------------

    def _raise_floor(self) -> None:
        share = self._lines.first()
        if share is None:
            self._floor = self.most
            self._idle.clear()
        else:
            self._floor = max(self._floor, share.counter)

    def _forget_half(self) -> None:
        """Raise the floor to the median counter of the idle clients, and forget those that are not above it: at least
        half of them."""
        counters = sorted(self._idle.values())
        self._floor = max(self._floor, counters[len(counters) // 2])
        self._idle = {client: counter for client, counter in self._idle.items() if counter > self._floor}
