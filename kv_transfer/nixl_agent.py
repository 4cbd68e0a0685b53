"""One NIXL agent for one pool, driven by its own thread. Optional: needs the extra `nixl`.

Owns the agent, the pool's registration and the thread. NIXL agents take calls from one thread at a time, and make
progress (setting up connections, writing over TCP) only inside calls. NIXL's own progress thread would do that, too,
but it spins on a whole core even when idle. So our thread makes every call. It

    sleeps on its queue of calls ──> has transfers in flight, or is a receiver being written to ──> polls with short
         ^                                                                                          waits
         └────────────────────────────── neither ──────────────────────────────────────────────────────┘

The event loop is never blocked: it queues calls and gets futures or callbacks. NIXL releases the GIL while it copies.

NIXL can neither take back a write nor end a connection: UCX continues to send a cancelled write during the next call,
whichever it is. So a failed write ends all writes to its peer. A write that is given up ends the NIXL agent, which is
never called again; a new one is made for the next peer. Data that is in sockets by then still arrives, so after a
failure the sender must not tell the receiver that no more data will arrive.

In a worker with one pool, the writer posts `Transfer`s. In a worker with several ranks, each rank has an agent in its
own process, which is used through a `PeerPool` (`nixl_peer`): `open_peer`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from kv_transfer.base import MAX_BYTES_IN_FLIGHT
from kv_transfer.errors import PeerUnreachable, TransferError, TransportMissing
from kv_transfer.nixl_peer import NixlPeerPool
from kv_transfer.pool import KVPool, PeerPool
from kv_transfer.transfer import Result, Transfer, queue_call
from protos import tandem_kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

SENDING_POLL_S = 100e-6
RECEIVING_POLL_S = 500e-6
"""Writes over RDMA or shared memory need no help from the receiver; over TCP this limits what its sockets must hold."""


@dataclass(slots=True, eq=False)
class RemotePool:
    """A peer's pool, ready to be written to."""

    agent_name: str
    descriptors: Any
    num_blocks: int
    num_bytes_in_flight: int = 0
    is_removed: bool = False


@dataclass(slots=True, eq=False)
class InFlight:
    """Writes that NIXL is making."""

    transfer: Transfer
    deadline_s: float
    handle: Any = None


class NixlAgent:
    """The agent of a pool with an address. Raises `TransportMissing` if NIXL is not installed or has no UCX. `close`
    must be called."""

    def __init__(self, name: str, pool: KVPool) -> None:
        assert pool.base_address is not None
        api = _import_nixl()
        self._base_address = pool.base_address
        self._pool = pool
        self._errors = tuple(
            kind for kind in vars(api.nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._make_agent: Callable[[], Any] = lambda: api.nixl_agent(name, config)
        self._agent: Any = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[RemotePool, deque[Transfer]] = {}
        """No queue is empty. Pools are in the order of their turns."""
        self._in_flight: list[InFlight] = []
        self._num_bytes_in_flight = 0
        self._num_incoming_pushes = 0
        self._remotes: dict[str, RemotePool] = {}
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        started = self.call(self._set_up)
        try:
            started.result()
        except self._errors as error:
            self._calls.put(None)
            raise TransportMissing(f"NIXL cannot use UCX here: {error}") from error

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on the agent's thread."""
        return queue_call(work, self._calls.put)

    def close(self) -> None:
        """Fail transfers in flight, deregister the pool, end the thread. Blocks for a moment."""
        self.call(self._tear_down).result()
        self._calls.put(None)
        self._thread.join()

    # -- receiving --

    def describe(self) -> pb.NixlEndpoint:
        """Describe this agent and its pool to a sender."""
        return pb.NixlEndpoint(
            agent_metadata=self._metadata,
            base_address=self._base_address,
            pool_bytes=self._pool.layout.pool_bytes,
            device_id=self._pool.device_id,
            memory=self._pool.memory,
        )

    def enter_push(self) -> None:
        """A sender begins to write here: make progress until it leaves."""
        self._calls.put(lambda: self._count_incoming(1))

    def leave_push(self) -> None:
        self._calls.put(lambda: self._count_incoming(-1))

    # -- sending --

    def add_remote(self, agent_name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> Future[RemotePool]:
        """Connect to a peer's pool. The future raises `PeerUnreachable` if NIXL refuses metadata or addresses."""
        return self.call(lambda: self._add_remote(agent_name, endpoint, num_blocks))

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        """Blocking `add_remote`. See `kv_transfer.pool.PoolAgent`."""
        remote = self.add_remote(name, endpoint, num_blocks).result()
        return NixlPeerPool(name, remote, post=self.post, close=partial(self.remove_remote, remote))

    def remove_remote(self, remote: RemotePool) -> None:
        self._calls.put(lambda: self._close_remote(remote, f"{remote.agent_name}: the connection was closed"))

    def post(self, transfer: Transfer) -> None:
        """Write once fewer than MAX_BYTES_IN_FLIGHT are in flight, and less than half of that to this peer. Never
        blocks.
        """
        self._calls.put(lambda: self._waiting.setdefault(transfer.terms.remote, deque()).append(transfer))

    # -- on the agent's thread --

    def _run(self) -> None:
        while self._run_calls():
            try:
                self._progress()
            except Exception as error:
                # Nobody waits for this thread; the transfers' owners get the error.
                logger.exception("NIXL made no progress")
                self._fail_waiting(f"NIXL made no progress: {error}")
                if self._in_flight:
                    self._let_go_of_agent(f"NIXL made no progress: {error}")

    def _run_calls(self) -> bool:
        """Run the queued calls; wait for one if there is nothing else to do. Returns False when the thread must end."""
        try:
            call = self._calls.get(timeout=self._patience_s())
            while call is not None:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return True
        return False

    def _patience_s(self) -> float | None:
        if self._in_flight or self._waiting:
            return SENDING_POLL_S
        return RECEIVING_POLL_S if self._num_incoming_pushes else None

    def _progress(self) -> None:
        if self._num_incoming_pushes and self._agent is not None:  # None: the agent was given up while a peer writes
            self._agent.get_new_notifs()
        for under_way in list(self._in_flight):
            if not under_way.transfer.terms.remote.is_removed:  # it may have ended with another one
                self._look_at(under_way)
        while any(self._start_next(remote) for remote in list(self._waiting)):
            pass

    def _start_next(self, remote: RemotePool) -> bool:
        """Start the peer's next transfer if there is room. A peer that hangs leaves half of the room to others."""
        most = MAX_BYTES_IN_FLIGHT[self._pool.memory]
        if self._num_bytes_in_flight >= most or remote.num_bytes_in_flight >= most // 2:
            return False
        waiting = self._waiting.pop(remote)
        transfer = waiting.popleft()
        if waiting:
            self._waiting[remote] = waiting  # at the end of the turns
        if transfer.terms.is_cancelled():
            transfer.terms.on_end(1, None)
        else:
            self._start(transfer)
        return True

    def _start(self, transfer: Transfer) -> None:
        remote: RemotePool = transfer.terms.remote
        if remote.is_removed:
            transfer.terms.on_end(1, PeerUnreachable(f"{remote.agent_name}: the connection was closed"))
            return
        under_way = InFlight(transfer, time.monotonic() + transfer.terms.patience_s)
        self._in_flight.append(under_way)
        self._count_bytes(transfer, 1)
        src = np.asarray(transfer.src_block_ids, dtype=np.int32) + transfer.layer * self._pool.layout.num_blocks
        dst = np.asarray(transfer.dst_block_ids, dtype=np.int32) + transfer.layer * remote.num_blocks
        try:
            under_way.handle = self._agent.make_prepped_xfer("WRITE", self._local, src, remote.descriptors, dst)
            state = self._agent.transfer(under_way.handle)
        except self._errors as error:
            self._break_off(remote, f"{remote.agent_name}: {error}")
            return
        self._end_if_done(under_way, state)

    def _look_at(self, under_way: InFlight) -> None:
        terms = under_way.transfer.terms
        if terms.is_late():  # checked before calling NIXL, whose calls continue writes
            self._let_go_of_agent(f"{terms.remote.agent_name}: a write did not end in its time")
            return
        try:
            state = self._agent.check_xfer_state(under_way.handle)
        except self._errors as error:
            self._break_off(terms.remote, f"{terms.remote.agent_name}: {error}")
            return
        if state == "PROC" and time.monotonic() >= under_way.deadline_s:
            self._let_go_of_agent(f"{terms.remote.agent_name}: a write took more than {terms.patience_s:.1f} s")
        else:
            self._end_if_done(under_way, state)

    def _end_if_done(self, under_way: InFlight, state: str) -> None:
        if state == "DONE":
            self._end(under_way, None)
        elif state != "PROC":
            remote: RemotePool = under_way.transfer.terms.remote
            self._break_off(remote, f"{remote.agent_name}: a write failed")

    def _break_off(self, remote: RemotePool, why: str) -> None:
        """End all writes to a peer, and accept no more."""
        error = PeerUnreachable(why)
        for under_way in [one for one in self._in_flight if one.transfer.terms.remote is remote]:
            self._end(under_way, error)
        self._remove_remote(remote)

    def _end(self, under_way: InFlight, error: TransferError | None) -> None:
        transfer = under_way.transfer
        self._in_flight.remove(under_way)
        self._count_bytes(transfer, -1)
        if under_way.handle is not None:
            try:
                under_way.handle.release()
            except self._errors as release_error:
                # It stays in NIXL's list of leaked handles, which are released when the agent ends.
                logger.warning("NIXL cannot cancel a write to %s: %s", transfer.terms.remote.agent_name, release_error)
        transfer.terms.on_end(1, error)

    def _count_bytes(self, transfer: Transfer, sign: int) -> None:
        num_bytes = sign * len(transfer.dst_block_ids) * self._pool.layout.block_bytes
        self._num_bytes_in_flight += num_bytes
        transfer.terms.remote.num_bytes_in_flight += num_bytes

    def _count_incoming(self, change: int) -> None:
        self._num_incoming_pushes += change

    def _add_remote(self, agent_name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> RemotePool:
        previous = self._remotes.get(agent_name)
        if previous is not None:
            self._close_remote(previous, f"{agent_name}: the peer has connected again")
        try:
            if self._agent is None:
                self._set_up()
            found = self._agent.add_remote_agent(endpoint.agent_metadata)
            found_name = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
            if found_name != agent_name:
                self._agent.remove_remote_agent(found)
                raise PeerUnreachable(f"got NIXL metadata of {found_name[:80]!r} instead of {agent_name!r}'s")
            descriptors = self._descriptors(
                agent_name, endpoint.base_address, endpoint.device_id, endpoint.memory, num_blocks
            )
        except self._errors as error:
            raise PeerUnreachable(f"NIXL cannot connect to {agent_name}: {error}") from error
        remote = self._remotes[agent_name] = RemotePool(agent_name, descriptors, num_blocks)
        return remote

    def _close_remote(self, remote: RemotePool, why: str) -> None:
        if any(under_way.transfer.terms.remote is remote for under_way in self._in_flight):
            self._let_go_of_agent(why)
        else:
            self._remove_remote(remote)

    def _remove_remote(self, remote: RemotePool) -> None:
        if remote.is_removed:
            return
        remote.is_removed = True
        if self._remotes.get(remote.agent_name) is remote:
            del self._remotes[remote.agent_name]
        descriptors, remote.descriptors = remote.descriptors, None  # descriptors reference NIXL's agent
        try:
            descriptors.release()
            self._agent.remove_remote_agent(remote.agent_name)
        except self._errors as error:
            logger.info("NIXL cannot disconnect from %s: %s", remote.agent_name, error)

    def _descriptors(self, agent_name: str, base_address: int, device_id: int, memory: str, num_blocks: int) -> Any:
        layout = self._pool.layout
        # One strided descriptor covers every block of every layer: index = layer * num_blocks + block.
        row = [base_address, layout.block_bytes, device_id, layout.block_bytes, layout.num_layers * num_blocks]
        return self._agent.prep_xfer_dlist(agent_name, np.array([row], dtype=np.uint64), memory)

    def _set_up(self) -> None:
        """Make NIXL's agent and register the pool; leaves nothing behind if that fails."""
        self._pool.bind_thread()  # UCX uses this thread's CUDA context, now and in every call
        self._agent = self._make_agent()
        region = (self._base_address, self._pool.layout.pool_bytes, self._pool.device_id, "")
        local = (self._base_address, self._pool.device_id, self._pool.memory, self._pool.layout.num_blocks)
        try:
            self._registration = self._agent.register_memory([region], self._pool.memory)
            self._metadata: bytes = self._agent.get_agent_metadata()
            self._local = self._descriptors("NIXL_INIT_AGENT", *local)
        except self._errors:
            self._agent = self._local = self._registration = None
            raise

    def _tear_down(self) -> None:
        self._fail_waiting("this worker is closing")
        if self._agent is not None:
            self._let_go_of_agent("this worker is closing")

    def _let_go_of_agent(self, why: str) -> None:
        """Give up NIXL's agent and all its transfers. Handles are not released: NIXL would first check their progress,
        during which UCX would continue to send."""
        error = PeerUnreachable(why)
        for under_way in list(self._in_flight):
            if under_way.handle is not None:
                under_way.handle._released = True  # as NIXL marks released handles
            self._end(under_way, error)
        for remote in list(self._remotes.values()):
            self._remove_remote(remote)
        try:
            self._local.release()
            self._agent.deregister_memory(self._registration)
        except self._errors as error:
            logger.warning("NIXL's agent did not shut down cleanly: %s", error)
        self._agent = self._local = self._registration = None

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for transfer in chain.from_iterable(waiting.values()):
            transfer.terms.on_end(1, PeerUnreachable(why))


def _import_nixl() -> Any:
    # UCX reads this once, when it is loaded. Its own default is stdout, which is ours: the process that started us
    # reads our address there and perhaps nothing after that. One warning too many then waits for a reader for ever.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise TransportMissing(
            "the nixl transport needs the extra `nixl` (pip install --no-deps nixl nixl-cu12, or nixl-cu13 where torch "
            f"is a build for CUDA 13): {error}"
        ) from error
    # NIXL's Python part logs to stdout, too, and switches off the logging errors of the whole process: undo both.
    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return _api
