"""The worker processes that this router knows, and a session with each, kept open.

Owns one `WorkerHandle` per worker process. Believes the sessions first and the registry second: a worker whose session
is open is alive, whatever the registry says; one that the registry forgot gets no new work.

    registry record ──> CONNECTING ──session opens──> READY ──record gone or draining──> LEAVING (finishes what it has)
                            ^                           │
                            └──── session lost, record still there: retried, with a growing pause; requests wait for
                                  the first few tries, which take about 1.5 s

A worker whose engine stands still, as it says, gets nothing new until it goes on, and its requests are told with each
beat, so that they leave it where another can go on (`Lifecycle`).
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
"""A load that is no news is an occasion to look at those who wait once in so long: some wait for time to pass, or for
what is learned of costs."""
_MAX_DOUBLINGS = 16
"""Of the pause between tries: far beyond its bound, and no number grows for ever."""


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
        """`on_change`: one joined, left, or freed something. `on_fault`: its session was lost, or its engine stands
        still, with requests there. `on_forgotten`: it will not come back. `tls`: how workers are called."""
        self._router_id = router_id
        self._tls = tls
        self._now_s = now_s
        self._on_change = on_change
        self._on_fault = on_fault
        self._on_forgotten = on_forgotten
        self.handles: dict[WorkerKey, WorkerHandle] = {}
        self.num_changes = 0
        """How often it has changed which of them take new work, or what these are."""
        self._looked_s = -LOOK_S
        """When those who wait were last looked at for a load."""
        self._joined: set[WorkerKey] = set()
        """Of whom the log has said so: those that are there, and those whose turn in a record comes again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def set_records(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Take over what the registry says now of the workers that this router uses."""
        by_key = {WorkerKey(r.worker_id, r.incarnation): r for r in records}
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
                handle.is_leaving = True  # what runs there goes on
                self._forget_if_done(handle)
        rivals = {key.worker_id for key, record in by_key.items() if record.rival_address}
        self._joined = {key for key in self._joined if key in self.handles or key.worker_id in rivals}
        self._note_change()

    async def close(self) -> None:
        """End every session."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for handle in list(self.handles.values()):  # one that leaves meanwhile is dropped from them
            await _close(handle)

    # -- what becomes of sessions -------------------------------------------------------------------------------

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
        """With each step of each worker: what follows looks at all of them, and must not."""
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
            _log.warning("worker stands still", extra={"worker": handle.record.worker_id})
            self._on_fault(handle.key)
        handle.session.tell_stalled()

    def _on_session_lost(self, handle: WorkerHandle) -> None:
        if self._is_closed or self.handles.get(handle.key) is not handle:
            return  # it was closed here
        assert handle.session is not None
        self._joined.discard(handle.key)
        if handle.num_lost == 0:
            worker = {"worker": handle.record.worker_id}
            if handle.is_going and not handle.session.num_requests_lost:  # as it has said that it would
                _log.info("worker left", extra=worker)
            else:
                _log.warning("session lost", extra={**worker, "why": handle.session.lost_why})
        handle.num_lost += 1
        if handle.session.num_requests_lost and not handle.session.is_our_fault and not handle.is_going:
            self._on_fault(handle.key)
        self._spawn(self._reconnect(handle))
        self._note_change()

    async def _reconnect(self, handle: WorkerHandle) -> None:
        """Try again while the registry knows the worker, with a pause that doubles: the peer may be restarting."""
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
        """Drop a worker that left the registry once none of our requests is there."""
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
