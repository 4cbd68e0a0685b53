"""Accesses to the device's memory that come in no order: one stream may still write what another one reads.

    stream A   write ── event ───────────────────┐
    stream B                        wait_event ──┴─ read     A's write comes first
    stream C                                        read     it may, or not: `Race`

A `Timeline`, of each stream and of the host, knows how far every other one is, at least, where its own next work begins
(a vector clock). Every piece of memory knows who wrote it last and who has read it since. Torch's own
`torch.cuda._sanitizer` finds races of streams so, on a GPU, where tensors as a whole are used in no order. Here it is
their bytes: of a KV pool several streams use blocks at the same time.

Memory that is let go belongs to the stream that it was allocated on: torch gives it to the next one who asks there,
who may write to it at once. That another stream may still be using it is a race, too.

What one thread of the host has waited for, all of them have: how they tell each other is not looked at. Neither is what
other processes do to this one's memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

GRANULE_BYTES = 16
"""What is told apart. Smaller things side by side, of two streams, would be taken for one."""
MAX_LISTED = 32

Seen = dict[int, int]
"""By a timeline's number, the moment up to which all of it is done."""
Places = slice | NDArray[np.int64]
"""Granules of a storage."""


class Race(RuntimeError):  # noqa: N818
    """Two streams use the same memory, one of them writes to it, and nothing says who comes first. Of the kind that a
    device's failures are, so that whoever waits for the device hears of it."""


class Timeline:
    """Of a stream, or of the host."""

    _numbers = count(1)

    def __init__(self, name: str = "") -> None:
        self.number = next(self._numbers)
        self.name = name or f"stream {self.number}"
        self.moment = 1
        """Of what comes next."""
        self.seen: Seen = {}

    def mark(self) -> Seen:
        """What is done once all that came so far is."""
        marked = self.seen | {self.number: self.moment}
        self.moment += 1
        return marked

    def follow(self, seen: Seen) -> None:
        """What comes next comes after that."""
        for number, moment in seen.items():
            if moment > self.seen.get(number, 0):
                self.seen[number] = moment


class Accesses:
    """To all memory of a device. `timeline`: of what the calling thread launches now, which comes after all that the
    host has waited for; None: it launches nothing, as it records a graph."""

    def __init__(self, host: Timeline, timeline: Callable[[], Timeline | None]) -> None:
        self._host = host
        self._timeline = timeline
        self._histories: dict[int, _History] = {}
        """By storage."""
        self._timelines: dict[int, Timeline] = {}
        self.lock = threading.RLock()
        """Also of the memory's own books: a thread that holds it may let go of memory by collecting garbage."""
        self._late: list[str] = []

    def allocated(self, storage: int, num_bytes: int) -> None:
        with self.lock:
            self._histories[storage] = _History(num_bytes, self._timeline())

    def touch(
        self,
        memory: torch.Tensor,
        places: Places | None,
        what: str,
        *,
        is_written: bool,
        timeline: Timeline | None = None,
    ) -> None:
        """`places`: all of its own, if not given. `timeline`: whose use it is, if not the current stream's. Raises
        `Race`, also for what was let go too early since the last call."""
        timeline = timeline or self._timeline()
        if timeline is None:
            return
        storage = memory.untyped_storage()
        with self.lock:
            self.check()
            self._timelines[timeline.number] = timeline
            history = self._histories.setdefault(storage._cdata, _History(storage.nbytes(), None))
            places = places_of(memory) if places is None else places
            if other := history.raced_by(timeline, places, is_written):
                verb = "writes" if is_written else "reads"
                raise _said(
                    f"{timeline.name} {verb} ({what}) what {self._timelines[other].name} may still be using "
                    f"({history.last[other]}): {tuple(memory.shape)} of {memory.dtype}"
                )
            history.add(timeline, places, is_written, what)

    def let_go(self, storage: int) -> None:
        """By the host. Raises nothing, as nobody would hear of it."""
        with self.lock:
            history = self._histories.pop(storage, None)
            if history is None or history.owner is None:
                return
            for number in history.users - {history.owner.number}:
                seen = max(known.seen.get(number, 0) for known in (history.owner, self._host))
                if history.last_moment(number) > seen:
                    self._late.append(
                        f"memory of {history.owner.name} was let go while {self._timelines[number].name} may still be "
                        f"using it ({history.last[number]})"
                    )

    def check(self) -> None:
        """Raises `Race` if something was let go too early."""
        with self.lock:
            if late := "; ".join(self._late):
                self._late.clear()
                raise _said(late)


class _History:
    """Of one storage. As long as few accesses are known they are a list: most memory is soon let go."""

    def __init__(self, num_bytes: int, owner: Timeline | None) -> None:
        self.owner = owner
        self.users: set[int] = set()
        self.last: dict[int, str] = {}
        """What it was used for, by who did."""
        self._num_granules = -(-num_bytes // GRANULE_BYTES)
        self._listed: list[tuple[Places, bool, int, int]] | None = []
        self._writer: NDArray[np.int32]
        self._written: NDArray[np.int32]
        self._read: dict[int, NDArray[np.int32]] = {}
        """When, last of all, by who did. 0: never."""

    def add(self, timeline: Timeline, places: Places, is_written: bool, what: str) -> None:
        self.users.add(timeline.number)
        self.last[timeline.number] = what
        access = places, is_written, timeline.number, timeline.moment
        if self._listed is None:
            self._mark(*access)
            return
        self._listed.append(access)
        if len(self._listed) > MAX_LISTED:
            self._spread()

    def raced_by(self, timeline: Timeline, places: Places, is_written: bool) -> int | None:
        """Whose earlier access is not known to be done, if there is one."""
        if self.users <= {timeline.number}:
            return None
        self._spread()
        writers, written = self._writer[places], self._written[places]
        for number in self.users - {timeline.number}:
            seen = timeline.seen.get(number, 0)
            if bool(((writers == number) & (written > seen)).any()):
                return number
            if is_written and number in self._read and bool((self._read[number][places] > seen).any()):
                return number
        return None

    def last_moment(self, number: int) -> int:
        self._spread()
        written = self._written[self._writer == number].max(initial=0)
        return int(max(written, self._read[number].max(initial=0) if number in self._read else 0))

    def _spread(self) -> None:
        if self._listed is None:
            return
        listed, self._listed = self._listed, None
        self._writer = np.zeros(self._num_granules, dtype=np.int32)
        self._written = np.zeros(self._num_granules, dtype=np.int32)
        for access in listed:
            self._mark(*access)

    def _mark(self, places: Places, is_written: bool, number: int, moment: int) -> None:
        if is_written:
            self._writer[places], self._written[places] = number, moment
        else:
            if number not in self._read:
                self._read[number] = np.zeros(self._num_granules, dtype=np.int32)
            self._read[number][places] = moment


def _said(what: str) -> Race:
    """Also where a process takes an error for a peer's, and goes on."""
    print(f"{Race.__name__}: {what}", file=sys.stderr, flush=True)
    return Race(what)


def places_of(memory: torch.Tensor) -> Places:
    return _places(memory.shape, memory.stride(), memory.storage_offset(), memory.itemsize)


def places_of_rows(memory: torch.Tensor, rows: NDArray[np.int64]) -> Places:
    """memory: [row, …] in one piece"""
    row_len = memory[:1].numel()
    elements = memory.storage_offset() + rows[:, None] * row_len + np.arange(row_len)
    return places_of_elements(elements.reshape(-1), memory.itemsize)


def places_of_elements(elements: NDArray[np.int64], itemsize: int) -> Places:
    """`elements`: of a storage, counted in its items from its beginning."""
    places = elements * itemsize // GRANULE_BYTES  # which a type's items never straddle
    return places[np.concatenate([places[:1] >= 0, places[1:] != places[:-1]])]  # once for neighbours


@lru_cache(maxsize=512)
def _places(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int) -> Places:
    numel = int(np.prod(shape))
    if not numel:
        return slice(0, 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if span <= numel:
        return slice(offset * itemsize // GRANULE_BYTES, -(-(offset + span) * itemsize // GRANULE_BYTES))
    elements = np.array([offset], dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            elements = (elements[:, None] + np.arange(size) * stride).reshape(-1)
    return places_of_elements(elements, itemsize)
