"""Copies blocks into peers' pools that this process has opened, on its own thread.

Owns the thread and the opened pools. The event loop is never blocked: it queues calls and gets futures or callbacks.

    waiting ──(copies into one peer's pool together)──> in progress, in order ──done──> on_end
        └──── cancelled, or the agent or the pool is closed ────────────────────────> on_end

If the host copies, a copy is done when its begin returns. A device or a network gets the next copies while it still
works on earlier ones. A copy that does not end delays the others until its time is up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from kv_transfer.base import MAX_BYTES_IN_FLIGHT
from kv_transfer.errors import PeerUnreachable, TransferError
from kv_transfer.pool import Copying, KVPool, PeerPool, Rows
from kv_transfer.transfer import Transfer, queue_call

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenedPool:
    """A peer's pool, and the number of unfinished transfers to it."""

    pool: PeerPool
    num_blocks: int
    num_transfers: int = 0
    is_released: bool = False


class CopyAgent:
    """`close` must be called."""

    def __init__(self, pool: KVPool, max_vram_bytes_at_once: int) -> None:
        """`max_vram_bytes_at_once`: limit of one copy that combines several transfers from a GPU's memory. A host
        copies transfers one by one, so that a late one ends alone."""
        self._pool = pool
        self._block_bytes = pool.layout.block_bytes
        self._max_bytes_at_once = max_vram_bytes_at_once if pool.memory == "VRAM" else 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Transfer] = deque()
        self._under_way: deque[tuple[list[Transfer], int, Copying]] = deque()
        self._num_bytes_under_way = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-copy", daemon=True)
        self._thread.start()

    def open(self, open_peer: Callable[[], PeerPool], num_blocks: int) -> Future[OpenedPool]:
        """Call `open_peer` on the agent's thread to open a pool with `num_blocks` blocks. The future gets what it
        returns or raises; in any case, `release` the future once."""
        return queue_call(lambda: OpenedPool(open_peer(), num_blocks), self._calls.put)

    def release(self, opening: Future[OpenedPool]) -> None:
        """Close the pool once no copy to it is in progress; queued transfers to it fail."""
        self._calls.put(lambda: self._release(opening))

    def post(self, transfer: Transfer) -> None:
        """Queue a transfer whose `terms.remote` is an `OpenedPool`. Never blocks. This agent gives up no copy that has
        begun: a host's copy takes microseconds, a device that hangs ends the engine's process, and NIXL's agents give
        up late writes themselves."""
        self._calls.put(partial(self._take, transfer))

    def close(self) -> None:
        """Begin no more copies, and return when those in progress have ended. The caller has released all pools."""
        self._calls.put(self._begin_to_close)
        self._thread.join()

    # -- on the agent's thread --

    def _run(self) -> None:
        try:
            self._pool.bind_thread()
        except Exception:  # a device error: later uses of the device fail, too, and report it to their callers
            logger.exception("the thread of copies has no device")
        while not self._is_closing or self._under_way:
            if not self._waiting and not self._under_way:
                self._calls.get()()
            while not self._calls.empty():
                self._calls.get()()
            if self._waiting and self._num_bytes_under_way < MAX_BYTES_IN_FLIGHT[self._pool.memory]:
                self._begin_next()
            elif self._under_way:
                self._finish_oldest()

    def _take(self, transfer: Transfer) -> None:
        opened: OpenedPool = transfer.terms.remote
        opened.num_transfers += 1
        self._waiting.append(transfer)
        if self._is_closing:
            self._fail_waiting()

    def _begin_next(self) -> None:
        wanted = self._pop_wanted()
        if not wanted:
            return
        try:
            copying = self._begin(wanted)
        except Exception as error:
            # Nobody waits for this thread; the transfers' owners get the error.
            logger.exception("a copy into a peer's memory failed")
            self._end(wanted, PeerUnreachable(f"a copy into its memory failed: {error}"))
            return
        num_bytes = sum([len(transfer.dst_block_ids) for transfer in wanted]) * self._block_bytes
        self._num_bytes_under_way += num_bytes
        self._under_way.append((wanted, num_bytes, copying))

    def _begin(self, transfers: list[Transfer]) -> Copying:
        """Begin to copy transfers, all to the same pool."""
        opened: OpenedPool = transfers[0].terms.remote
        rows_2R = rows_of(transfers, self._pool.layout.num_blocks, opened.num_blocks)
        of_pushes = {transfer.terms for transfer in transfers}
        given_up_s = time.monotonic() + min(terms.patience_s for terms in of_pushes)
        return opened.pool.copy(rows_2R, lambda: min(given_up_s, *(terms.late_at_s() for terms in of_pushes)))

    def _pop_wanted(self) -> list[Transfer]:
        """Pop the first waiting transfer, and as many to the same pool as one copy takes. Ends cancelled transfers.
        Empty if all were cancelled."""
        wanted: list[Transfer] = []
        num_bytes = 0
        while self._waiting:
            transfer = self._waiting[0]
            if transfer.terms.is_cancelled():
                self._end([self._waiting.popleft()], None)
                continue
            num_bytes += len(transfer.dst_block_ids) * self._block_bytes
            if wanted and (transfer.terms.remote is not wanted[0].terms.remote or num_bytes > self._max_bytes_at_once):
                break
            wanted.append(self._waiting.popleft())
        return wanted

    def _finish_oldest(self) -> None:
        transfers, num_bytes, copying = self._under_way.popleft()
        error = None
        try:
            copying.synchronize()
        except Exception as failure:
            logger.exception("a copy into a peer's memory failed")
            error = PeerUnreachable(f"a copy into its memory failed: {failure}")
        self._num_bytes_under_way -= num_bytes
        self._end(transfers, error)

    def _end(self, transfers: list[Transfer], error: TransferError | None) -> None:
        for terms, num_transfers in Counter(transfer.terms for transfer in transfers).items():
            opened: OpenedPool = terms.remote
            opened.num_transfers -= num_transfers
            self._close_if_unused(opened)
            terms.on_end(num_transfers, error)

    def _release(self, opening: Future[OpenedPool]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            return  # it was never opened
        opened = opening.result()
        opened.is_released = True
        of_it = [transfer for transfer in self._waiting if transfer.terms.remote is opened]
        self._waiting = deque(transfer for transfer in self._waiting if transfer.terms.remote is not opened)
        if of_it:
            self._end(of_it, PeerUnreachable("the connection was closed"))
        else:
            self._close_if_unused(opened)

    def _close_if_unused(self, opened: OpenedPool) -> None:
        if not opened.is_released or opened.num_transfers:
            return
        try:
            opened.pool.close()
        except Exception:
            logger.exception("a peer's memory cannot be closed")

    def _begin_to_close(self) -> None:
        self._is_closing = True
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting, self._waiting = list(self._waiting), deque()
        self._end(waiting, PeerUnreachable("this worker is shutting down"))


def rows_of(transfers: Sequence[Transfer], num_src_blocks: int, num_dst_blocks: int) -> Rows:
    """The transfers' rows, in any order. All layers of a prompt have the same block lists, as the same objects, which
    are converted once: to make 64 arrays of 512 numbers takes a millisecond. Layers of several prompts alternate."""
    of_blocks: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        of_blocks.setdefault((id(transfer.src_block_ids), id(transfer.dst_block_ids)), []).append(transfer)
    num_blocks_211 = np.array([[[num_src_blocks]], [[num_dst_blocks]]])
    parts: list[Rows] = []
    for alike in of_blocks.values():
        blocks = alike[0].src_block_ids, alike[0].dst_block_ids
        assert len(blocks[0]) == len(blocks[1])
        layers_L1 = np.array([transfer.layer for transfer in alike])[:, None]
        blocks_21B = np.array(blocks)[:, None, :]
        parts.append((layers_L1 * num_blocks_211 + blocks_21B).reshape(2, -1))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
