"""The workers as this router sees them: who is there, how busy, and the session with each.

Owns one `WorkerHandle` per worker process. Believes the sessions first and the registry second: a worker whose session
is open is alive, whatever the registry says; one that the registry forgot gets no new work.

    registry record ──> CONNECTING ──session opens──> READY ──record gone or draining──> LEAVING (finishes what it has)
                            ^                           │
                            └──── session lost, record still there: retried, with a growing pause; requests wait for
                                  the first few tries, which take about 1.5 s

Load is what the worker said last, plus what was planned on it since (so that two requests of one moment do not take the
same blocks).

New requests go to decode workers of one kind (weights, dtype, layout: their compat digest), that of most of them: else
equal requests would get unlike answers. Workers of another kind finish what they have begun, and take over when they
are more, as in an upgrade.

A worker whose engine stands still, as it says, gets nothing new until it goes on, and its requests are told with each
beat, so that they leave it where another can go on (`Lifecycle`).

A worker that fails again and again is set aside, and probed before it is used again (`ejection`). It prefills nothing
then, and decodes only where no other decode worker is there; that the others are full is no reason: it has room because
it fails. Two workers between which transfers fail again and again are not paired, as long and as often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prefix_hash.compat import compat_difference
from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.candidates import decode_candidate, num_cached_tokens, prefill_candidate
from router.costs import Costs
from router.ejection import Ejections, Trial
from router.needs import Needs
from router.policy import STALL_WEIGHT, STAY_SHARE, UNKNOWN_ANSWER_S, PolicyConfig, choose_plan
from router.queue import QueuedRequest
from router.request_events import Plan, WorkerKey, WorkerPair
from router.worker_handle import TakenRoom, WorkerHandle
from router.worker_session import WorkerSession
from rpc.channel import SESSION_READ_AHEAD_BYTES, open_channel
from rpc.errors import NoWorker
from rpc.tls import ClientTLS

_log = logging.getLogger(__name__)

_RECONNECT_MIN_S = 0.1
_RECONNECT_MAX_S = 1.0
LOOK_S = 0.05
"""A load that is no news is an occasion to look at those who wait once in so long: some wait for time to pass, or for
what is learned of costs."""
_MAX_DOUBLINGS = 16
"""Of the pause between tries: far beyond its bound, and no number grows for ever."""


class WorkerPool:
    """Keeps a session with every worker in the registry."""

    def __init__(
        self,
        *,
        router_id: str,
        policy: PolicyConfig,
        serves: Callable[[pb.WorkerRecord], bool],
        on_change: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
        tls: ClientTLS | None = None,
    ) -> None:
        """`serves` tells whether a worker is one of ours; `on_change` is called when one joined, left, or freed
        something. `now_s`: the clock of ejections. `tls`: how workers are called."""
        self._router_id = router_id
        self._policy = policy
        self.costs = Costs()
        """What plans are chosen by."""
        self._serves = serves
        self._on_change = on_change
        self._now_s = now_s
        self._tls = tls
        self._ejections = Ejections()
        self._looked_s = -LOOK_S
        """When those who wait were last looked at for a load."""
        self._kind: str | None = None
        """The compat digest of those that new requests went to last."""
        self._handles: dict[WorkerKey, WorkerHandle] = {}
        self.rooms: set[TakenRoom] = set()
        """Of the attempts that are under way."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    # -- who is there -------------------------------------------------------------------------------------------

    def get(self, key: WorkerKey) -> WorkerHandle | None:
        return self._handles.get(key)

    @property
    def handles(self) -> list[WorkerHandle]:
        return sorted(self._handles.values(), key=lambda h: (h.record.role, h.record.worker_id))

    def usable(self, role: pb.Role | None = None) -> list[WorkerHandle]:
        """None: of both."""
        return [h for h in self._handles.values() if h.is_usable and role in (None, h.record.role)]

    @property
    def has_decode_worker(self) -> bool:
        """Whether waiting makes sense: one is usable, or expected to be in a moment."""
        kind = self._choose_kind()
        return any(record.compat_digest == kind for record in self._expected_decode_records())

    def require_decode_worker(self) -> None:
        """Raise `NoWorker` at the door where nobody could serve a request."""
        if not self.has_decode_worker:
            raise NoWorker("no decode worker is available; start one, or wait until one is ready", retry_after_s=2.0)

    def decode_records(self) -> list[pb.WorkerRecord]:
        """Of the decode workers that new requests may wait for."""
        kind = self._choose_kind()
        return [record for record in self._expected_decode_records() if record.compat_digest == kind]

    def has_decode_worker_for(self, request: QueuedRequest) -> bool:
        """Whether waiting makes sense for `request`."""
        kind = request.needs.compat_digest or self._choose_kind()
        return any(
            record.compat_digest == kind and request.needs.are_met_by(record)
            for record in self._expected_decode_records()
        )

    def is_apart(self, request: QueuedRequest) -> bool:
        """Whether `request` has begun on workers of another kind than new requests go to."""
        return request.needs.compat_digest not in ("", self._choose_kind())

    def is_anybody_usable_for(self, needs: Needs) -> bool:
        """Whether somebody takes such a request now, full or not."""
        return bool(self._usable_decode_workers(needs))

    def is_stalled(self, key: WorkerKey) -> bool:
        handle = self._handles.get(key)
        return handle is not None and handle.load.is_stalled

    @property
    def not_connected(self) -> list[str]:
        """Ids of workers that get no requests, since no session to them is open: just found, or lost. Of one that was
        started again under its id the newer counts."""
        known = [h for h in self._handles.values() if not h.is_leaving]
        return sorted({h.record.worker_id for h in known if h.session is None or not h.session.is_open})

    @property
    def of_another_kind(self) -> list[str]:
        """Ids of workers that get no new requests, since most decode workers are of another kind."""
        kind = self._choose_kind()
        return sorted(h.record.worker_id for h in self._handles.values() if h.record.compat_digest != kind)

    def _expected_decode_records(self) -> list[pb.WorkerRecord]:
        return [h.record for h in self._handles.values() if h.is_expected and h.record.role == ROLE_DECODE]

    def _choose_kind(self) -> str | None:
        """The kind of most decode workers; of as many, that which it was before."""
        counts = Counter(record.compat_digest for record in self._expected_decode_records())
        if counts and (self._kind is None or counts[self._kind] < max(counts.values())):
            before, self._kind = self._kind, max(counts, key=lambda kind: counts[kind])
            if before is not None:
                why = compat_difference(self._kind, before)
                _log.warning(
                    "new requests go to workers of another kind", extra={"num": counts[self._kind], "why": why}
                )
        return self._kind

    def num_tokens_ahead_of(self, num_tokens: int) -> float:
        """How many tokens a new prompt of `num_tokens` would wait for where it would be computed soonest. That streams
        slow it down there counts as tokens, too."""
        kind = self._choose_kind()
        prefill, decode = (
            [h for h in self.usable(role) if h.record.compat_digest == kind] for role in (ROLE_PREFILL, ROLE_DECODE)
        )
        ahead = [float(h.num_queued_tokens) for h in prefill]
        ahead += [h.num_queued_tokens + STALL_WEIGHT * h.load.num_running * num_tokens for h in decode]
        return min(ahead, default=0.0)

    def set_records(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Take over what the registry says now."""
        by_key = {WorkerKey(r.worker_id, r.incarnation): r for r in records if self._serves(r)}
        for key, record in by_key.items():
            handle = self._handles.get(key)
            if handle is None:
                self._handles[key] = handle = WorkerHandle(
                    record, open_channel(record.address, tls=self._tls, read_ahead_bytes=SESSION_READ_AHEAD_BYTES)
                )
                self._connect(handle)
            else:
                handle.record = record
                handle.is_leaving = False
        for key, handle in list(self._handles.items()):
            if key not in by_key:
                handle.is_leaving = True  # what runs there goes on
                self._forget_if_done(handle)
        self._on_change()

    async def close(self) -> None:
        """End every session."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for handle in list(self._handles.values()):  # one that leaves meanwhile is dropped from them
            await self._close_handle(handle)

    # -- planning -----------------------------------------------------------------------------------------------

    def choose(self, request: QueuedRequest) -> TakenRoom | None:
        """Plan `request` on the workers as they are now, and take the room for it. None: there is none now."""
        now_s = self._now_s()
        decode = self._usable_decode_workers(request.needs)
        if not decode:
            return None
        # What requests were admitted by. A prefill worker with a shorter context would end some of them early.
        max_model_len = min(h.record.model.max_model_len for h in decode)
        decode = [h for h in decode if not self._is_set_aside(h, now_s)] or decode
        prefill = [
            h
            for h in self.usable(ROLE_PREFILL)
            if h.record.model.max_model_len >= max_model_len
            and not self._is_set_aside(h, now_s)
            and request.needs.are_met_by(h.record)
        ]
        plan = choose_plan(
            self._policy,
            self.costs,
            now_s=now_s,
            num_tokens=request.num_tokens,
            prefill=[prefill_candidate(h, request) for h in prefill],
            decode=[decode_candidate(h, request) for h in decode],
            avoid=request.avoid,
            are_apart=lambda pair: (
                bool(self._ejections.troubles) and self._ejections.is_set_aside(_name_of(pair), now_s)
            ),
            may_stay=request.waited_s >= STAY_SHARE * (request.answer_s or UNKNOWN_ANSWER_S),
        )
        return None if plan is None else self._take_room(plan, request, now_s)

    def _take_room(self, plan: Plan, request: QueuedRequest, now_s: float) -> TakenRoom:
        prefill = self._handles[plan.prefill] if plan.prefill is not None else None
        on_trial = [who for who in (plan.decode, plan.prefill, plan.pair) if who is not None]
        trials = [self._ejections.begin(_name_of(who), now_s) for who in on_trial]
        decode_handle = self._handles[plan.decode]
        room = TakenRoom(
            decode_handle,
            prefill,
            request.num_tokens,
            num_cached_tokens=num_cached_tokens(prefill or decode_handle, request),
            num_blocks_held=request.num_cached_blocks.get(plan.decode, 0),
            num_blocks_shared=request.num_shared_blocks(plan.decode),
            trials=trials,
            on_end=self.rooms.discard,
        )
        self.rooms.add(room)
        return room

    def _usable_decode_workers(self, needs: Needs) -> list[WorkerHandle]:
        kind = needs.compat_digest or self._choose_kind()
        decode = self.usable(ROLE_DECODE)
        return [h for h in decode if h.record.compat_digest == kind and needs.are_met_by(h.record)]

    def _is_set_aside(self, handle: WorkerHandle, now_s: float) -> bool:
        return self._ejections.is_set_aside(handle.record.worker_id, now_s)

    # -- who fails, and who does well ---------------------------------------------------------------------------

    @property
    def ejected(self) -> list[str]:
        """Ids of the workers here that are not in use, or on probation, because they failed again and again."""
        worker_ids = {h.record.worker_id for h in self._handles.values()}
        return sorted(worker_id for worker_id in worker_ids if self._ejections.is_ejected(worker_id))

    @property
    def apart(self) -> list[WorkerPair]:
        """Pairs of workers here that are not used together, or only to try, because transfers between them failed."""
        prefill = [h.key for h in self.handles if h.record.role == ROLE_PREFILL]
        decode = [h.key for h in self.handles if h.record.role == ROLE_DECODE]
        pairs = [WorkerPair(p, d) for p in prefill for d in decode]
        return [pair for pair in pairs if self._ejections.is_ejected(_name_of(pair))]

    def note_success(self, who: WorkerKey | WorkerPair, room: TakenRoom) -> None:
        """The worker, or the pair, did its part of the attempt that `room` was taken for."""
        for trial in _trials_on(who, room):
            if trial.succeed():
                _log.info("worker readmitted" if isinstance(who, WorkerKey) else "pair readmitted", extra=_extra(who))

    def note_fault(self, who: WorkerKey | WorkerPair, room: TakenRoom) -> None:
        """The attempt that `room` was taken for failed, and that is the fault of the worker, or of the pair. A worker
        that is leaving may fail: that is not counted."""
        handles = [self._handles.get(key) for key in _keys_of(who)]
        if all(handle is not None and not handle.is_going for handle in handles):
            for trial in _trials_on(who, room):
                self._log_ejection(who, trial.fail(self._now_s()))

    def _count_failure(self, handle: WorkerHandle) -> None:
        """Of the worker itself, whatever it was doing."""
        pause_s = self._ejections.count_failure(handle.record.worker_id, self._now_s())
        self._log_ejection(handle.key, pause_s)

    def _log_ejection(self, who: WorkerKey | WorkerPair, pause_s: float | None) -> None:
        if pause_s is not None:
            message = "worker ejected" if isinstance(who, WorkerKey) else "pair kept apart, transfers fail"
            _log.warning(message, extra={**_extra(who), "pause_s": pause_s})

    # -- sessions -----------------------------------------------------------------------------------------------

    def _connect(self, handle: WorkerHandle) -> None:
        def on_open() -> None:
            handle.num_lost = 0
            _log.info("worker joined", extra={"worker": handle.record.worker_id, "address": handle.record.address})
            self._on_change()

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
        was_stalled = handle.load.is_stalled
        is_news = handle.set_load(load)
        if handle.load.is_stalled:
            self._on_stalled(handle, is_news=not was_stalled)
        self._forget_if_done(handle)
        now_s = self._now_s()
        if is_news or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._on_change()

    def _on_stalled(self, handle: WorkerHandle, *, is_news: bool) -> None:
        assert handle.session is not None
        if is_news and handle.session.num_requests and not handle.is_going:
            _log.warning("worker stands still", extra={"worker": handle.record.worker_id})
            self._count_failure(handle)
        handle.session.tell_stalled()

    def _on_session_lost(self, handle: WorkerHandle) -> None:
        if self._is_closed or self._handles.get(handle.key) is not handle:
            return  # it was closed here
        assert handle.session is not None
        if handle.num_lost == 0:
            _log.warning("session lost", extra={"worker": handle.record.worker_id, "why": handle.session.lost_why})
        handle.num_lost += 1
        if handle.session.num_requests_lost and not handle.session.is_our_fault and not handle.is_going:
            self._count_failure(handle)
        self._spawn(self._reconnect(handle))
        self._on_change()

    async def _reconnect(self, handle: WorkerHandle) -> None:
        """Try again while the registry knows the worker, with a pause that doubles: the peer may be restarting."""
        num_doublings = min(handle.num_lost - 1, _MAX_DOUBLINGS)
        await asyncio.sleep(min(_RECONNECT_MIN_S * 2**num_doublings, _RECONNECT_MAX_S))
        if handle.is_leaving:
            self._forget_if_done(handle)
        elif self._handles.get(handle.key) is handle:
            self._connect(handle)

    def _forget_if_done(self, handle: WorkerHandle) -> None:
        """Drop a worker that left the registry once none of our requests is there."""
        is_idle = handle.session is None or handle.session.num_requests == 0
        if handle.is_leaving and is_idle and self._handles.get(handle.key) is handle:
            del self._handles[handle.key]
            self.costs.forget(handle.key)
            self._spawn(self._close_handle(handle))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_handle(self, handle: WorkerHandle) -> None:
        if handle.session is not None:
            await handle.session.close()
        await handle.channel.close()


def _keys_of(who: WorkerKey | WorkerPair) -> list[WorkerKey]:
    return [who] if isinstance(who, WorkerKey) else [who.prefill, who.decode]


def _name_of(who: WorkerKey | WorkerPair) -> str:
    """To `Ejections`. A worker that is restarted is the same, a pair is another: it may be what the restart was for."""
    if isinstance(who, WorkerKey):
        return who.worker_id
    return " to ".join(f"{key.worker_id}/{key.incarnation}" for key in _keys_of(who))


def _trials_on(who: WorkerKey | WorkerPair, room: TakenRoom) -> list[Trial]:
    return [trial for trial in room.trials if trial.name == _name_of(who)]


def _extra(who: WorkerKey | WorkerPair) -> dict[str, str]:
    """For the log."""
    names = [key.worker_id for key in _keys_of(who)]
    return {"worker": names[0]} if isinstance(who, WorkerKey) else {"prefill": names[0], "decode": names[1]}
