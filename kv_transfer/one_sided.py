"""Pushes that write into the receiver's memory, unseen by it: what all one-sided transports have in common.

    open    Push stream: chunk without blocks ──> receiver attaches ──> initial metadata   nothing is written before
    write   a `Writer` (the transport's thread) copies blocks into the receiver's pool
    end     second chunk without blocks ──> receiver detaches                              nothing is written after

The receiver cannot refuse a write, so the sender must respect the rules: it writes only to blocks of a grant that is
attached, stops when its stream breaks, and says that it is done only when nothing is under way any more. After a failed
write something may still be under way: no network says what it will still deliver. Then the stream is broken off, and
the receiver waits for a lease.

A process that stands still (stopped, swapped out) notices nothing, and continues its writes where it left them, while
the receiver frees the blocks one lease after the stream broke. So a push beats on the event loop, and writes no more
once its last beat is three quarters of a lease ago by its own clock, whatever it knows of its stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grpc

from kv_transfer.base import ATTACHED
from kv_transfer.control_link import ControlLink
from kv_transfer.errors import InvalidTransfer, PeerUnreachable, TransferError, errors_of_peer
from kv_transfer.pool import KVPool
from kv_transfer.transfer import Terms, Transfer
from protos import tandem_kv_transfer_pb2 as pb

MAX_TRANSFER_BYTES = {"DRAM": 4 << 20, "VRAM": 64 << 20}
"""In one `Transfer`, by the sender's memory: where the host copies, it looks for an end this often."""
STANDSTILL = 0.75
"""Part of a lease without a beat after which a push is over. The rest is for writes that were begun just before."""
BEATS_PER_LEASE = 8


class Writer(Protocol):
    """A transport's thread that writes."""

    def post(self, transfer: Transfer) -> None:
        """Take it on. Never blocks."""


class OneSidedWriter:
    """One push: a stream that says when we write, and transfers on the writer's thread."""

    def __init__(self, link: ControlLink, writer: Writer, remote: Any, grant: pb.Grant, pool: KVPool) -> None:
        self._link = link
        self._writer = writer
        self._grant = grant
        self._lease_s = grant.lease_ms / 1000
        self._terms = Terms(
            remote=remote,
            is_cancelled=self._must_not_write,
            late_at_s=self._late_at_s,
            on_end=self._report_end,
            patience_s=self._lease_s,
        )
        self._max_blocks = max(1, MAX_TRANSFER_BYTES[pool.memory] // pool.layout.block_bytes)
        self._loop = asyncio.get_running_loop()
        self._stream: grpc.aio.StreamUnaryCall[pb.PushChunk, pb.PushSummary] | None = None
        self._last_blocks: tuple[Sequence[int], Sequence[int]] = ((), ())
        """Ours and theirs, posted last: those of other layers are the same objects."""
        self._last_pieces: list[tuple[Sequence[int], Sequence[int]]] = []
        self._num_outstanding = 0
        self._has_none_outstanding = asyncio.Event()
        self._has_none_outstanding.set()
        self._untold: deque[tuple[int, TransferError | None]] = deque()
        """How many transfers ended, and how, that the event loop has not heard of."""
        self._will_hear = False
        self._is_stopped = False
        self.may_still_write = False
        self._stood_still = False
        self._beat_s = time.monotonic()
        self._next_beat: asyncio.TimerHandle | None = None
        self._error: TransferError | None = None

    async def start(self) -> None:
        # Beats begin before the receiver can count from anything that it hears of us.
        self._beat_s = time.monotonic()
        self._beat()
        try:
            # A stream that is closed just now is never told so by grpc.aio, and would wait for ever.
            async with asyncio.timeout(self._lease_s):
                await self._attach()
        except TimeoutError:
            raise PeerUnreachable(
                f"worker {self._grant.worker_id} let no push in for a lease of {self._grant.lease_ms} ms"
            ) from None
        self._note_standstill()
        if self._error is not None:
            raise self._error

    async def _attach(self) -> None:
        with errors_of_peer():
            self._stream = self._link.stub.Push()
            await self._stream.write(self._bare_chunk())
            metadata = await self._stream.initial_metadata()
            if ATTACHED not in tuple(metadata or ()):
                await self._stream
                raise InvalidTransfer("the receiver let a one-sided push in without attaching it")

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        assert self._stream is not None
        if self._stream.done() and self._error is None:
            # The receiver thinks that we are gone: what we wrote now could hit the blocks' next owner.
            self._error = PeerUnreachable(f"the push stream to worker {self._grant.worker_id} broke")
        self._note_standstill()
        if self._error is not None or self._is_stopped:
            return
        blocks = src_block_ids, dst_block_ids
        if blocks != self._last_blocks:
            self._last_blocks, self._last_pieces = blocks, list(self._pieces(*blocks))
        for src_ids, dst_ids in self._last_pieces:
            self._num_outstanding += 1
            self._has_none_outstanding.clear()
            self._writer.post(Transfer(self._terms, layer, src_ids, dst_ids))

    def _pieces(
        self, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for start in range(0, len(src_block_ids), self._max_blocks):
            end = start + self._max_blocks
            yield src_block_ids[start:end], dst_block_ids[start:end]

    async def drain(self) -> None:
        await self._has_none_outstanding.wait()
        self._note_standstill()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        self._is_stopped = True
        if self._next_beat is not None:
            self._next_beat.cancel()
        await self._has_none_outstanding.wait()

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self.may_still_write:
            stream.cancel()
            return
        try:
            async with asyncio.timeout(self._lease_s):
                with errors_of_peer():
                    await stream.write(self._bare_chunk())
                    await stream.done_writing()
                    await stream
        except (TransferError, TimeoutError):
            pass  # the stream broke before: the receiver waits for Abandon, or until we have been gone for one lease
        finally:
            stream.cancel()

    def _beat(self) -> None:
        if not self._has_stood_still() and not self._is_stopped:
            self._beat_s = time.monotonic()
            self._next_beat = self._loop.call_later(self._lease_s / BEATS_PER_LEASE, self._beat)

    def _must_not_write(self) -> bool:
        """On any thread."""
        stream = self._stream
        is_over = self._is_stopped or self._error is not None or stream is None or stream.done()
        return self._has_stood_still() or is_over

    def _has_stood_still(self) -> bool:
        """On any thread. True once is true for ever."""
        if time.monotonic() - self._beat_s > STANDSTILL * self._lease_s:
            self._stood_still = True
        return self._stood_still

    def _late_at_s(self) -> float:
        """On any thread. Of a process that stands still in between, it is the clock of whoever writes that tells."""
        return -math.inf if self._has_stood_still() else self._beat_s + STANDSTILL * self._lease_s

    def _note_standstill(self) -> None:
        if self._has_stood_still() and self._error is None:
            self._error = PeerUnreachable(
                f"this worker stood still for more than {STANDSTILL:g} of a lease of {self._grant.lease_ms} ms: worker "
                f"{self._grant.worker_id} may take it for dead"
            )

    def _report_end(self, num_transfers: int, error: TransferError | None) -> None:
        """On the writer's thread. To wake the event loop takes longer than a write: once for all ends it has not heard
        of yet."""
        self._untold.append((num_transfers, error))
        if not self._will_hear:
            self._will_hear = True
            self._loop.call_soon_threadsafe(self._hear_ends)

    def _hear_ends(self) -> None:
        self._will_hear = False  # first: what is appended from here on wakes the loop again
        while self._untold:
            num_transfers, error = self._untold.popleft()
            if error is not None:
                self._error = self._error or error
                self.may_still_write = True
                self._link.is_broken = True
            self._num_outstanding -= num_transfers
        if self._num_outstanding == 0:
            self._has_none_outstanding.set()

    def _bare_chunk(self) -> pb.PushChunk:
        grant = self._grant
        return pb.PushChunk(grant_id=grant.grant_id, epoch=grant.epoch, incarnation=grant.incarnation)
