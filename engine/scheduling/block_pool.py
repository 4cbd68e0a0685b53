"""Counts who uses each block of a pool, and evicts. Integers only, no torch.

Owns the block ids and the pool's `PrefixCache`. Does not own the blocks' memory, and does not know sequences
(`engine.scheduling.block_manager`).

    FREE ──take──> used (by a SEQUENCE, a GRANT or HELD), referenced once or more
     ^  ^                           │ last reference dropped
     │  └────────not findable───────┤
     └──evict── CACHED <──findable──┘
                 │ └──prefix match, add_ref──> used again
                 └──oldest, and few are free──> CACHED, being saved: not evicted before that is done

A block in several tables counts for the strongest kind: SEQUENCE, then GRANT, then HELD. The five counts (free, cached
and these three) always sum up to the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.scheduling.block_ledger import BlockLedger, BlockOwner, HostLedger
from engine.scheduling.evictor import LRUEvictor
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.prefix_cache import PrefixCache

READY_SHARE = 4
"""With host memory, one block in READY_SHARE is kept free, or cached and saved, or being saved: so many can be taken at
once without losing a cached prefix. A prompt that needs more does not wait: it evicts blocks that have no copy."""
SAVES_AT_ONCE = 1024
"""Limits how many blocks are being saved at once, since those cannot be evicted meanwhile. More than a step fills, so
that the copies keep up."""


class BlockPool:
    """References to the blocks of one pool, by kind of owner. Nothing else makes a block free."""

    def __init__(self, num_blocks: int, prefixes: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.prefixes = prefixes
        self._free: deque[int] = deque(range(num_blocks))
        self._evictor = LRUEvictor()
        self._refs = [[0] * num_blocks for _ in BlockOwner]
        self._num_owned = [0 for _ in BlockOwner]
        self._num_to_be_ready = max(1, num_blocks // READY_SHARE) if prefixes.offloading.num_host_blocks else 0
        self._saving: set[int] = set()
        self._num_saving_unused = 0
        """How many blocks of `_saving` nobody uses."""

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._evictor)

    @property
    def is_saving(self) -> bool:
        return bool(self._saving)

    def is_evictable(self, block_id: int) -> bool:
        """Whether the block is only cached, so that `num_available` counts it."""
        return block_id in self._evictor

    def ledger(self) -> BlockLedger:
        num_cached = len(self._evictor) + self._num_saving_unused
        return BlockLedger(self.num_blocks, len(self._free), num_cached, *self._num_owned)

    def host_ledger(self) -> HostLedger:
        return self.prefixes.offloading.ledger(self._num_saving_unused)

    # -- references ---------------------------------------------------------------------------------------------

    def take(self, owner: BlockOwner) -> int:
        """Reference a free block, or evict a cached one if none is free. `num_available` must not be 0."""
        if not self._free:
            self._evict_oldest()
        block_id = self._free.popleft()
        self.add_ref(block_id, owner)
        return block_id

    def add_ref(self, block_id: int, owner: BlockOwner) -> None:
        """Reference a block that is cached or used; it can no longer be evicted."""
        before = self._owner_of(block_id)
        if before is None and block_id in self._evictor:
            self._evictor.remove(block_id)
        self._refs[owner][block_id] += 1
        self._count_owned(block_id, before, self._owner_of(block_id))

    def drop_ref(self, block_id: int, owner: BlockOwner) -> None:
        """Drop one reference. After the last one, the block is cached if it can be found, else free."""
        before = self._owner_of(block_id)
        self._refs[owner][block_id] -= 1
        after = self._owner_of(block_id)
        self._count_owned(block_id, before, after)
        if after is None and block_id not in self._saving:
            if block_id in self.prefixes:
                self._evictor.add(block_id)
            else:
                self._free.append(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Let these blocks, where nobody uses them, be evicted after all that are cached now."""
        for block_id in block_ids:
            if block_id in self._evictor:
                self._evictor.remove(block_id)
                self._evictor.add(block_id)

    def evict_first(self, block_ids: Iterable[int]) -> None:
        """Let these blocks, where nobody uses them, be evicted before all others, the last one first."""
        for block_id in block_ids:
            if block_id in self._evictor:
                self._evictor.make_oldest(block_id)

    def forget_prefixes(self) -> bool:
        """Free all blocks that are only cached; copies on the host stay. Returns False if prefixes can still be found
        in the pool, because their blocks are in use or being copied."""
        while self._evictor:
            self._evict_oldest()
        return not self.prefixes

    def release(self, block_ids: Iterable[int]) -> None:
        """Free those of these blocks that nobody uses. None of them can be found any more."""
        for block_id in block_ids:
            if block_id in self._evictor:
                self._evictor.remove(block_id)
                self._free.append(block_id)

    def prefer(self, block_id: int, block_hash: bytes) -> None:
        """Make a used block findable by `block_hash`. If nobody uses the one that has been, that one becomes free."""
        other = self.prefixes.block_of(block_hash)
        if other is not None and other in self._evictor:
            self.prefixes.replace(other, block_id)
            self.release([other])
        else:
            self.prefixes.store(block_id, block_hash)

    def _evict_oldest(self) -> None:
        self.release(self.prefixes.drop(self._evictor.oldest))

    def _owner_of(self, block_id: int) -> BlockOwner | None:
        in_sequences, in_grants, held = self._refs  # no loop: called for each block of a prompt, while streams wait
        if in_sequences[block_id]:
            return BlockOwner.SEQUENCE
        if in_grants[block_id]:
            return BlockOwner.GRANT
        return BlockOwner.HELD if held[block_id] else None

    def _count_owned(self, block_id: int, before: BlockOwner | None, after: BlockOwner | None) -> None:
        if before is not None:
            self._num_owned[before] -= 1
        if after is not None:
            self._num_owned[after] += 1
        if block_id in self._saving:
            self._num_saving_unused += (after is None) - (before is None)

    # -- copies to host memory ----------------------------------------------------------------------------------

    def save_ahead(self) -> list[BlockCopy]:
        """Begin to save the oldest cached blocks, until enough blocks are ready or being saved, or SAVES_AT_ONCE are
        being saved. Returns the copies to make; `end_save` must follow each."""
        offloading, copies = self.prefixes.offloading, list[BlockCopy]()
        while (
            len(self._saving) < SAVES_AT_ONCE
            and len(self._free) + self._evictor.num_ready + len(self._saving) < self._num_to_be_ready
        ):
            block_id = self._evictor.next_waiting
            if block_id is None:
                break
            block_hash = self.prefixes.hash_of(block_id)
            if block_hash in offloading:
                self._evictor.remove(block_id)
                self._evictor.add_ready(block_id)
                continue
            copy = offloading.begin_save(block_id, block_hash)
            if copy is None:
                break
            self._evictor.remove(block_id)
            self._saving.add(block_id)
            self._num_saving_unused += 1
            copies.append(copy)
        return copies

    def end_save(self, copy: BlockCopy) -> None:
        self._saving.remove(copy.block_id)
        is_findable = copy.block_id in self.prefixes
        self.prefixes.offloading.end_save(copy.host_block_id, is_wanted=is_findable)
        if self._owner_of(copy.block_id) is None:
            self._num_saving_unused -= 1
            if is_findable:
                self._evictor.add_ready(copy.block_id)
            else:
                self._free.append(copy.block_id)

    # -- the audit ----------------------------------------------------------------------------------------------

    def check_integrity(self, refs: list[list[int]]) -> list[str]:
        """Recount the pool. `refs`: the references that there should be, by kind of owner and block. Returns one
        sentence per error; empty if there are none."""
        problems = []
        if refs != self._refs:
            problems.append("reference counts differ from the block tables")
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a block is free twice")
        for block_id in range(self.num_blocks):
            is_used = any(refs[owner][block_id] for owner in BlockOwner)
            is_saved = block_id in self._saving and not is_used
            places = is_used + (block_id in free) + (block_id in self._evictor) + is_saved
            if places != 1:
                problems.append(f"block {block_id} is in {places} places")
            if block_id in free and block_id in self.prefixes:
                problems.append(f"free block {block_id} has a hash")
            if block_id in self._evictor and block_id not in self.prefixes:
                problems.append(f"cached block {block_id} has no hash")
        if not self.ledger().is_balanced:
            problems.append(f"the ledger does not sum up to the pool: {self.ledger()}")
        return problems + self.prefixes.check_integrity()
