"""What the router keeps of one worker process: what it says of itself, and what was planned on it since."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from protos import tandem_worker_pb2 as pb
from router.request_events import WorkerKey
from router.served_kind import Kind
from router.worker_session import WorkerSession

NUM_QUICK_RECONNECTS = 4
"""Requests wait for a worker whose session was lost until this many tries to open another have failed."""
ASK_AGAIN_S = 1.0
"""A worker that said Busy is asked again after so long though nothing was seen to be freed: what another router's
request takes and gives back within a step is in no load, and the worker would be full for ever."""


class WorkerFacts(NamedTuple):
    """What a worker says of itself that plans are made by. It is asked for far more often than it changes, for each
    request of each worker: hence no message, whose fields take as long to read as all the rest that is done with them.
    """

    role: pb.Role
    compat_digest: str
    block_size: int
    max_model_len: int
    transport: str
    can_generate: bool
    lora_digests: dict[str, str]
    """Of its adapters, by name; empty where its version does not say. Not to be written to."""
    adapters: frozenset[tuple[str, str]]
    """The same, to be counted: most workers have the same ones."""
    leaving_adapters: frozenset[tuple[str, str]]
    """Likewise of those that only answers get which have begun with them."""

    @classmethod
    def of(cls, record: pb.WorkerRecord) -> WorkerFacts:
        lora_digests = {name: record.lora_digests.get(name, "") for name in record.model.lora_names}
        return cls(
            role=record.role,
            compat_digest=record.compat_digest,
            block_size=record.model.block_size,
            max_model_len=record.model.max_model_len,
            transport=record.transport,
            can_generate=record.can_generate,
            lora_digests=lora_digests,
            adapters=frozenset(lora_digests.items()),
            leaving_adapters=frozenset((each.lora_name, each.lora_digest) for each in record.leaving_loras),
        )

    def kind_for(self, lora_name: str, begun_on: Kind | None = None) -> Kind | None:
        """Of this worker, for requests for that adapter (empty: for none). None: it has no such adapter. `begun_on`:
        the kind that an answer has begun on, which the worker is for it where it has that adapter yet."""
        if not lora_name:
            return Kind(self.compat_digest)
        if begun_on is not None and (lora_name, begun_on.lora_digest) in self.leaving_adapters:
            return Kind(self.compat_digest, begun_on.lora_digest)
        lora_digest = self.lora_digests.get(lora_name)
        return None if lora_digest is None else Kind(self.compat_digest, lora_digest)

    def kinds_for(self, lora_name: str) -> list[Kind]:
        """That answers for that adapter may have begun on, to go on here."""
        kind = self.kind_for(lora_name)
        leaving = [Kind(self.compat_digest, digest) for name, digest in self.leaving_adapters if name == lora_name]
        return leaving if kind is None else [kind, *leaving]


class Load(NamedTuple):
    """What a worker says of how busy it is; no message, as `WorkerFacts`."""

    num_running: int
    num_active: int
    """Running, or waiting there."""
    num_waiting_tokens: int
    num_free_seqs: int | None
    """How many more it takes. None: it does not say."""
    num_blocks: int
    num_available_blocks: int
    """Free, or cached and not just being copied to the host."""
    num_used_blocks: int
    """Of sequences, and granted."""
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
        """Whether it tells of memory, or of a place, that was not free before."""
        return self.num_available_blocks > before.num_available_blocks or self.num_active < before.num_active

    def may_help_since(self, before: Load) -> bool:
        """Whether somebody who found no room then may find some now, or may not wait for this worker any more."""
        return (
            self.has_freed_since(before)
            or self.num_waiting_tokens < before.num_waiting_tokens
            or self.stands_otherwise_since(before)
        )

    def stands_otherwise_since(self, before: Load) -> bool:
        """Whether it takes new work now and did not then, or the other way round."""
        return self.is_draining != before.is_draining or self.is_stalled != before.is_stalled


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process."""

    record: pb.WorkerRecord
    """To change it, `take_record`."""
    channel: grpc.aio.Channel
    session: WorkerSession | None = None
    key: WorkerKey = field(init=False)
    facts: WorkerFacts = field(init=False)
    load: Load = field(init=False)
    num_planned_blocks: int = 0
    """Of requests planned here whose Granted or Busy has not come yet."""
    num_planned_seqs: int = 0
    """These requests."""
    num_prefill_tokens: int = 0
    """Of this router's requests that are being prefilled here."""
    is_full: bool = False
    """It said Busy, and has freed nothing since, for all that its loads show."""
    refused_s: float = 0.0
    """When it did."""
    num_frees: int = 0
    """How often its load has shown that it freed something."""
    is_leaving: bool = False
    """Gone from the registry: no new work."""
    is_forgotten: bool = False
    """And nothing of ours is there: it will not come back. A client that reads slowly may yet make something of what it
    has said, of which nobody learns for those that come later."""
    num_lost: int = 0
    """Sessions lost in a row."""

    def __post_init__(self) -> None:
        self.key = WorkerKey(self.record.worker_id, self.record.incarnation)
        self.take_record(self.record)
        self.load = Load.of(self.record.load)

    @property
    def is_usable(self) -> bool:
        """It takes new work now."""
        return self.session is not None and self.session.is_open and not self.is_going and not self.load.is_stalled

    @property
    def is_expected(self) -> bool:
        """It takes new work now, or will in a moment unless it is dead: its session is being opened."""
        return self.num_lost <= NUM_QUICK_RECONNECTS and not self.is_going

    @property
    def is_going(self) -> bool:
        """It takes no new work any more."""
        return self.is_leaving or self.record.is_draining or self.load.is_draining

    @property
    def num_queued_tokens(self) -> int:
        """Still to be prefilled: as it says, or as this router has just planned."""
        return max(self.num_prefill_tokens, self.load.num_waiting_tokens)

    @property
    def num_available_blocks(self) -> int:
        return self.load.num_available_blocks - self.num_planned_blocks

    @property
    def has_free_seqs(self) -> bool:
        """Whether it takes another sequence, as far as their number goes. One that is asked for more says Busy, and who
        was planned there comes back to go before all that wait: nobody's share would be asked any more."""
        return self.load.num_free_seqs is None or self.load.num_free_seqs > self.num_planned_seqs

    def take_record(self, record: pb.WorkerRecord) -> None:
        """Of the same process, as the registry has it now. Its load is older than what the session says."""
        self.record = record
        self.facts = WorkerFacts.of(record)

    def set_load(self, load: pb.WorkerLoad) -> bool:
        """Returns whether that is news to those who wait."""
        before, self.load = self.load, Load.of(load)
        has_freed = self.load.has_freed_since(before)
        is_to_be_asked = self.is_full and time.monotonic() - self.refused_s >= ASK_AGAIN_S
        self.num_frees += has_freed
        if has_freed or is_to_be_asked:
            self.is_full = False
        return is_to_be_asked or self.load.may_help_since(before)

    def note_busy(self, num_frees_when_asked: int) -> None:
        """It refused a request that was sent when `num_frees` was `num_frees_when_asked`.

        If it has freed something since, nobody knows whether the refusal came before or after: then it is asked again,
        for if that was the last thing it had to free, no load would ever come to say that it is full no more.
        """
        if self.num_frees == num_frees_when_asked:
            self.is_full, self.refused_s = True, time.monotonic()
