"""What the router keeps about one worker process: what the worker reports about itself, and what was planned on it
since."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from protos import tandem_worker_pb2 as pb
from router.needs import features_of
from router.request_events import WorkerKey
from router.served_kind import Kind
from router.worker_session import WorkerSession

NUM_QUICK_RECONNECTS = 4
"""Requests wait for a worker whose session was lost until this many attempts to reopen it have failed."""
ASK_AGAIN_S = 1.0
"""A worker that said Busy is asked again after this time even if no load has shown that it freed something: what
another router's request takes and frees within one step appears in no load, and the worker would count as full
forever."""


class WorkerFacts(NamedTuple):
    """The facts about a worker that plans depend on. The router reads them for each request and each worker, far more
    often than they change. Therefore they are no protobuf message: reading its fields would take as long as all the
    rest of the planning."""

    role: pb.Role
    compat_digest: str
    block_size: int
    num_state_blocks: int
    """Blocks that a prompt from another worker takes for the state of its layers, beside those of its tokens."""
    max_model_len: int
    transport: str
    can_generate: bool
    lora_digests: dict[str, str]
    """Digests of its adapters by name; a digest is empty if the worker's version does not report it. Not to be written
    to."""
    adapters: frozenset[tuple[str, str]]
    """`lora_digests` in hashable form: most workers have the same adapters, so that the roster counts equal sets."""
    leaving_adapters: frozenset[tuple[str, str]]
    """Likewise: adapters that it keeps only for answers that have begun with them."""
    features: frozenset[str]
    """What it understands of `needs.FEATURES`."""

    @classmethod
    def of(cls, record: pb.WorkerRecord) -> WorkerFacts:
        lora_digests = {name: record.lora_digests.get(name, "") for name in record.model.lora_names}
        return cls(
            role=record.role,
            compat_digest=record.compat_digest,
            block_size=record.model.block_size,
            num_state_blocks=record.num_state_blocks,
            max_model_len=record.model.max_model_len,
            transport=record.transport,
            can_generate=record.can_generate,
            lora_digests=lora_digests,
            adapters=frozenset(lora_digests.items()),
            leaving_adapters=frozenset((each.lora_name, each.lora_digest) for each in record.leaving_loras),
            features=features_of(record),
        )

    def num_blocks(self, num_tokens: int) -> int:
        """The blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def kind_for(self, lora_name: str, begun_on: Kind | None = None) -> Kind | None:
        """This worker's kind for requests for that adapter (empty: for none). None: it has no such adapter. `begun_on`:
        the kind on which an answer has begun; a worker that still keeps that adapter, though for begun answers only,
        has this kind for it."""
        if not lora_name:
            return Kind(self.compat_digest)
        if begun_on is not None and (lora_name, begun_on.lora_digest) in self.leaving_adapters:
            return Kind(self.compat_digest, begun_on.lora_digest)
        lora_digest = self.lora_digests.get(lora_name)
        return None if lora_digest is None else Kind(self.compat_digest, lora_digest)

    def kinds_for(self, lora_name: str) -> list[Kind]:
        """The kinds on which answers for that adapter may have begun so that this worker can continue them."""
        kind = self.kind_for(lora_name)
        leaving = [Kind(self.compat_digest, digest) for name, digest in self.leaving_adapters if name == lora_name]
        return leaving if kind is None else [kind, *leaving]


class Load(NamedTuple):
    """How busy a worker reports to be. No protobuf message, for the same reason as `WorkerFacts`."""

    num_running: int
    num_active: int
    """Requests that run or wait there."""
    num_waiting_tokens: int
    num_free_seqs: int | None
    """How many more sequences it takes. None: it does not say."""
    num_blocks: int
    num_available_blocks: int
    """Blocks that are free, or cached and not being copied to the host."""
    num_used_blocks: int
    """Blocks of sequences and of grants."""
    is_draining: bool
    is_stalled: bool

    @classmethod
    def of(cls, load: pb.WorkerLoad) -> Load:
        blocks = load.blocks
        return cls(
            num_running=load.num_running,
            num_active=load.num_running + load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            num_free_seqs=load.num_free_seqs if load.HasField("num_free_seqs") else None,
            num_blocks=blocks.num_blocks,
            num_available_blocks=blocks.num_free + blocks.num_cached - load.host_blocks.num_saving,
            num_used_blocks=blocks.num_sequence + blocks.num_grant,
            is_draining=load.is_draining,
            is_stalled=load.is_stalled,
        )

    def has_freed_since(self, before: Load) -> bool:
        """Whether the worker has freed memory or a place for a request since `before`."""
        return self.num_available_blocks > before.num_available_blocks or self.num_active < before.num_active

    def may_help_since(self, before: Load) -> bool:
        """Whether a request that found no room at the time of `before` may find some now, or must no longer wait for
        this worker."""
        return (
            self.has_freed_since(before)
            or self.num_waiting_tokens < before.num_waiting_tokens
            or self.stands_otherwise_since(before)
        )

    def stands_otherwise_since(self, before: Load) -> bool:
        """Whether the worker has begun or ended to drain, or to be stalled, since `before`."""
        return self.is_draining != before.is_draining or self.is_stalled != before.is_stalled


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process."""

    record: pb.WorkerRecord
    """Change it through `take_record` only."""
    channel: grpc.aio.Channel
    session: WorkerSession | None = None
    key: WorkerKey = field(init=False)
    facts: WorkerFacts = field(init=False)
    load: Load = field(init=False)
    num_planned_blocks: int = 0
    """Blocks of requests planned here that the worker has not answered yet (Granted, Busy or tokens)."""
    num_planned_seqs: int = 0
    """The number of these requests."""
    num_prefill_tokens: int = 0
    """Prompt tokens of this router's requests that are being prefilled here."""
    is_full: bool = False
    """The worker said Busy, and none of its loads has shown since that it freed something."""
    refused_s: float = 0.0
    """When it last said Busy."""
    num_frees: int = 0
    """How many of its loads have shown that it freed something."""
    is_leaving: bool = False
    """The registry no longer has it: it gets no new work."""
    is_forgotten: bool = False
    """It is leaving and none of this router's requests is there: it will not come back. A slow client's request may
    still handle events of it later; `Account` then learns no pace from them, since no one would delete it again."""
    num_lost: int = 0
    """Sessions lost in a row."""

    def __post_init__(self) -> None:
        self.key = WorkerKey.of(self.record)
        self.take_record(self.record)
        self.load = Load.of(self.record.load)

    @property
    def is_usable(self) -> bool:
        """Whether it takes new work now."""
        return self.session is not None and self.session.is_open and not self.is_going and not self.load.is_stalled

    @property
    def is_expected(self) -> bool:
        """Whether it takes new work now, or will in a moment unless it is dead: its session is being opened."""
        return self.num_lost <= NUM_QUICK_RECONNECTS and not self.is_going

    @property
    def is_going(self) -> bool:
        """Whether it takes no new work any more."""
        return self.is_leaving or self.record.is_draining or self.load.is_draining

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be prefilled here: as reported, or as this router has planned, whichever is more."""
        return max(self.num_prefill_tokens, self.load.num_waiting_tokens)

    @property
    def num_available_blocks(self) -> int:
        return self.load.num_available_blocks - self.num_planned_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.load.num_used_blocks + self.num_planned_blocks

    def num_cached_tokens(self, num_cached_blocks: Mapping[WorkerKey, int]) -> int:
        """Tokens of a prompt that it has cached. `num_cached_blocks`: the prompt's blocks that each worker has."""
        return num_cached_blocks.get(self.key, 0) * self.facts.block_size

    def has_free_seqs(self, num_seqs: int) -> bool:
        """Whether it takes `num_seqs` more sequences. A worker that is asked for more says Busy, and the request
        returns to the front of the queue, before all fair shares: they would have no effect any more."""
        return self.load.num_free_seqs is None or self.load.num_free_seqs >= self.num_planned_seqs + num_seqs

    def has_room_to_move(self, num_tokens: int) -> bool:
        """Whether a prefill worker will not say Busy to a stream that moves there with `num_tokens` tokens: it would
        have half of its pool left, and beside other streams, which it expects to become twice as long, half of its
        sequences too."""
        if not self.is_usable or self.is_full or not self.has_free_seqs(1):
            return False
        load, num_own = self.load, self.facts.num_blocks(num_tokens)
        if 2 * (self.num_available_blocks - num_own) < load.num_blocks:
            return False
        if num_others := load.num_active + self.num_planned_seqs:
            if 4 * (self.num_used_blocks + num_own) > load.num_blocks:
                return False
            if load.num_free_seqs is not None and 2 * (num_others + 1) > load.num_active + load.num_free_seqs:
                return False
        return True

    def take_record(self, record: pb.WorkerRecord) -> None:
        """Take over the registry's current record of the same process. Not its load: the session's is newer."""
        self.record = record
        self.facts = WorkerFacts.of(record)

    def set_load(self, load: pb.WorkerLoad) -> bool:
        """Take over the reported load. Returns whether waiting requests may profit from it."""
        before, self.load = self.load, Load.of(load)
        has_freed = self.load.has_freed_since(before)
        is_to_be_asked = self.is_full and time.monotonic() - self.refused_s >= ASK_AGAIN_S
        self.num_frees += has_freed
        if has_freed or is_to_be_asked:
            self.is_full = False
        return is_to_be_asked or self.load.may_help_since(before)

    def note_busy(self, num_frees_when_asked: int) -> None:
        """The worker said Busy to a request that was sent when `num_frees` was `num_frees_when_asked`.

        If it has freed something since, the refusal may have come before or after. Then it does not count as full and
        is asked again: if that was the last thing it had to free, no later load would end its being full.
        """
        if self.num_frees == num_frees_when_asked:
            self.is_full, self.refused_s = True, time.monotonic()
