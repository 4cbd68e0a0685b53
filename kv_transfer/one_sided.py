"""One-sided pushes, which write into the receiver's memory without its involvement: the common part of such transports.

    open    Push stream: chunk without blocks ──> receiver attaches ──> initial metadata   nothing is written before
    write   a `Writer` (the transport's thread) copies blocks into the receiver's pool
    end     second chunk without blocks ──> receiver detaches                              nothing is written after

The receiver cannot refuse a write, so the sender must follow rules: it writes only to blocks of an attached grant,
stops when its stream breaks, and reports the end only when no write is in flight. After a failed write, data may still
be in flight, since no network tells what it will still deliver. Then the sender cancels the stream, and the receiver
waits for one lease.

A process that stands still (stopped, swapped out) does not notice that, and later continues its writes, while the
receiver frees the blocks one lease after the stream broke. So each push has a heartbeat on the event loop, and stops
writing once its last beat is three quarters of a lease old by its own clock, whatever the state of its stream.
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
"""Maximum bytes of one `Transfer`, by the sender's memory; a copying host checks for cancellation between transfers."""
STANDSTILL = 0.75
"""Share of a lease without a beat after which a push ends. The rest of the lease is for writes begun just before."""
BEATS_PER_LEASE = 8


class Writer(Protocol):
    """A transport's writing thread."""

    def post(self, transfer: Transfer) -> None:
        """Queue a transfer. Never blocks."""


class OneSidedWriter:
    """One push: a stream that announces its begin and end, and transfers on the writer's thread."""

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
        """Our and the peer's block ids of the last post; other layers of a prompt pass the same objects."""
        self._last_pieces: list[tuple[Sequence[int], Sequence[int]]] = []
        self._num_outstanding = 0
        self._has_none_outstanding = asyncio.Event()
        self._has_none_outstanding.set()
        self._untold: deque[tuple[int, TransferError | None]] = deque()
        """Ended transfers that the event loop has not processed yet: how many, and their error."""
        self._will_hear = False
        self._is_stopped = False
        self.may_still_write = False
        self._stood_still = False
        self._beat_s = time.monotonic()
        self._next_beat: asyncio.TimerHandle | None = None
        self._error: TransferError | None = None

    async def start(self) -> None:
        # The first beat comes before anything from which the receiver could count a lease.
        self._beat_s = time.monotonic()
        self._beat()
        try:
            # grpc.aio may never report that a stream was closed just now: without a timeout this could wait forever.
            async with asyncio.timeout(self._lease_s):
                await self._attach()
        except TimeoutError:
            raise PeerUnreachable(
                f"worker {self._grant.worker_id} accepted no push for a lease of {self._grant.lease_ms} ms"
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
                raise InvalidTransfer("the receiver accepted a one-sided push without attaching it")

    def post(self, layer: int, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]) -> None:
        assert self._stream is not None
        if self._stream.done() and self._error is None:
            # The receiver considers us gone: a write now could hit the blocks' next owner.
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
            pass  # the stream is broken: the receiver waits for Abandon, or for one lease
        finally:
            stream.cancel()

    def _beat(self) -> None:
        if not self._has_stood_still() and not self._is_stopped:
            self._beat_s = time.monotonic()
            self._next_beat = self._loop.call_later(self._lease_s / BEATS_PER_LEASE, self._beat)

    def _must_not_write(self) -> bool:
        """May be called on any thread."""
        stream = self._stream
        is_over = self._is_stopped or self._error is not None or stream is None or stream.done()
        return self._has_stood_still() or is_over

    def _has_stood_still(self) -> bool:
        """May be called on any thread. Once true, it stays true."""
        if time.monotonic() - self._beat_s > STANDSTILL * self._lease_s:
            self._stood_still = True
        return self._stood_still

    def _late_at_s(self) -> float:
        """May be called on any thread. If the process stands still after this call, the writer's own clock check
        notices.
        """
        return -math.inf if self._has_stood_still() else self._beat_s + STANDSTILL * self._lease_s

    def _note_standstill(self) -> None:
        if self._has_stood_still() and self._error is None:
            self._error = PeerUnreachable(
                f"this worker was stalled for more than {STANDSTILL:g} of a lease of {self._grant.lease_ms} ms: worker "
                f"{self._grant.worker_id} may take it for dead"
            )

    def _report_end(self, num_transfers: int, error: TransferError | None) -> None:
        """Called on the writer's thread. Waking the event loop takes longer than a write, so it is woken once for all
        ends that it has not processed."""
        self._untold.append((num_transfers, error))
        if not self._will_hear:
            self._will_hear = True
            self._loop.call_soon_threadsafe(self._hear_ends)

    def _hear_ends(self) -> None:
        self._will_hear = False  # first: ends that are appended from here on wake the loop again
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
