"""Every interleaving of grants, writes, commits, cancels, deaths and timers, through the grant table of decode workers.

The model is a receiver with two blocks of memory, a router that is granted them, and a sender for every grant. A
streaming sender's writes are checked by the receiver as they arrive; a one-sided sender's writes land in memory
unasked: early, late, or never. In every state, the test checks that each block is either free, reserved or committed;
that committed blocks hold only what their own sender wrote, for as long as they are used; and that, if everybody falls
silent from here on, all that is not committed is free again after two leases. Mechanisms are then removed, one at a
time: each removal must be noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cloning import clone

from kv_transfer.grants import (
    CommitResult,
    CommitStart,
    Grant,
    GrantCounters,
    GrantState,
    GrantTable,
    Verdict,
    WriteCheck,
)

LEASE_S = 1
NUM_BLOCKS = 2
NUM_GRANTS = 2
INCARNATION = "i"
CORRUPT = "corrupt"
NO_COUNTERS = GrantCounters()


@dataclass
class Write:
    """A write of one block, on its way. `lost_s`: when its sender's connection was lost; after that the write lands
    within one lease, or never."""

    grant: Grant
    content: str
    lost_s: int | None = None
    is_stray: bool = False
    """Whether it is a repetition that its sender knows nothing of."""


@dataclass
class Sender:
    """A sender. Its next `step` is "attach", "post", "drain", "commit", "verify", "finish", "stop" or "done"."""

    grant: Grant
    is_one_sided: bool
    step: str
    attachment_id: int = 0
    is_alive: bool = True
    num_mismatched: int = 0


def content_of(grant: Grant) -> str:
    return f"of grant {grant.grant_id}"


@dataclass
class World:
    table: GrantTable
    num_faults: int
    now_s: int = 0
    num_issued: int = 0
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    committed: dict[int, str] = field(default_factory=dict)
    memory: dict[int, str] = field(default_factory=lambda: dict.fromkeys(range(NUM_BLOCKS), ""))
    wire: list[Write] = field(default_factory=list)
    senders: list[Sender] = field(default_factory=list)

    def fork(self, num_faults: int = 0) -> World:
        after: World = clone(self)
        after.num_faults -= num_faults
        return after

    def key(self) -> str:
        """Everything that decides what may happen next: counters do not."""
        counters, self.table.counters = self.table.counters, NO_COUNTERS
        key = repr(self)
        self.table.counters = counters
        return key

    def take_back(self, grants: list[Grant]) -> None:
        """Free the blocks of `grants`, as a receiver does in one place only."""
        for grant in grants:
            for block_id in grant.block_ids:
                assert block_id not in self.free, "freed twice"
                self.free.append(block_id)

    def tick(self) -> None:
        self.now_s += 1
        self.wire = [w for w in self.wire if w.lost_s is None or self.now_s - w.lost_s < LEASE_S]
        self.take_back(self.table.expire(self.now_s))

    def check(self) -> None:
        reserved = self.table.reserved_block_ids()
        owned = sorted([*self.free, *reserved, *self.committed])
        assert owned == list(range(NUM_BLOCKS)), f"free {self.free}, reserved {reserved}, committed {self.committed}"
        for block_id, content in self.committed.items():
            assert self.memory[block_id] == content, f"block {block_id} is {content} and holds {self.memory[block_id]}"


def successors(world: World) -> Iterator[World]:
    """All worlds that one event leads to."""
    if world.free and world.num_issued < NUM_GRANTS:
        for is_one_sided in (False, True):
            after = world.fork()
            grant = after.table.issue("router", [after.free.pop()], 0, after.now_s)
            after.num_issued += 1
            after.senders.append(Sender(grant, is_one_sided, "attach" if is_one_sided else "post"))
            yield after
    for i in range(len(world.wire)):
        after = world.fork()
        land(after, after.wire.pop(i))
        yield after
    for i, sender in enumerate(world.senders):
        if sender.is_alive and sender.step != "done":
            after = world.fork()
            if advance(after, after.senders[i]):
                yield after
    for block_id in world.committed:
        after = world.fork()  # the request that uses the block has ended
        del after.committed[block_id]
        after.free.append(block_id)
        yield after
    if world.num_faults:
        yield from faults(world)


def land(world: World, write: Write) -> None:
    block_id = write.grant.block_ids[0]
    sender = next(s for s in world.senders if s.grant == write.grant)
    if not sender.is_one_sided:
        check = world.table.check_write(write.grant.grant_id, write.grant.epoch, INCARNATION, 0, [block_id], 1)
        if check.verdict is not Verdict.ACCEPTED:
            assert check.verdict is Verdict.LATE
            return
    world.memory[block_id] = write.content


def advance(world: World, sender: Sender) -> bool:
    """Make the sender's next step. Returns False if the sender must wait."""
    table, grant = world.table, sender.grant
    name = (grant.grant_id, grant.epoch, INCARNATION)
    match sender.step:
        case "attach":
            check, sender.attachment_id = table.attach(*name)
            sender.step = "post" if check.verdict is Verdict.ACCEPTED else "done"
        case "post":
            world.wire.append(Write(grant, content_of(grant)))
            sender.step = "drain"
        case "drain":
            if any(write.grant == grant and not write.is_stray for write in world.wire):
                return False
            sender.step = "commit"
        case "commit":
            match table.begin_commit(*name):
                case CommitStart.VERIFY:
                    sender.step = "verify"
                case CommitStart.GONE:
                    sender.step = "stop"
                case CommitStart.COMMITTED:
                    sender.step = "done"
        case "verify":
            sender.num_mismatched = int(world.memory[grant.block_ids[0]] != content_of(grant))
            sender.step = "finish"
        case "finish":
            match table.finish_commit(grant.grant_id, grant.epoch, sender.num_mismatched, world.now_s):
                case CommitResult.COMMITTED:
                    world.committed[grant.block_ids[0]] = content_of(grant)
                    sender.step = "done"
                case CommitResult.MISMATCH:
                    sender.step = "post"
                case CommitResult.GONE:
                    sender.step = "stop"
        case "stop":
            if any(write.grant == grant for write in world.wire):
                return False
            world.take_back(table.abandon(*name))
            sender.step = "done"
    return True


def faults(world: World) -> Iterator[World]:
    """A cancel, silence for a lease, a death, a write that is lost, damaged or repeated, a commit that is repeated."""
    for sender in world.senders:
        if world.table.grant(sender.grant.grant_id) is not None:
            after = world.fork(1)
            after.take_back(after.table.revoke(sender.grant.grant_id))
            yield after
    after = world.fork(1)
    after.tick()
    yield after
    for i, sender in enumerate(world.senders):
        if sender.is_alive and sender.step != "done":
            after = world.fork(1)
            dead = after.senders[i]
            for write in after.wire:
                if write.grant == dead.grant:
                    write.lost_s = after.now_s
            if dead.attachment_id:
                after.table.sender_gone(dead.grant.grant_id, dead.attachment_id, after.now_s)
            dead.is_alive = dead.step in ("verify", "finish")  # the receiver makes these steps, and answers nobody
            yield after
    for i, write in enumerate(world.wire):
        after = world.fork(1)
        del after.wire[i]
        yield after
        after = world.fork(1)
        after.wire[i].content = CORRUPT
        yield after
        if not next(s for s in world.senders if s.grant == write.grant).is_one_sided:
            after = world.fork(1)
            after.wire.append(replace(write, is_stray=True))
            yield after
    for i, sender in enumerate(world.senders):
        if (
            sender.is_alive
            and sender.step == "done"
            and world.table.state(sender.grant.grant_id) is GrantState.COMMITTED
        ):
            after = world.fork(1)
            after.senders[i].step = "commit"
            yield after


def check_silence(world: World) -> None:
    """From now on everybody is silent: nothing is reserved after two leases, one since the last sign of life, and one
    in which writes may still land."""
    if not world.table.reserved_block_ids():
        return
    after = world.fork()
    for sender in after.senders:
        while sender.step in ("verify", "finish"):
            advance(after, sender)
        if sender.attachment_id and sender.is_alive:
            after.table.sender_gone(sender.grant.grant_id, sender.attachment_id, after.now_s)
    for _ in range(2):
        after.tick()
    assert not after.table.reserved_block_ids(), "leaked"


def explore(num_faults: int) -> int:
    """Visit every reachable world. Returns the number of worlds."""
    table = GrantTable(
        incarnation=INCARNATION, num_layers=1, num_blocks=NUM_BLOCKS, block_bytes=1, lease_s=float(LEASE_S)
    )
    first = World(table, num_faults, free=[0])
    first.committed[1] = first.memory[1] = "of somebody else"
    frontier, seen = deque([first]), {first.key()}
    while frontier:
        world = frontier.popleft()
        world.check()
        check_silence(world)
        for after in successors(world):
            key = after.key()
            if key not in seen:
                seen.add(key)
                frontier.append(after)
    return len(seen)


@pytest.mark.parametrize("num_faults", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_interleaving(num_faults: int) -> None:
    assert explore(num_faults) > 100


def accept_everything(self: GrantTable, grant_id: int, *_: object) -> WriteCheck:
    return WriteCheck(Verdict.ACCEPTED)


def write_while_verifying(self: GrantTable, grant_id: int, epoch: int, incarnation: str) -> object:
    entry = self._entries.get(grant_id)
    return entry if entry is not None and entry.state is not GrantState.QUARANTINED else None


def free_at_once(self: GrantTable, entry: Any) -> list[Grant]:
    if entry.state is not GrantState.QUARANTINED:
        return []
    self._lost.pop(entry.grant.grant_id, None)
    del self._entries[entry.grant.grant_id]
    return [entry.grant]


def believe_the_sender(self: GrantTable, grant_id: int, epoch: int, num_mismatched: int, now_s: float) -> CommitResult:
    return FINISH_COMMIT(self, grant_id, epoch, 0, now_s)


def never_expire(self: GrantTable, now_s: float) -> list[Grant]:
    return []


FINISH_COMMIT = GrantTable.finish_commit


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mechanism", "without", "num_faults", "what"),
    [
        ("check_write", accept_everything, 1, "and holds"),
        ("_writable_entry", write_while_verifying, 2, "and holds"),
        ("_free_if_unreachable", free_at_once, 1, "and holds"),
        ("finish_commit", believe_the_sender, 1, "and holds"),
        ("expire", never_expire, 1, "leaked"),
        ("sender_gone", lambda *_: None, 1, "leaked"),
    ],
)
def test_each_mechanism_is_missed(
    mechanism: str, without: object, num_faults: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mechanism, so many faults are enough for a wrong state."""
    monkeypatch.setattr(GrantTable, mechanism, without)
    with pytest.raises(AssertionError, match=what):
        explore(num_faults)
