"""The workers as requests see them: which workers can serve a request, and which one gets it.

    KnownWorkers ──> who is there, how busy ──┐
    ServedKinds ───> whose kind is served ────┼──choose──> TakenRoom, until the attempt ends
    WorkerFaults ──> whom to leave out ───────┤
    Costs ─────────> what each would take ────┘

A worker's load is what it reported last plus what the router has planned on it since, so that two simultaneous requests
do not take the same blocks.

A worker that fails again and again is left out, and probed before it is used again (`ejection`). Meanwhile it does not
prefill, and it decodes only if there is no other decode worker. That the others are full is no reason to use it: it has
room because it fails. Likewise, two workers between which transfers fail again and again are not paired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from protos import tandem_worker_pb2 as pb
from protos.tandem_worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from router.candidates import decode_candidate, prefill_candidate
from router.costs import Costs
from router.known_workers import KnownWorkers
from router.needs import Needs
from router.policy import STALL_WEIGHT, STAY_SHARE, UNKNOWN_ANSWER_S, PolicyConfig, choose_plan, those_with_room
from router.queued_request import QueuedRequest
from router.request_events import Plan, WorkerKey, WorkerPair
from router.roster import Roster
from router.served_kind import ServedKinds
from router.taken_room import TakenRoom
from router.worker_faults import WorkerFaults, keys_of
from router.worker_handle import WorkerHandle
from rpc.errors import NoWorker
from rpc.tls import ClientTLS

NOTHING_CACHED: Mapping[WorkerKey, int] = MappingProxyType({})


class WorkerPool:
    """One per router, which closes it."""

    def __init__(
        self,
        *,
        router_id: str,
        policy: PolicyConfig,
        on_change: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
        tls: ClientTLS | None = None,
        is_registry_reachable: Callable[[], bool] = lambda: True,
    ) -> None:
        """`on_change`, `tls`: as in `KnownWorkers`. `now_s`: the clock of ejections and costs. `is_registry_reachable`:
        whether Redis, where the router finds workers, answers."""
        self._policy = policy
        self.is_registry_reachable = is_registry_reachable
        self._now_s = now_s
        self.costs = Costs()
        """What the router has learned about the workers' speed; plans are chosen by it."""
        self._faults = WorkerFaults(now_s)
        self._served_kinds = ServedKinds()
        self._last_roster: Roster | None = None
        self.rooms: set[TakenRoom] = set()
        """The room taken by attempts that are under way."""
        self.workers = KnownWorkers(
            router_id=router_id,
            tls=tls,
            now_s=now_s,
            on_change=on_change,
            on_fault=self._faults.count,
            on_forgotten=self.costs.forget,
        )

    def set_records(self, records: Iterable[pb.WorkerRecord]) -> None:
        """Take over the registry's current records of the workers that this router uses."""
        self.workers.set_records(records)

    async def close(self) -> None:
        """End every session."""
        await self.workers.close()

    # -- which workers can serve a request ----------------------------------------------------------------------

    def get(self, key: WorkerKey) -> WorkerHandle | None:
        return self.workers.handles.get(key)

    @property
    def handles(self) -> list[WorkerHandle]:
        return sorted(self.workers.handles.values(), key=lambda h: (h.record.role, h.record.worker_id))

    def usable(self, role: pb.Role | None = None) -> list[WorkerHandle]:
        """Workers that take new work. `role`: None for both."""
        return [h for h in self.roster.usable if role in (None, h.facts.role)]

    @property
    def has_decode_worker(self) -> bool:
        """Whether waiting makes sense: a decode worker is usable, or expected to be in a moment."""
        return bool(self.roster.served_decode)

    def require_decode_worker(self) -> None:
        """Raise `NoWorker` if no decode worker could serve a request, before anything is computed or queued for it."""
        if not self.has_decode_worker:
            what_to_do = (
                "start one, or wait until one is ready"
                if self.is_registry_reachable()
                else "Redis does not answer, so this router finds no workers: check that it runs at --redis"
            )
            raise NoWorker(f"no decode worker is available; {what_to_do}", retry_after_s=2.0)

    def decode_records(self) -> Sequence[pb.WorkerRecord]:
        """Records of the decode workers that new requests may wait for."""
        return self.roster.served_decode

    def has_decode_worker_for(self, request: QueuedRequest) -> bool:
        """Whether waiting makes sense for `request`: a decode worker that can serve it is usable, or expected to be; or
        it is to move to a worker that has room."""
        return any(self._of_kind_for(request.needs, self.roster.expected_decode)) or self._has_wanted(request)

    def has_fewer_workers(self, request: QueuedRequest) -> bool:
        """Whether `request` cannot use all workers that new requests go to: it has begun on workers of another kind, or
        some lack its adapter or a feature."""
        needs, roster = request.needs, self.roster
        has_other_kind = needs.kind is not None and needs.kind != roster.kind_for(needs.lora_name)
        lacks_adapter = bool(needs.lora_name) and needs.lora_name not in roster.adapters_of_all
        return has_other_kind or lacks_adapter or not needs.features <= roster.features_of_all

    def workers_for(self, request: QueuedRequest) -> list[WorkerKey]:
        """Workers that may decode `request`, full or not."""
        return [handle.key for handle in self._usable_decode_workers(request.needs)]

    def is_anybody_usable_for(self, needs: Needs) -> bool:
        """Whether some decode worker takes such a request now, full or not."""
        return bool(self._usable_decode_workers(needs))

    def is_stalled(self, key: WorkerKey) -> bool:
        handle = self.get(key)
        return handle is not None and handle.load.is_stalled

    @property
    def roster(self) -> Roster:
        """The workers that take new work now."""
        workers = self.workers
        if self._last_roster is None or self._last_roster.num_changes != workers.num_changes:
            self._last_roster = Roster.of(workers.handles.values(), workers.num_changes, self._served_kinds)
        return self._last_roster

    # -- planning -----------------------------------------------------------------------------------------------

    def num_tokens_to_compute(
        self,
        num_tokens: int,
        lora_name: str = "",
        num_cached_blocks: Mapping[WorkerKey, int] = NOTHING_CACHED,
        *,
        num_waiting_tokens: int = 0,
    ) -> float:
        """How many tokens the soonest worker would have to compute until a new prompt of `num_tokens` for that adapter
        (empty: for none) is done: the tokens queued before it, its share of the `num_waiting_tokens` that wait before
        it in the router, and those of the prompt that are not cached there. On a decode worker, the slowdown by its
        streams counts as further tokens."""
        roster = self.roster
        served, kind = roster.compat_digest, roster.kind_for(lora_name)
        prefill, decode = (
            [h for h in roster.usable_by.get((role, served), []) if h.facts.kind_for(lora_name) == kind]
            for role in (ROLE_PREFILL, ROLE_DECODE)
        )

        def own(handle: WorkerHandle) -> int:
            return max(1, num_tokens - handle.num_cached_tokens(num_cached_blocks))

        to_compute = [float(h.num_queued_tokens + own(h)) for h in prefill]
        to_compute += [h.num_queued_tokens + own(h) * (1 + STALL_WEIGHT * h.load.num_running) for h in decode]
        return min(to_compute, default=float(num_tokens)) + num_waiting_tokens / max(1, len(to_compute))

    def takes_at_once(
        self, num_tokens: int, lora_name: str, num_cached_blocks: Mapping[WorkerKey, int], beside: QueuedRequest
    ) -> bool:
        """Whether a decode worker has so much of a new prompt of `num_tokens` cached that it need not wait for other
        prompts, and has room for it and for `beside`, which it would overtake."""

        def takes(handle: WorkerHandle) -> bool:
            num_uncached = num_tokens - handle.num_cached_tokens(num_cached_blocks)
            num_blocks = handle.facts.num_blocks(num_tokens) + handle.facts.num_blocks(beside.num_tokens)
            has_room = handle.num_available_blocks >= num_blocks and handle.has_free_seqs(2) and not handle.is_full
            return has_room and num_uncached <= self._policy.local_max_uncached_tokens

        return any(map(takes, self._usable_decode_workers(Needs(lora_name=lora_name))))

    def choose(self, request: QueuedRequest, num_waiting_tokens: int = 0) -> TakenRoom | None:
        """Plan `request` on the workers as they are now, and take the room for it. None: no worker has room now, or
        (`request.waits_for_prompts`) so many prompts wait at the workers that the choice is better left open.
        `num_waiting_tokens`: tokens of other requests that wait for workers."""
        request.waits_for_prompts = False
        now_s = self._now_s()
        if self._has_wanted(request):
            assert request.wanted is not None
            return self._take_room(Plan(request.wanted, None), request, now_s)
        decode = self._usable_decode_workers(request.needs)
        # The limit by which requests were admitted. A prefill worker with a shorter context would end some early.
        max_model_len = min((h.facts.max_model_len for h in decode), default=0)
        decode = [h for h in decode if h.key not in request.barred]
        if not decode:
            return None
        decode = [h for h in decode if not self._faults.is_left_out(h.key, now_s)] or decode
        prefill = [
            h
            for h in self.usable(ROLE_PREFILL)
            if h.facts.max_model_len >= max_model_len
            and not self._faults.is_left_out(h.key, now_s)
            and request.needs.features <= h.facts.features
        ]
        candidates = [decode_candidate(h, request, self._slowness(h, now_s)) for h in decode]
        plan = choose_plan(
            self._policy,
            self.costs,
            now_s=now_s,
            num_tokens=request.num_tokens,
            prefill=[prefill_candidate(h, request) for h in prefill],
            decode=candidates,
            avoid=request.avoid,
            are_apart=lambda pair: self._faults.is_left_out(pair, now_s),
            may_stay=request.waited_s >= STAY_SHARE * (request.answer_s or UNKNOWN_ANSWER_S),
            is_return=request.is_return,
            num_waiting_tokens=num_waiting_tokens,
        )
        if plan is None:
            request.waits_for_prompts = bool(those_with_room(candidates, request.num_tokens))
            return None
        return self._take_room(plan, request, now_s)

    def has_room_to_move(self, key: WorkerKey, needs: Needs, num_tokens: int) -> bool:
        """Whether the prefill worker can continue a stream with these needs (its kind among them) and `num_tokens`
        tokens, and will not say Busy."""
        handle = self.get(key)
        return handle is not None and handle.has_room_to_move(num_tokens) and any(self._of_kind_for(needs, [handle]))

    def _has_wanted(self, request: QueuedRequest) -> bool:
        key = request.wanted
        return key is not None and self.has_room_to_move(key, request.needs, request.num_tokens)

    def is_left_out(self, key: WorkerKey) -> bool:
        """Whether the worker is not to be used now, because it failed again and again."""
        return self._faults.is_left_out(key, self._now_s())

    def _slowness(self, handle: WorkerHandle, now_s: float) -> float:
        return self.costs.paces.slowness(handle.key, now_s) if self._policy.learn_costs else 1.0

    def _take_room(self, plan: Plan, request: QueuedRequest, now_s: float) -> TakenRoom:
        handles = self.workers.handles
        decode, prefill = handles[plan.decode], handles[plan.prefill] if plan.prefill is not None else None
        kind = decode.facts.kind_for(request.needs.lora_name, request.needs.kind)
        assert kind is not None, "it was chosen for having the adapter"
        room = TakenRoom(
            decode,
            prefill,
            request.num_tokens,
            kind=kind,
            num_cached_tokens=(prefill or decode).num_cached_tokens(request.num_cached_blocks),
            num_blocks_held=request.num_cached_blocks.get(plan.decode, 0),
            num_blocks_shared=request.num_shared_blocks(plan.decode),
            trials=self._faults.begin(plan, now_s),
            on_end=self.rooms.discard,
        )
        self.rooms.add(room)
        return room

    def _usable_decode_workers(self, needs: Needs) -> list[WorkerHandle]:
        kind = needs.kind or self.roster.kind_for(needs.lora_name)
        if kind is None:
            return []
        return [*self._of_kind_for(needs, self.roster.usable_by.get((ROLE_DECODE, kind.compat_digest), []))]

    def _of_kind_for(self, needs: Needs, handles: Iterable[WorkerHandle]) -> Iterator[WorkerHandle]:
        """Those of `handles` that can serve a request with these needs."""
        kind, lora_name = needs.kind or self.roster.kind_for(needs.lora_name), needs.lora_name
        return (
            h
            for h in handles
            if kind is not None
            and h.facts.kind_for(lora_name, needs.kind) == kind
            and needs.features <= h.facts.features
        )

    # -- faults and successes -----------------------------------------------------------------------------------

    def note_success(self, who: WorkerKey | WorkerPair, room: TakenRoom) -> None:
        """The worker, or the pair, did its part of the attempt that `room` was taken for."""
        self._faults.note_success(who, room.trials)

    def note_fault(self, who: WorkerKey | WorkerPair, room: TakenRoom) -> None:
        """The attempt that `room` was taken for failed, by the fault of the worker or of the pair. Failures of a worker
        that is leaving do not count."""
        handles = [self.get(key) for key in keys_of(who)]
        if all(handle is not None and not handle.is_going for handle in handles):
            self._faults.note_fault(who, room.trials)

    # -- for operators ------------------------------------------------------------------------------------------

    @property
    def not_connected(self) -> list[str]:
        """Ids of workers that get no requests because no session to them is open: just found, or lost. Of a worker that
        was restarted under its id, only the process that is now in the registry counts."""
        known = [h for h in self.workers.handles.values() if not h.is_leaving]
        return sorted({h.record.worker_id for h in known if h.session is None or not h.session.is_open})

    @property
    def of_another_kind(self) -> list[str]:
        """Ids of workers that get no new requests because another kind is served."""
        served = self.roster.compat_digest
        return sorted(h.record.worker_id for h in self.workers.handles.values() if h.facts.compat_digest != served)

    @property
    def ejected(self) -> list[str]:
        """Ids of known workers that are left out or on probation because they failed again and again."""
        return sorted({h.record.worker_id for h in self.handles if self._faults.is_ejected(h.key)})

    @property
    def apart(self) -> list[WorkerPair]:
        """Pairs of known workers that are kept apart or on probation because transfers between them failed."""
        known = [pair for pair in self._faults.ejected_pairs() if all(map(self.get, keys_of(pair)))]
        return sorted(known, key=keys_of)
