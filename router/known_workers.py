"""The worker processes that this router knows, and an open session with each.

Owns one `WorkerHandle` per worker process. Trusts the sessions first and the registry second: a worker whose session is
open is alive, whatever the registry says, but one that is gone from the registry gets no new work.

    registry record ──> CONNECTING ──session opens──> READY ──record gone or draining──> LEAVING (finishes what it has)
                            ^                           │
                            └──── session lost, record still there: retried, with a growing pause; requests wait for
                                  the first few tries, which take about 1.5 s

A worker that reports that its engine is stalled gets no new work until the engine goes on. With each beat, its requests
hear of the stall, so that they leave it if another worker can continue them (`Lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from protos import tandem_worker_pb2 as pb
from router.request_events import WorkerKey
from router.worker_handle import WorkerHandle
from router.worker_session import WorkerSession
from rpc.channel import SESSION_READ_AHEAD_BYTES, open_channel
from rpc.tls import ClientTLS

_log = logging.getLogger(__name__)

_RECONNECT_MIN_S = 0.1
_RECONNECT_MAX_S = 1.0
LOOK_S = 0.05
"""Loads that free nothing still call `on_change`, but at most once in this time: some requests wait for time to pass,
or for costs to be learned."""
_MAX_DOUBLINGS = 16
"""Bound for the doublings of the pause between tries: far beyond the longest pause, and no number grows forever."""


class KnownWorkers:
    """Keeps a session with every worker in the registry."""

    def __init__(
        self,
        *,
        router_id: str,
        tls: ClientTLS | None,
        now_s: Callable[[], float],
        on_change: Callable[[], None],
        on_fault: Callable[[WorkerKey], None],
        on_forgotten: Callable[[WorkerKey], None],
    ) -> None:
        """`on_change`: a worker joined, left, or freed something. `on_fault`: a worker's session was lost, or its
        engine stalled, with requests there. `on_forgotten`: the worker will not come back. `tls`: for the channels to
        workers."""
        self._router_id = router_id
        self._tls = tls
        self._now_s = now_s
        self._on_change = on_change
        self._on_fault = on_fault
        self._on_forgotten = on_forgotten
        self.handles: dict[WorkerKey, WorkerHandle] = {}
        self.num_changes = 0
        """Counts changes to which workers take new work, or to their records."""
        self._looked_s = -LOOK_S
        """When a load last called `on_change`."""
        self._joined: set[WorkerKey] = set()
        """Workers that the log has reported as joined: the known ones, and those that alternate in the registry with
        another process of the same id (`rival_address`), so that the log reports them once."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def set_records(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Take over the registry's current records of the workers that this router uses."""
        by_key = {WorkerKey.of(record): record for record in records}
        for key, record in by_key.items():
            handle = self.handles.get(key)
            if handle is None:
                self.handles[key] = handle = WorkerHandle(
                    record, open_channel(record.address, tls=self._tls, read_ahead_bytes=SESSION_READ_AHEAD_BYTES)
                )
                self._connect(handle)
            else:
                handle.take_record(record)
                handle.is_leaving = False
        for key, handle in list(self.handles.items()):
            if key not in by_key:
                handle.is_leaving = True  # its running requests go on
                self._forget_if_done(handle)
        rivals = {key.worker_id for key, record in by_key.items() if record.rival_address}
        self._joined = {key for key in self._joined if key in self.handles or key.worker_id in rivals}
        self._note_change()

    async def close(self) -> None:
        """End every session."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for handle in list(self.handles.values()):  # a copy: a worker that leaves meanwhile is removed from the dict
            await _close(handle)

    # -- sessions -----------------------------------------------------------------------------------------------

    def _connect(self, handle: WorkerHandle) -> None:
        def on_open() -> None:
            handle.num_lost = 0
            if handle.key not in self._joined:
                self._joined.add(handle.key)
                _log.info("worker joined", extra={"worker": handle.record.worker_id, "address": handle.record.address})
            self._note_change()

        handle.session = WorkerSession(
            record=handle.record,
            router_id=self._router_id,
            channel=handle.channel,
            on_load=lambda load: self._on_load(handle, load),
            on_open=on_open,
            on_lost=lambda: self._on_session_lost(handle),
        )
        handle.is_full = False

    def _on_load(self, handle: WorkerHandle, load: pb.WorkerLoad) -> None:
        """Called with each step of each worker. `on_change` looks at all workers, so it must not run every time."""
        before = handle.load
        is_news = handle.set_load(load)
        self.num_changes += handle.load.stands_otherwise_since(before)
        if handle.load.is_stalled:
            self._on_stalled(handle, is_news=not before.is_stalled)
        self._forget_if_done(handle)
        now_s = self._now_s()
        if is_news or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._on_change()

    def _on_stalled(self, handle: WorkerHandle, *, is_news: bool) -> None:
        assert handle.session is not None
        if is_news and handle.session.num_requests and not handle.is_going:
            _log.warning(
                "worker is stalled in a step; its requests go elsewhere", extra={"worker": handle.record.worker_id}
            )
            self._on_fault(handle.key)
        handle.session.tell_stalled()

    def _on_session_lost(self, handle: WorkerHandle) -> None:
        if self._is_closed or self.handles.get(handle.key) is not handle:
            return  # this router closed it
        assert handle.session is not None
        self._joined.discard(handle.key)
        if handle.num_lost == 0:
            worker = {"worker": handle.record.worker_id}
            if handle.is_going and not handle.session.num_requests_lost:  # the worker had announced it
                _log.info("worker left", extra=worker)
            else:
                _log.warning("session lost", extra={**worker, "why": handle.session.lost_why})
        handle.num_lost += 1
        if handle.session.num_requests_lost and not handle.session.is_our_fault and not handle.is_going:
            self._on_fault(handle.key)
        self._spawn(self._reconnect(handle))
        self._note_change()

    async def _reconnect(self, handle: WorkerHandle) -> None:
        """Open a session again after a pause that doubles, while the registry knows the worker: it may be
        restarting."""
        num_doublings = min(handle.num_lost - 1, _MAX_DOUBLINGS)
        await asyncio.sleep(min(_RECONNECT_MIN_S * 2**num_doublings, _RECONNECT_MAX_S))
        if handle.is_leaving:
            self._forget_if_done(handle)
        elif self.handles.get(handle.key) is handle:
            self._connect(handle)

    def _note_change(self) -> None:
        self.num_changes += 1
        self._on_change()

    def _forget_if_done(self, handle: WorkerHandle) -> None:
        """Drop a worker that left the registry, once none of this router's requests is there."""
        is_idle = handle.session is None or handle.session.num_requests == 0
        if handle.is_leaving and is_idle and self.handles.get(handle.key) is handle:
            del self.handles[handle.key]
            handle.is_forgotten = True
            self._on_forgotten(handle.key)
            self._spawn(_close(handle))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close(handle: WorkerHandle) -> None:
    if handle.session is not None:
        await handle.session.close()
    await handle.channel.close()
