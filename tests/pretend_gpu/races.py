"""Detects unordered accesses to the device's memory: one stream may still write what another one reads.

    stream A   write ── event ───────────────────┐
    stream B                        wait_event ──┴─ read     A's write comes first
    stream C                                        read     A's write may come first, or not: `Race`

Each stream and the host have a `Timeline` (a vector clock), which knows how far every other timeline is, at least, when
its own next work begins. Every piece of memory knows who wrote it last and who has read it since. In the same way,
`torch.cuda._sanitizer` finds races of streams on a GPU, but only for whole tensors. Here the unit is bytes, since
several streams use different blocks of a KV pool at the same time.

Memory that is freed belongs to the stream that it was allocated on: torch gives it to the next allocation on that
stream, which may write to it at once. It is a race, too, if another stream may still be using it.

What one thread of the host has waited for counts for all its threads: how they synchronise is not checked. Neither is
what other processes do to this one's memory.
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
"""Accesses are told apart in units of this size. Two streams' smaller pieces within one unit would look like one."""
MAX_LISTED = 32

Seen = dict[int, int]
"""By timeline number, the moment up to which all its work is done."""
Places = slice | NDArray[np.int64]
"""Granules (of GRANULE_BYTES) of a storage."""


class Race(RuntimeError):  # noqa: N818
    """Two streams use the same memory, at least one of them writes to it, and nothing orders them. It is a
    `RuntimeError`, like a device's failures, so that code that waits for the device reports it."""


class Timeline:
    """The timeline of a stream, or of the host."""

    _numbers = count(1)

    def __init__(self, name: str = "") -> None:
        self.number = next(self._numbers)
        self.name = name or f"stream {self.number}"
        self.moment = 1
        """The moment of the next work."""
        self.seen: Seen = {}

    def mark(self) -> Seen:
        """Returns what is done once all work so far is done."""
        marked = self.seen | {self.number: self.moment}
        self.moment += 1
        return marked

    def follow(self, seen: Seen) -> None:
        """The next work comes after `seen`."""
        for number, moment in seen.items():
            if moment > self.seen.get(number, 0):
                self.seen[number] = moment


class Accesses:
    """The accesses to all memory of a device. `timeline` returns that of the calling thread's next launch, which comes
    after everything the host has waited for; None: the thread launches nothing, since it records a graph."""

    def __init__(self, host: Timeline, timeline: Callable[[], Timeline | None]) -> None:
        self._host = host
        self._timeline = timeline
        self._histories: dict[int, _History] = {}
        """The history of each storage."""
        self._timelines: dict[int, Timeline] = {}
        self.lock = threading.RLock()
        """`DeviceMemory` uses it, too. Re-entrant: a thread that holds it may free memory by collecting garbage."""
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
        """`places`: None for all of the tensor. `timeline`: who uses it, if not the current stream. Raises `Race`, also
        for memory that was freed too early since the last call."""
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
        """The host frees the storage. Raises nothing, since it is called from a finalizer."""
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
        """Raises `Race` if memory was freed too early."""
        with self.lock:
            if late := "; ".join(self._late):
                self._late.clear()
                raise _said(late)


class _History:
    """The accesses to one storage. The first few are kept as a list, since most memory is soon freed."""

    def __init__(self, num_bytes: int, owner: Timeline | None) -> None:
        self.owner = owner
        self.users: set[int] = set()
        self.last: dict[int, str] = {}
        """What each user last used it for."""
        self._num_granules = -(-num_bytes // GRANULE_BYTES)
        self._listed: list[tuple[Places, bool, int, int]] | None = []
        self._writer: NDArray[np.int32]
        self._written: NDArray[np.int32]
        self._read: dict[int, NDArray[np.int32]] = {}
        """When each user last read each granule. 0: never."""

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
        """The timeline with an earlier conflicting access that may not be done yet, if there is one."""
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
    """A `Race`, also printed, since a process may take the error for a peer's failure and go on."""
    print(f"{Race.__name__}: {what}", file=sys.stderr, flush=True)
    return Race(what)


def places_of(memory: torch.Tensor) -> Places:
    return _places(memory.shape, memory.stride(), memory.storage_offset(), memory.itemsize)


def places_of_rows(memory: torch.Tensor, rows: NDArray[np.int64]) -> Places:
    """`memory`: [row, …], contiguous"""
    row_len = memory[:1].numel()
    elements = memory.storage_offset() + rows[:, None] * row_len + np.arange(row_len)
    return places_of_elements(elements.reshape(-1), memory.itemsize)


def places_of_elements(elements: NDArray[np.int64], itemsize: int) -> Places:
    """`elements`: indices of items, from the beginning of a storage."""
    places = elements * itemsize // GRANULE_BYTES  # no item straddles two granules
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
