"""Copies blocks between the KV pool and host memory, beside the engine's steps.

Owns that memory, a thread, and on a GPU a stream. Which block goes where, and who may use it meanwhile, is decided
elsewhere (`engine.scheduling.block_manager`): a block that is on its way is neither written nor evicted by anybody.

    stepping thread     begin ──────────────> take_done ──> end_copy …           wait, where nothing else is to be done
                          │ loads before saves     ^
    this one's            └─> some at a time ── done ── on_done

What is saved was computed by steps whose tokens the host has; what is loaded, steps launched afterwards read. So no
copy waits for a step, and no step for a copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.config import GIB, EngineConfig
from engine.kv_cache import KVCacheShape, as_movable
from engine.scheduling.offloading import BlockCopy

COPIES_AT_ONCE = 16
"""Then the next loads come before the rest of the saves."""
PIECE_BYTES = 256 << 20
"""Of the host's memory, allocated at once: torch rounds what it pins up to a power of two."""


def num_host_blocks(config: EngineConfig, shape: KVCacheShape) -> int:
    """For how many host memory has room: for equally many on every rank, whose pool's shape this is. 0: nothing is
    offloaded. Raises `ValueError` where there is no room for one."""
    offloading_bytes = config.cache.kv_offloading_bytes
    block_bytes = config.parallel.tensor_parallel_size * shape.all_layers_bytes
    if 0 < offloading_bytes < block_bytes:
        raise ValueError(
            f"kv_offloading_size must be at least {block_bytes / GIB:.3g}, one block of all layers, is "
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
        pool_LNE = as_movable(pool).flatten(2)
        num_layers, _, size = pool_LNE.shape
        self._num_in_piece = max(1, PIECE_BYTES // (num_layers * size * pool.itemsize))
        pieces_HLE = self._allocate(pool_LNE, is_pinned=is_pinned)
        # On a CPU numpy's: torch would share a copy out among threads of its own, beside those of the steps.
        self._pool_LNE: Any = pool_LNE if is_pinned else _as_array(pool_LNE)
        self._pieces_HLE: list[Any] = pieces_HLE if is_pinned else [_as_array(piece) for piece in pieces_HLE]
        self._assign: Callable[[Any, Any], object] = _copy_late if is_pinned else np.copyto
        self.on_done: Callable[[], object] = lambda: None
        """Called on this object's thread, when there is something to be taken."""
        self._loads: deque[BlockCopy] = deque()
        self._saves: deque[BlockCopy] = deque()
        self._done: list[BlockCopy] = []
        self._num_open = 0
        """Begun, and not taken."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._changed = threading.Condition()  # a lock that its holder may take again: garbage is collected anywhere
        self._thread = threading.Thread(target=self._run, name="host-copies", daemon=True)
        self._thread.start()

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
        """Until there is something to be taken. False: nothing is under way. Raises as `take_done`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error or not self._num_open)
            if self._error is not None:
                raise self._error
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
            with torch.inference_mode(), self._beside_steps() as wait_for_copies:
                while copies := self._next():
                    for copy in copies:
                        self._copy(copy)
                    wait_for_copies()
                    self._tell(copies, None)
        except BaseException as error:
            self._tell([], error)

    @contextmanager
    def _beside_steps(self) -> Iterator[Callable[[], object]]:
        """Gives what waits for the copies that were launched within."""
        if self._device.type == "cpu":
            yield lambda: None
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            yield _wait_asleep

    def _next(self) -> list[BlockCopy]:
        """Empty: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._saves or self._is_closing)
            if self._is_closing:
                return []
            copies = self._loads or self._saves
            return [copies.popleft() for _ in range(min(COPIES_AT_ONCE, len(copies)))]

    def _copy(self, copy: BlockCopy) -> None:
        piece, number = divmod(copy.host_block_id, self._num_in_piece)
        on_host_LE = self._pieces_HLE[piece][number]
        in_pool_LE = self._pool_LNE[:, copy.block_id]
        if copy.is_load:
            self._assign(in_pool_LE, on_host_LE)
        else:
            self._assign(on_host_LE, in_pool_LE)

    def _tell(self, copies: list[BlockCopy], error: BaseException | None) -> None:
        with self._changed:
            self._done += copies
            self._error = self._error or error
            self._changed.notify_all()
        self.on_done()


def _as_array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()


def _wait_asleep() -> None:
    """For what this thread has launched. A thread that spins would take a core, and the stepping thread's time."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()


def _copy_late(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
