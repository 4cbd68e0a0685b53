"""Copies blocks between the KV pool and host memory, beside the engine's steps.

Owns that memory, a thread, and on a GPU a stream. Which block goes where, and who may use it meanwhile, is decided
elsewhere (`engine.scheduling.block_manager`): a block that is on its way is neither written nor evicted by anybody.

    stepping thread     begin ──────────────────────> take_done ──> end_copy …   wait, where nothing else is to be done
                          │ loads before saves             ^
    this one's            └─> some at a time, of which ── done ── on_done
                              the next are launched before the last are waited for

What is saved was computed by steps whose tokens the host has; what is loaded, steps launched afterwards read. So no
copy waits for a step, and no step for a copy.

Shapes: L layers, N blocks of the pool, H of the host's memory, E numbers of a block's layer, R rows: layers of blocks.
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
from engine.kv_cache import KVCacheShape
from engine.memory import least_gib
from engine.scheduling.offloading import BlockCopy
from engine.to_device import to_device

COPIES_AT_ONCE = 16
"""Then the next loads come before the rest of the saves."""
LAUNCHED_AHEAD = 1
"""Batches of so many that are on their way while another is launched: or the bus idles for what a launch, and waking up
from a wait, take. On an H200 that was half of the time."""
PIECE_BYTES = 256 << 20
"""Of the host's memory, allocated at once: torch rounds what it pins up to a power of two."""
EXIT_PATIENCE_S = 5.0
"""For what is being copied when the process ends."""
STAGED_BYTES = 64 << 20
"""Of a device's memory, that blocks on their way lie in side by side, unless one block has more."""


def num_host_blocks(config: EngineConfig, shape: KVCacheShape) -> int:
    """For how many host memory has room: for equally many on every rank, whose pool's shape this is. 0: nothing is
    offloaded. Raises `ValueError` where there is no room for one."""
    offloading_bytes = config.cache.kv_offloading_bytes
    block_bytes = config.parallel.tensor_parallel_size * shape.all_layers_bytes
    if 0 < offloading_bytes < block_bytes:
        raise ValueError(
            f"kv_offloading_size must be at least {least_gib(block_bytes)}, one block of all layers, is "
            f"{offloading_bytes / GIB:.3g}"
        )
    return offloading_bytes // block_bytes


class HostCopies:
    """`begin`, `take_done` and `wait` are the stepping thread's where there is one, and may be any thread's."""

    def __init__(self, pool: torch.Tensor, num_host_blocks: int) -> None:
        """`pool`: [layer, block, …], contiguous, as long as this object lives. Raises `ValueError` where there is not
        so much memory."""
        self.num_blocks = num_host_blocks
        self._device = pool.device
        is_pinned = self._device.type != "cpu"
        self._num_ahead = LAUNCHED_AHEAD if is_pinned else 0
        pool_LNE = _as_words(pool)
        num_layers, _, size = pool_LNE.shape
        self._num_in_piece = max(1, PIECE_BYTES // (num_layers * size * pool_LNE.itemsize))
        pieces_HLE = self._allocate(pool_LNE, is_pinned=is_pinned)
        self._copy: Callable[[list[BlockCopy]], None]
        """Begins copies, which are all loads, or all saves."""
        if is_pinned:
            self._copy = _ByDevice(pool_LNE, self._num_in_piece, pieces_HLE)
        else:
            self._copy = _ByHost(pool_LNE, self._num_in_piece, pieces_HLE)
        self.on_done: Callable[[], object] = lambda: None
        """Called on this object's thread, when there is something to be taken."""
        self._loads: deque[BlockCopy] = deque()
        self._saves: deque[BlockCopy] = deque()
        self._done: list[BlockCopy] = []
        self._num_open = 0
        """Begun, and not taken."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._has_ended = False
        self._changed = threading.Condition()  # a lock that its holder may take again: garbage is collected anywhere
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
        """Those that were done since the last call. Raises what a copy raised: the pool may be anything then."""
        if not (self._num_open or self._error):
            return []
        with self._changed:
            if self._error is not None:
                raise self._error
            done, self._done = self._done, []
            self._num_open -= len(done)
        return done

    def wait(self) -> bool:
        """Until there is something to be taken. False: nothing is under way. Raises as `take_done`, and where
        the thread has ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error or not self._num_open or self._has_ended)
            if self._error is not None:
                raise self._error
            if self._num_open and not self._done:
                raise RuntimeError("nothing is copied to or from host memory any more: the process or the engine ends")
            return bool(self._num_open)

    def leave(self) -> None:
        """The thread is to end after what it copies now; nobody waits for that, and it has the memory until then."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """The thread ends after what it copies now."""
        self.leave()
        self._thread.join()

    def _allocate(self, pool_LNE: torch.Tensor, *, is_pinned: bool) -> list[torch.Tensor]:
        num_layers, _, size = pool_LNE.shape
        firsts = range(0, self.num_blocks, self._num_in_piece)
        nums_blocks = [min(self._num_in_piece, self.num_blocks - first) for first in firsts]
        try:
            return [torch.empty((n, num_layers, size), dtype=pool_LNE.dtype, pin_memory=is_pinned) for n in nums_blocks]
        except RuntimeError as error:
            size_gib = self.num_blocks * num_layers * size * pool_LNE.itemsize / GIB
            raise ValueError(
                f"kv_offloading_size: the host has no {size_gib:.1f} GiB for what one process is to keep there: lower "
                f"it ({str(error).splitlines()[0]})"
            ) from error

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
        """Gives what marks the place behind all copies launched so far, and is given what waits for it."""
        if self._device.type == "cpu":
            yield lambda: lambda: None
            return
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            try:
                yield _mark
            finally:
                stream.synchronize()  # where something went wrong: nothing is under way when that is heard of

    def _next(self, *, may_wait: bool) -> list[BlockCopy]:
        """Empty: the end, or, where it may not wait, that there is nothing to be done now."""
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
"""A thread that is within torch when the interpreter ends takes the process down with SIGABRT."""


@atexit.register
def _end_all() -> None:
    for copies in list(_made):
        if copies._thread.is_alive():  # not after a fork, which leaves locks as they are
            copies.leave()
            copies._thread.join(EXIT_PATIENCE_S)


class _ByHost:
    """Block by block: numpy's copies, as torch would share one out among threads of its own, beside those of the
    steps."""

    def __init__(self, pool_LNE: torch.Tensor, num_in_piece: int, pieces_HLE: list[torch.Tensor]) -> None:
        self._pool_LNE: npt.NDArray[Any] = pool_LNE.numpy()
        self._num_in_piece = num_in_piece
        self._pieces_HLE: list[npt.NDArray[Any]] = [piece.numpy() for piece in pieces_HLE]

    def __call__(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            piece, number = divmod(copy.host_block_id, self._num_in_piece)
            on_host_LE, in_pool_LE = self._pieces_HLE[piece][number], self._pool_LNE[:, copy.block_id]
            if copy.is_load:
                np.copyto(in_pool_LE, on_host_LE)
            else:
                np.copyto(on_host_LE, in_pool_LE)


class _ByDevice:
    """Some blocks at once: their layers, which lie all over the pool, are put side by side by one launch, and from
    there each block is one copy. As a view across layers a block would take torch a launch for every 2 GiB that it
    reaches over: of a large pool one for each layer."""

    def __init__(self, pool_LNE: torch.Tensor, num_in_piece: int, pieces_HLE: list[torch.Tensor]) -> None:
        self._num_layers, self._num_blocks, size = pool_LNE.shape
        self._pool_RE = pool_LNE.flatten(0, 1)
        self._num_in_piece = num_in_piece
        self._pieces_HLE = pieces_HLE
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
            piece, number = divmod(copy.host_block_id, self._num_in_piece)
            yield self._pieces_HLE[piece][number], block_LE


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """[L, N, E], the same memory in integers as wide as a block's layer is made of: rows are picked number by
    number."""
    bytes_LNE = pool.view(torch.uint8).flatten(2)
    return bytes_LNE.view(torch.int64) if bytes_LNE.shape[2] % 8 == 0 else bytes_LNE


def _mark() -> Callable[[], object]:
    """Waiting is done asleep: a thread that spins would take a core, and the stepping thread's time."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
