"""Order on the pretended GPU: streams, events, graphs, and where the host waits.

A launch is computed at once. The host sees its effects as late as a GPU may make them: a copy to the host arrives when
the host waits for it or for something launched after it on its stream, and is rubbish until then; an event is done when
the host has waited for it, or for a later one. Host memory that is being copied must not change until then.

The order of the work is recorded for `races.py`, which finds unordered accesses.

A graph is the list of the launches during its recording. It has no values before its first replay; it shares the memory
that it allocated with all other graphs of its pool, and any replay of theirs turns that into rubbish.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pretend_gpu.devices import current, of_process, used
from pretend_gpu.memory import DeviceMemory, storage_of
from pretend_gpu.races import Seen, Timeline

Action = Callable[[], object]
_ANY = object()
"""Device of the default stream, which exists before the process has a device."""


class _Here(threading.local):
    """The state of each thread."""

    why_not_wait = ""
    stream: Stream | None = None
    graph: Graph | None = None


_here = _Here()
host = Timeline("the host")
"""One timeline for all its threads."""


def wait(what: str) -> None:
    """Called wherever the host waits for the device. Raises `RuntimeError` if it must not wait now."""
    if _here.why_not_wait:
        raise RuntimeError(f"{what}: {_here.why_not_wait}")


@contextmanager
def without_waiting(why_not: str = "the host waits for the device") -> Iterator[None]:
    """This thread must not wait for the device."""
    before, _here.why_not_wait = _here.why_not_wait, why_not
    try:
        yield
    finally:
        _here.why_not_wait = before


class Stream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        del priority
        if device is not _ANY:
            used(device)
        self._num_launched = 0
        self._num_done = 0
        self._late: deque[tuple[int, Action]] = deque()
        self._lock = threading.RLock()
        self.timeline = Timeline("the default stream" if device is _ANY else "")
        _streams.add(self)
        _timelines.append(self.timeline)

    @property
    def device(self) -> torch.device:
        return of_process()

    def later(self, action: Action) -> int:
        """Postpones `action` until the host waits for it, or for a later launch. Returns its number."""
        with self._lock:
            self._num_launched += 1
            self._late.append((self._num_launched, action))
            return self._num_launched

    def finish(self, number: int | None = None) -> None:
        """Finishes everything up to `number`; None: everything."""
        with self._lock:
            number = self._num_launched if number is None else number
            while self._late and self._late[0][0] <= number:
                self._late.popleft()[1]()
            self._num_done = max(self._num_done, number)

    def is_done(self, number: int) -> bool:
        return self._num_done >= number

    def synchronize(self) -> None:
        wait("Stream.synchronize")
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """The host waits for everything on this stream."""
        self.finish()
        host.follow(self.timeline.mark())

    def wait_event(self, event: Event) -> None:
        self.later(event.finish)
        self.timeline.follow(event.seen)

    def wait_stream(self, other: Stream) -> None:
        number = other.later(_nothing)
        self.later(lambda: other.finish(number))
        self.timeline.follow(other.timeline.mark())

    def launching(self) -> Timeline:
        """The timeline for the next launch, which comes after everything the host has waited for."""
        self.timeline.follow(host.seen)
        return self.timeline


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_timelines: list[Timeline] = []
"""Includes those of freed streams: their launches go on."""
_default_stream = Stream(_ANY)


def current_stream(device: object = None) -> Stream:
    used(device)
    return _here.stream or _default_stream


@contextmanager
def stream_context(stream: Stream) -> Iterator[None]:
    """`torch.cuda.stream`"""
    before, _here.stream = _here.stream, stream
    try:
        with current(stream.device):
            yield
    finally:
        _here.stream = before


def synchronize(device: object = None) -> None:
    used(device)
    wait("torch.cuda.synchronize")
    for stream in list(_streams):
        stream.finish()
    for timeline in _timelines:
        host.follow(timeline.mark())


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del enable_timing, blocking, interprocess
        self._at: tuple[Stream, int] | None = None
        self.seen: Seen = {}
        """What is done once the event is."""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._at = stream, stream.later(_nothing)
        self.seen = stream.launching().mark()

    def finish(self) -> None:
        if self._at is not None:
            stream, number = self._at
            stream.finish(number)

    def query(self) -> bool:
        return self._at is None or self._at[0].is_done(self._at[1])

    def synchronize(self) -> None:
        wait("Event.synchronize")
        self.finish()
        host.follow(self.seen)

    def elapsed_time(self, other: Event) -> float:
        """Nothing is timed here: returns some time, so that measuring loops end."""
        del other
        return 10.0


class Graph:
    """`torch.cuda.CUDAGraph`"""

    def __init__(self) -> None:
        self._launches: list[Action] = []
        self._reads: list[torch.Tensor] = []
        self._own: dict[int, torch.Tensor] = {}
        """The memory that it allocated, by storage."""
        self._pool: list[Graph] = []
        self._memory: DeviceMemory | None = None

    def launch(self, action: Action, touched: list[torch.Tensor], allocated: list[torch.Tensor]) -> None:
        """Adds a launch while the graph is recorded."""
        self._launches.append(action)
        self._own |= {storage_of(memory): memory for memory in allocated}
        self._reads += [memory for memory in touched if storage_of(memory) not in self._own]

    def end_recording(self, pool: list[Graph], memory: DeviceMemory) -> None:
        pool.append(self)
        self._pool, self._memory = pool, memory
        self._spoil(memory)

    def replay(self) -> None:
        assert self._memory is not None, "nothing is recorded"
        for memory in self._reads:
            assert self._memory.is_held(memory), f"a graph uses memory that was let go: {tuple(memory.shape)}"
        for other in self._pool:
            other._spoil(self._memory)
        for launch in self._launches:
            launch()

    def _spoil(self, device: DeviceMemory) -> None:
        for memory in self._own.values():
            device.spoil(memory)


def current_graph() -> Graph | None:
    """The graph that this thread records."""
    return _here.graph


@contextmanager
def recording(graph: Graph, pool: list[Graph], memory: DeviceMemory) -> Iterator[None]:
    synchronize()
    assert _here.graph is None, "a graph within a graph"
    _here.graph = graph
    try:
        with without_waiting("operation not permitted when stream is capturing"):
            yield
    finally:
        _here.graph = None
    graph.end_recording(pool, memory)


def _nothing() -> None:
    pass
