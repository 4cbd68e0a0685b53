"""Copies blocks between pools and host memory on several GPUs: each rank's process copies its own part of a block.

    rank 0's RankCopies: begin ──copies──> follow_copies: begin          (and HostCopies on both, of its own pool)
              take_done <── done on all ──┬── done here
                                          └──────copies───── done there

Owns the threads that receive. Copies have a connection of their own, besides that of the steps, so that a rank handles
copies while it launches a step. Each end has a thread that only receives, so that two ends never wait for each other.

Copies need no more synchronization than on one GPU. Saves: rank 0 has the tokens of the steps that computed the block,
and these steps' sums ended on no device before every rank's device had done its earlier writes. Loads: when rank 0
learns that a load is done, the block is on every rank's device, and steps that read it are sent afterwards.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

import numpy as np
import torch

from engine.running.executor import RankLost
from engine.running.host_copies import HostCopies
from engine.scheduling.offloading import BlockCopy
from engine.tensor_parallel.rank_watch import LOST

LEFT = b"left"


class RankCopies(HostCopies):
    """Rank 0's end: a copy is done when every rank has done it. Raises `RankLost` if a rank has ended."""

    def __init__(
        self, pool: torch.Tensor, num_host_blocks: int, connections: Sequence[Connection[bytes, bytes]]
    ) -> None:
        """`connections`: to `follow_copies` on all other ranks."""
        self._connections = connections
        self._nums_missing: dict[BlockCopy, int] = {}
        """By copy in progress: how many ranks have not done it."""
        self._wakes, self._woken = Pipe()
        super().__init__(pool, num_host_blocks)
        self._reader = threading.Thread(target=self._read, name="rank-copies", daemon=True)
        self._reader.start()

    def begin(self, copies: Iterable[BlockCopy]) -> None:
        copies = list(copies)
        with self._changed:
            self._nums_missing |= dict.fromkeys(copies, 1 + len(self._connections))
        super().begin(copies)
        try:
            for connection in self._connections:
                connection.send_bytes(_to_bytes(copies))
        except OSError as error:
            raise RankLost(LOST) from error

    def leave(self) -> None:
        # Send a message instead of closing: a forked process may hold this end, too.
        self._wakes.send_bytes(LEFT)
        super().leave()

    def close(self) -> None:
        super().close()
        self._reader.join()

    def _tell(self, copies: list[BlockCopy], error: BaseException | None) -> None:
        """Record copies that one rank has done. Called on any thread."""
        with self._changed:
            done = [copy for copy in copies if self._is_last(copy)]
        if done or error:
            super()._tell(done, error)

    def _is_last(self, copy: BlockCopy) -> bool:
        self._nums_missing[copy] -= 1
        if self._nums_missing[copy]:
            return False
        del self._nums_missing[copy]
        return True

    def _read(self) -> None:
        try:
            while self._woken not in (ready := wait([self._woken, *self._connections])):
                for connection in ready:
                    assert isinstance(connection, Connection)
                    self._tell(_from_bytes(connection.recv_bytes()), None)
        except (EOFError, OSError):
            self._tell([], RankLost(LOST))
        except BaseException as error:
            self._tell([], error)


def follow_copies(copies: HostCopies, connection: Connection[bytes, bytes]) -> None:
    """On another rank: from now on, repeat the copies that rank 0 begins. If a copy fails, this process ends."""

    def tell() -> None:
        try:
            done = copies.take_done()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # rank 0 notices that
        with suppress(OSError):  # rank 0 has ended, and this process ends, too
            connection.send_bytes(_to_bytes(done))

    def follow() -> None:
        with suppress(EOFError, OSError):
            while True:
                copies.begin(_from_bytes(connection.recv_bytes()))

    copies.on_done = tell
    tell()  # ends the process if the copying thread has failed already
    threading.Thread(target=follow, name="rank-copies", daemon=True).start()


def _to_bytes(copies: list[BlockCopy]) -> bytes:
    return np.array(copies, dtype=np.int64).tobytes()


def _from_bytes(message: bytes) -> list[BlockCopy]:
    numbers = np.frombuffer(message, dtype=np.int64).reshape(-1, len(BlockCopy._fields)).tolist()
    return [BlockCopy(bool(is_load), block_id, host_block_id) for is_load, block_id, host_block_id in numbers]
