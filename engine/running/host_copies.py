"""Copies blocks between the KV pool and host memory, in parallel to the engine's steps.

Owns the host memory, a thread, and on a GPU a stream. `engine.scheduling.block_manager` decides which block is copied
where and who may use it: nobody writes or evicts a block that is being copied.

    stepping thread     begin ──────────────────────> take_done ──> end_copy …   wait, if there is nothing else to do
                          │ loads before saves             ^
    copying thread        └─> batch by batch ────────── done ── on_done
                              the next batch is launched before waiting for the previous one

A saved block was computed by a step whose tokens the host already has, and a loaded block is only read by steps
launched after the load. So no copy waits for a step, and no step for a copy.

Shapes: L layers, N blocks of the pool, H blocks in host memory, E elements of a block's layer, R rows: layers of
blocks.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.config import GIB, EngineConfig
from engine.kv_shape import KVCacheShape
from engine.memory import least_gib
from engine.scheduling.offloading import BlockCopy
from engine.to_device import to_device

COPIES_AT_ONCE = 16
"""Copies per batch. After each batch, new loads go before the remaining saves."""
LAUNCHED_AHEAD = 1
"""Batches in progress while another one is launched. Without this the bus would idle while the thread wakes up and
launches: half of the time on an H200."""
PIECE_BYTES = 256 << 20
"""Size of one allocation of host memory: torch rounds pinned allocations up to a power of two."""
EXIT_PATIENCE_S = 5.0
"""How long the process waits at its exit for copies in progress."""
STAGED_BYTES = 64 << 20
"""Device memory for the contiguous staging buffer, unless a single block is larger."""


def num_host_blocks(config: EngineConfig, shape: KVCacheShape) -> int:
    """How many blocks of each rank fit into host memory, which all ranks share equally. `shape`: of one rank's pool. 0:
    nothing is offloaded. Raises `ValueError` if there is not enough room for one block."""
    offloading_bytes = config.cache.kv_offloading_bytes
    block_bytes = config.parallel.tensor_parallel_size * shape.all_layers_bytes
    if 0 < offloading_bytes < block_bytes:
        raise ValueError(
            f"kv_offloading_size must be at least {least_gib(block_bytes)}, one block of all layers, is "
            f"{offloading_bytes / GIB:.3g}"
        )
    return offloading_bytes // block_bytes


class HostCopies:
    """`begin`, `take_done` and `wait` are called by the stepping thread, or by any thread of a process without one."""

    def __init__(self, pool: torch.Tensor, num_host_blocks: int) -> None:
        """`pool`: [layer, block, …], contiguous; must live as long as this object. Raises `ValueError` if the host has
        not enough memory."""
        self.num_blocks = num_host_blocks
        self._device = pool.device
        is_pinned = self._device.type != "cpu"
        self._num_ahead = LAUNCHED_AHEAD if is_pinned else 0
        pool_LNE = _as_words(pool)
        memory = _HostMemory(num_host_blocks, pool_LNE, is_pinned=is_pinned)
        self._copy: Callable[[list[BlockCopy]], None]
        """Launches copies, which must be all loads or all saves."""
        self._copy = _ByDevice(pool_LNE, memory) if is_pinned else _ByHost(pool_LNE, memory)
        self.on_done: Callable[[], object] = lambda: None
        """Called on the copying thread when `take_done` has something to return or to raise."""
        self._loads: deque[BlockCopy] = deque()
        self._saves: deque[BlockCopy] = deque()
        self._done: list[BlockCopy] = []
        self._num_open = 0
        """Copies that were begun and not yet returned by `take_done`."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._has_ended = False
        self._changed = threading.Condition()  # reentrant, since a finalizer may call `leave` on any thread
        self._thread = threading.Thread(target=self._run, name="host-copies", daemon=True)
        self._thread.start()
        _made.add(self)

    def begin(self, copies: Iterable[BlockCopy]) -> None:
        with self._changed:
            for copy in copies:
                (self._loads if copy.is_load else self._saves).append(copy)
                self._num_open += 1
            self._changed.notify_all()

    def take_done(self) -> list[BlockCopy]:
        """Return the copies finished since the last call. Raises what a copy raised; the pool's content is undefined
        then."""
        if not (self._num_open or self._error):
            return []
        with self._changed:
            if self._error is not None:
                raise self._error
            done, self._done = self._done, []
            self._num_open -= len(done)
        return done

    def wait(self) -> bool:
        """Wait until `take_done` has something to return. Returns False if no copy is in progress. Raises what a copy
        raised, and `RuntimeError` if the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error or not self._num_open or self._has_ended)
            if self._error is not None:
                raise self._error
            if self._num_open and not self._done:
                raise RuntimeError("nothing is copied to or from host memory any more: the process or the engine ends")
            return bool(self._num_open)

    def leave(self) -> None:
        """Let the thread end after its current copies, without waiting. Until then it keeps the memory."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after its current copies, and wait for that."""
        self.leave()
        self._thread.join()

    # -- this object's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            under_way: deque[tuple[list[BlockCopy], Callable[[], object]]] = deque()
            with torch.inference_mode(), self._beside_steps() as mark:
                while (copies := self._next(may_wait=not under_way)) or under_way:
                    if copies:
                        self._copy(copies)
                        under_way.append((copies, mark()))
                    if not copies or len(under_way) > self._num_ahead:
                        launched, wait_for_them = under_way.popleft()
                        wait_for_them()
                        self._tell(launched, None)
        except BaseException as error:
            self._tell([], error)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    @contextmanager
    def _beside_steps(self) -> Iterator[Callable[[], Callable[[], object]]]:
        """On a GPU, run on a stream of its own. Yields a function that marks the end of all copies launched so far, and
        returns a function that waits for that mark."""
        if self._device.type == "cpu":
            yield lambda: lambda: None
            return
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            try:
                yield _mark
            finally:
                stream.synchronize()  # after an error: no copy is in progress when the error is reported

    def _next(self, *, may_wait: bool) -> list[BlockCopy]:
        """Return the next batch. Empty if the thread must end, or if `may_wait` is False and nothing is queued."""
        with self._changed:
            if may_wait:
                self._changed.wait_for(lambda: self._loads or self._saves or self._is_closing)
            if self._is_closing:
                return []
            copies = self._loads or self._saves
            return [copies.popleft() for _ in range(min(COPIES_AT_ONCE, len(copies)))]

    def _tell(self, copies: list[BlockCopy], error: BaseException | None) -> None:
        with self._changed:
            self._done += copies
            self._error = self._error or error
            self._changed.notify_all()
        self.on_done()


_made: weakref.WeakSet[HostCopies] = weakref.WeakSet()
"""To be ended at exit: a thread that is inside torch when the interpreter exits aborts the process with SIGABRT."""


@atexit.register
def _end_all() -> None:
    for copies in list(_made):
        if copies._thread.is_alive():  # not in a forked child, which has no such thread but maybe its held locks
            copies.leave()
            copies._thread.join(EXIT_PATIENCE_S)


class _HostMemory:
    """The blocks in host memory, in pieces. Raises `ValueError` if the host has not enough memory."""

    def __init__(self, num_blocks: int, pool_LNE: torch.Tensor, *, is_pinned: bool) -> None:
        num_layers, _, size = pool_LNE.shape
        block_bytes = num_layers * size * pool_LNE.itemsize
        self._num_in_piece = most = max(1, PIECE_BYTES // block_bytes)
        nums_blocks = [min(most, num_blocks - first) for first in range(0, num_blocks, most)]
        try:
            self._pieces_HLE = [
                torch.empty((n, num_layers, size), dtype=pool_LNE.dtype, pin_memory=is_pinned) for n in nums_blocks
            ]
        except RuntimeError as error:
            raise ValueError(
                f"kv_offloading_size: the host has no {num_blocks * block_bytes / GIB:.1f} GiB for what one process is "
                f"to keep there: lower it ({str(error).splitlines()[0]})"
            ) from error

    def __getitem__(self, host_block_id: int) -> torch.Tensor:
        """[L, E]"""
        piece, number = divmod(host_block_id, self._num_in_piece)
        return self._pieces_HLE[piece][number]


class _ByHost:
    """Copies block by block with numpy: torch would split each copy among threads that compete with those of the
    steps."""

    def __init__(self, pool_LNE: torch.Tensor, memory: _HostMemory) -> None:
        self._pool_LNE: npt.NDArray[Any] = pool_LNE.numpy()
        self._memory = memory

    def __call__(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            on_host_LE, in_pool_LE = self._memory[copy.host_block_id].numpy(), self._pool_LNE[:, copy.block_id]
            if copy.is_load:
                np.copyto(in_pool_LE, on_host_LE)
            else:
                np.copyto(on_host_LE, in_pool_LE)


class _ByDevice:
    """Copies several blocks at once: one launch gathers their layers, which are spread over the pool, into a staging
    buffer, from which each block is one copy. Copying a block as a view across layers would take torch one launch for
    every 2 GiB that the view spans: in a large pool, one for each layer."""

    def __init__(self, pool_LNE: torch.Tensor, memory: _HostMemory) -> None:
        self._num_layers, self._num_blocks, size = pool_LNE.shape
        self._pool_RE = pool_LNE.flatten(0, 1)
        self._memory = memory
        self._num_at_once = max(1, STAGED_BYTES // (self._num_layers * size * pool_LNE.itemsize))

    def __call__(self, copies: list[BlockCopy]) -> None:
        for first in range(0, len(copies), self._num_at_once):
            self._copy(copies[first : first + self._num_at_once])

    def _copy(self, copies: list[BlockCopy]) -> None:
        block_ids = np.array([copy.block_id for copy in copies], dtype=np.int64)
        rows = block_ids[:, None] + np.arange(self._num_layers) * self._num_blocks
        rows_R = to_device(rows.reshape(-1), self._pool_RE.device)
        if copies[0].is_load:
            staged_RE = self._pool_RE.new_empty(rows.size, self._pool_RE.shape[1])
            for on_host_LE, block_LE in self._pairs(copies, staged_RE):
                block_LE.copy_(on_host_LE, non_blocking=True)
            self._pool_RE.index_copy_(0, rows_R, staged_RE)
        else:
            for on_host_LE, block_LE in self._pairs(copies, self._pool_RE.index_select(0, rows_R)):
                on_host_LE.copy_(block_LE, non_blocking=True)

    def _pairs(self, copies: list[BlockCopy], staged_RE: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for copy, block_LE in zip(copies, torch.split(staged_RE, self._num_layers), strict=True):
            yield self._memory[copy.host_block_id], block_LE


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """View the pool as [L, N, E] in the widest integers that divide a block's layer: gathering rows copies element by
    element."""
    bytes_LNE = pool.view(torch.uint8).flatten(2)
    return bytes_LNE.view(torch.int64) if bytes_LNE.shape[2] % 8 == 0 else bytes_LNE


def _mark() -> Callable[[], object]:
    """Record an event that is waited for asleep: a spinning thread would take a core and the stepping thread's time."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
