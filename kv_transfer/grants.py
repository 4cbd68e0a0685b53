"""Who may write where: the receiver's grants, as a pure state machine. No I/O, no clock, no callbacks, plain data.

                     begin_commit          finish_commit, no mismatch
    issue ──> GRANTED ──────────> VERIFYING ──────────> COMMITTED ──one lease──> (forgotten)
                 │  ^                │  │               blocks belong to the caller; the tombstone only
                 │  └───mismatch─────┘  │               answers a repeated Commit
                 └──────────┬───────────┘
                     revoke, drop_owner, expire
                            │
            ┌───────────────┴──────────────────┐
     no one-sided sender                 one is attached
            │                                  │
            v            it detaches, abandons, or its connection has
          FREED <─────── been gone for one lease ──────── QUARANTINED

A grant ends exactly once, and its blocks are then reported in exactly one of two ways: committed (`finish_commit`
returns COMMITTED) or free (the grant is in the list that revoke, drop_owner, expire, abandon, detach return). The
caller alone frees blocks. From the moment a grant ends, no write under it is accepted. Since grant ids and epochs are
never reused, a late write cannot reach the blocks' next owner.

A one-sided sender writes into the receiver's memory without asking, so it must `attach` to the grant first. Blocks that
it could still write to are not freed until it has said that it is done, or one lease after its connection was lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto


class GrantState(Enum):
    GRANTED = auto()
    VERIFYING = auto()
    COMMITTED = auto()
    QUARANTINED = auto()


class Verdict(Enum):
    ACCEPTED = auto()
    LATE = auto()
    """Not now: the grant is gone (its write is dropped and counted), or another sender is attached."""
    MALFORMED = auto()
    """A correct sender never makes this write: an error."""


@dataclass(frozen=True, slots=True)
class WriteCheck:
    verdict: Verdict
    reason: str = ""


class CommitStart(Enum):
    VERIFY = auto()
    """The caller must verify now, then call `finish_commit`."""
    COMMITTED = auto()
    """The grant was committed before; there is nothing to do."""
    GONE = auto()


class CommitResult(Enum):
    COMMITTED = auto()
    """The blocks now belong to the caller."""
    MISMATCH = auto()
    GONE = auto()
    """The grant ended while its blocks were verified: their content is meaningless."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A promise of `block_ids` to `owner`. The first `num_cached_blocks` are only read."""

    grant_id: int
    epoch: int
    owner: Hashable
    block_ids: tuple[int, ...]
    num_cached_blocks: int

    @property
    def writable_block_ids(self) -> tuple[int, ...]:
        return self.block_ids[self.num_cached_blocks :]


@dataclass(slots=True)
class _Entry:
    grant: Grant
    state: GrantState
    writable: frozenset[int]
    attachment_id: int = 0
    """Attachment of the one-sided sender that may be writing; 0: none."""
    lost_s: float | None = None
    """When that sender's connection was lost, if it was."""


@dataclass(slots=True)
class _Owner:
    seen_s: float
    """Time of the owner's last sign of life."""
    grant_ids: dict[int, None]
    """The owner's live grants, in the order of issue."""


@dataclass(slots=True)
class _Tombstone:
    epoch: int
    expires_s: float


@dataclass(slots=True)
class GrantCounters:
    num_issued: int = 0
    num_late_writes: int = 0
    """Blocks (of one layer each) that were pushed and dropped because their grant was gone."""
    num_expired_leases: int = 0
    """Grants that expired because their owner gave no sign of life."""
    num_mismatched_blocks: int = 0
    """Blocks whose digests differed at a commit, in any layer."""


@dataclass(slots=True)
class GrantTable:
    """All grants of one receiver. Times are seconds of the caller's one monotonic clock."""

    incarnation: str
    num_layers: int
    num_blocks: int
    block_bytes: int
    lease_s: float
    counters: GrantCounters = field(default_factory=GrantCounters)
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _tombstones: OrderedDict[int, _Tombstone] = field(default_factory=OrderedDict)
    """By grant id, in the order of expiry."""
    _owners: dict[Hashable, _Owner] = field(default_factory=dict)
    """The owners that have a live grant."""
    _lost: dict[int, None] = field(default_factory=dict)
    """Grants whose attached sender has lost its connection, in that order."""
    _next_number: int = 1
    """Id and epoch of the next grant."""
    _next_attachment_id: int = 1

    # -- owners --

    def issue(self, owner: Hashable, block_ids: Sequence[int], num_cached_blocks: int, now_s: float) -> Grant:
        """Promise `block_ids`, which the caller has taken from its free blocks, to `owner` until one lease after its
        last sign of life (this call is one)."""
        assert 0 <= num_cached_blocks <= len(block_ids), (num_cached_blocks, len(block_ids))
        assert all(0 <= block_id < self.num_blocks for block_id in block_ids), block_ids
        grant = Grant(self._next_number, self._next_number, owner, tuple(block_ids), num_cached_blocks)
        writable = frozenset(grant.writable_block_ids)
        assert len(writable) == len(grant.writable_block_ids), "a block twice in one grant"
        self._next_number += 1
        self._entries[grant.grant_id] = _Entry(grant, GrantState.GRANTED, writable)
        held = self._owners.setdefault(owner, _Owner(now_s, {}))
        held.seen_s = now_s
        held.grant_ids[grant.grant_id] = None
        self.counters.num_issued += 1
        return grant

    @property
    def num_grants(self) -> int:
        """How many grants are neither committed nor freed."""
        return len(self._entries)

    def renew(self, owner: Hashable, now_s: float) -> None:
        """Record a sign of life of `owner`: all its leases restart."""
        held = self._owners.get(owner)
        if held is not None:
            held.seen_s = now_s

    def revoke(self, grant_id: int) -> list[Grant]:
        """End a grant. Returns it if its blocks are free at once; else a later call returns it.

        Does nothing if the grant has already ended (a committed grant's blocks belong to the caller)."""
        entry = self._entries.get(grant_id)
        if entry is None or entry.state is GrantState.QUARANTINED:
            return []
        entry.state = GrantState.QUARANTINED
        self._disown(entry.grant)
        return self._free_if_unreachable(entry)

    def drop_owner(self, owner: Hashable) -> list[Grant]:
        """`owner` is gone: revoke all its grants."""
        held = self._owners.get(owner)
        grant_ids = [] if held is None else list(held.grant_ids)
        return [freed for grant_id in grant_ids for freed in self.revoke(grant_id)]

    def expire(self, now_s: float) -> list[Grant]:
        """End everything whose lease is over: grants of silent owners, lost one-sided senders, tombstones."""
        silent = [held for held in self._owners.values() if now_s - held.seen_s >= self.lease_s]
        expired = [grant_id for held in silent for grant_id in held.grant_ids]
        self.counters.num_expired_leases += len(expired)
        freed = [grant for grant_id in expired for grant in self.revoke(grant_id)]
        for grant_id in list(self._lost):
            entry = self._entries[grant_id]
            assert entry.lost_s is not None
            if now_s - entry.lost_s >= self.lease_s:
                freed += self._end_attachment(entry)
        while self._tombstones and next(iter(self._tombstones.values())).expires_s <= now_s:
            self._tombstones.popitem(last=False)
        return freed

    def next_expiry_s(self) -> float | None:
        """When `expire` must be called next; None while nothing can expire.

        Every deadline is one lease after its event, so that a later event never brings an earlier deadline."""
        deadlines = [held.seen_s + self.lease_s for held in self._owners.values()]
        lost = [self._entries[grant_id].lost_s for grant_id in self._lost]
        deadlines += [lost_s + self.lease_s for lost_s in lost if lost_s is not None]
        if self._tombstones:
            deadlines.append(next(iter(self._tombstones.values())).expires_s)
        return min(deadlines, default=None)

    # -- senders --

    def check_write(
        self, grant_id: int, epoch: int, incarnation: str, layer: int, block_ids: Sequence[int], num_bytes: int
    ) -> WriteCheck:
        """Check whether `num_bytes` bytes may be written into `block_ids` of `layer` now. Counts late blocks."""
        entry = self._writable_entry(grant_id, epoch, incarnation)
        if entry is None:
            self.counters.num_late_writes += len(block_ids)
            return WriteCheck(Verdict.LATE, f"grant {grant_id} of epoch {epoch} is gone")
        if not 0 <= layer < self.num_layers:
            return WriteCheck(Verdict.MALFORMED, f"layer {layer} is not below {self.num_layers}")
        if num_bytes != len(block_ids) * self.block_bytes:
            wanted = len(block_ids) * self.block_bytes
            return WriteCheck(Verdict.MALFORMED, f"{len(block_ids)} blocks are {wanted} bytes, not {num_bytes}")
        if not block_ids:
            return WriteCheck(Verdict.MALFORMED, "a write of no blocks")
        foreign = [block_id for block_id in block_ids if block_id not in entry.writable]
        if foreign:
            cached = " (it is cached)" if foreign[0] in entry.grant.block_ids else ""
            return WriteCheck(Verdict.MALFORMED, f"block {foreign[0]} is not grant {grant_id}'s to write{cached}")
        return WriteCheck(Verdict.ACCEPTED)

    def attach(self, grant_id: int, epoch: int, incarnation: str) -> tuple[WriteCheck, int]:
        """Attach a one-sided sender that is about to write. Returns the verdict and, if accepted, an attachment id.

        One at a time: a second sender needs a new grant, or must wait until the first has detached or abandoned."""
        entry = self._writable_entry(grant_id, epoch, incarnation)
        if entry is None:
            return WriteCheck(Verdict.LATE, f"grant {grant_id} of epoch {epoch} is gone"), 0
        if entry.attachment_id:
            return WriteCheck(Verdict.LATE, f"another sender may be writing under grant {grant_id}"), 0
        entry.attachment_id = self._next_attachment_id
        self._next_attachment_id += 1
        return WriteCheck(Verdict.ACCEPTED), entry.attachment_id

    def detach(self, grant_id: int, attachment_id: int) -> list[Grant]:
        """The attached sender will write no more. Returns the grant if this frees its blocks."""
        entry = self._entries.get(grant_id)
        if entry is None or entry.attachment_id != attachment_id:
            return []
        return self._end_attachment(entry)

    def sender_gone(self, grant_id: int, attachment_id: int, now_s: float) -> None:
        """The attached sender's connection broke; its writes in flight may still arrive for at most one lease."""
        entry = self._entries.get(grant_id)
        if entry is not None and entry.attachment_id == attachment_id:
            entry.lost_s = now_s
            self._lost[grant_id] = None

    def abandon(self, grant_id: int, epoch: int, incarnation: str) -> list[Grant]:
        """A sender says that it will write no more under this grant. A live grant stays, for another sender."""
        entry = self._entry_of(grant_id, epoch, incarnation)
        return [] if entry is None else self._end_attachment(entry)

    def begin_commit(self, grant_id: int, epoch: int, incarnation: str) -> CommitStart:
        """The sender says that all blocks are written. Until `finish_commit`, no write is accepted.

        One at a time per grant: the caller lets a second Commit wait for the first."""
        if incarnation != self.incarnation:
            return CommitStart.GONE
        tombstone = self._tombstones.get(grant_id)
        if tombstone is not None and tombstone.epoch == epoch:
            return CommitStart.COMMITTED
        entry = self._entry_of(grant_id, epoch, incarnation)
        if entry is None or entry.state is GrantState.QUARANTINED:
            return CommitStart.GONE
        assert entry.state is GrantState.GRANTED, "one Commit of a grant at a time"
        entry.state = GrantState.VERIFYING
        return CommitStart.VERIFY

    def finish_commit(self, grant_id: int, epoch: int, num_mismatched_blocks: int, now_s: float) -> CommitResult:
        """Verification has ended. COMMITTED passes the blocks to the caller; no call returns the grant again."""
        entry = self._entries.get(grant_id)
        if entry is None or entry.grant.epoch != epoch or entry.state is not GrantState.VERIFYING:
            return CommitResult.GONE
        if num_mismatched_blocks:
            self.counters.num_mismatched_blocks += num_mismatched_blocks
            entry.state = GrantState.GRANTED
            return CommitResult.MISMATCH
        self._end_attachment(entry)
        del self._entries[grant_id]
        self._tombstones[grant_id] = _Tombstone(epoch, now_s + self.lease_s)
        self._disown(entry.grant)
        return CommitResult.COMMITTED

    def forget_commit(self, grant_id: int) -> None:
        """The caller rejected the blocks from `finish_commit`: let a repeated Commit find no grant."""
        self._tombstones.pop(grant_id, None)

    # -- views --

    def grant(self, grant_id: int) -> Grant | None:
        """The grant, or None if it has ended."""
        entry = self._entries.get(grant_id)
        return None if entry is None or entry.state is GrantState.QUARANTINED else entry.grant

    def state(self, grant_id: int) -> GrantState | None:
        """The grant's state; None if it was never made, is freed, or is forgotten."""
        if grant_id in self._tombstones:
            return GrantState.COMMITTED
        entry = self._entries.get(grant_id)
        return None if entry is None else entry.state

    def open_grants(self) -> dict[int, tuple[int, ...]]:
        """By grant id: the blocks of each grant that promises memory now, or has ended but may still be written to.
        Without grants that are being committed, whose blocks are changing owners."""
        return {
            grant_id: entry.grant.block_ids
            for grant_id, entry in self._entries.items()
            if entry.state in (GrantState.GRANTED, GrantState.QUARANTINED)
        }

    def reserved_block_ids(self) -> list[int]:
        """Blocks of all grants that are neither committed nor freed, cached ones included."""
        return [block_id for entry in self._entries.values() for block_id in entry.grant.block_ids]

    def _entry_of(self, grant_id: int, epoch: int, incarnation: str) -> _Entry | None:
        entry = self._entries.get(grant_id)
        if entry is None or incarnation != self.incarnation or entry.grant.epoch != epoch:
            return None
        return entry

    def _writable_entry(self, grant_id: int, epoch: int, incarnation: str) -> _Entry | None:
        entry = self._entry_of(grant_id, epoch, incarnation)
        return entry if entry is not None and entry.state is GrantState.GRANTED else None

    def _disown(self, grant: Grant) -> None:
        held = self._owners[grant.owner]
        del held.grant_ids[grant.grant_id]
        if not held.grant_ids:
            del self._owners[grant.owner]

    def _end_attachment(self, entry: _Entry) -> list[Grant]:
        entry.attachment_id, entry.lost_s = 0, None
        self._lost.pop(entry.grant.grant_id, None)
        return self._free_if_unreachable(entry)

    def _free_if_unreachable(self, entry: _Entry) -> list[Grant]:
        if entry.state is not GrantState.QUARANTINED or entry.attachment_id:
            return []
        del self._entries[entry.grant.grant_id]
        return [entry.grant]
