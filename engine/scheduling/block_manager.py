"""Tracks who owns each KV block. Integers only, no torch.

Owns the block ids of one pool and its `PrefixCache`. Does not own the blocks' memory.

    FREE ──take──> in a block table (SEQUENCE, GRANT or HELD), referenced once or more
     ^  ^                                   │ last reference dropped
     │  └──────────no hash──────────────────┤
     └──evict── CACHED <──has a hash────────┘
                 │ └──prefix match──> in a block table again
                 └──oldest, and few are free──> CACHED, being saved: not evicted before that is done

With host memory (`engine.scheduling.offloading`), the oldest cached blocks are copied there before the pool runs out of
free blocks, so that evicting them loses nothing; prefixes are looked up in both memories. A block that is being loaded
from the host is already in a table and findable. Until it is loaded, its sequence (`Sequence.num_loading_blocks`) must
be neither computed nor freed. `take_copies` returns the copies to make; the caller reports each by `end_copy`.

With models whose layers keep a state, the blocks that carry one to another engine are in the same table as the
sequence's others, until `free_state` or `free`.

A table has one kind of owner; `hand_over` changes it (a committed grant becomes a sequence, a computed prompt becomes
held). A block in several tables counts for the strongest kind: SEQUENCE, then GRANT, then HELD. The five counts (free,
cached and these three) always sum up to the pool; `check_integrity` recounts them from the tables.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from engine.scheduling.block_ledger import BlockLedger, BlockOwner, CacheEvent, HostLedger
from engine.scheduling.evictor import LRUEvictor
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class _Table:
    """The blocks of one sequence. `block_ids` is the same list object as `Sequence.block_table`."""

    owner: BlockOwner
    block_ids: list[int]
    num_registered: int = 0
    """Leading blocks whose hashes have been offered to the prefix cache."""
    state_ids: list[int] = field(default_factory=list)
    """Blocks that carry the sequence's recurrent state. The same list object as `Sequence.state_block_ids`."""


READY_SHARE = 4
"""With host memory, one block in READY_SHARE is kept free, or cached and saved, or being saved: so many can be taken at
once without losing a cached prefix. A prompt that needs more does not wait: it evicts blocks that have no copy."""
SAVES_AT_ONCE = 1024
"""Limits how many blocks are being saved at once, since those cannot be evicted meanwhile. More than a step fills, so
that the copies keep up."""


class BlockManager:
    """Hands out the blocks of one pool, keeps prefixes, and is the only place that frees blocks.

    Every sequence's blocks are freed by `free`, and by nothing else.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_key: bytes,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        num_state_blocks: int = 0,
    ) -> None:
        """`num_state_blocks`: blocks that carry a sequence's recurrent state; 0 for models without."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_state_blocks = num_state_blocks
        self._tables: dict[int, _Table] = {}
        self._free: deque[int] = deque(range(num_blocks))
        self._evictor = LRUEvictor()
        self.prefixes = PrefixCache(
            block_size=block_size, key=prefix_key, is_enabled=enable_prefix_caching, num_host_blocks=num_host_blocks
        )
        self._offloading = self.prefixes.offloading
        self._refs = [[0] * num_blocks for _ in BlockOwner]
        self._num_owned = [0 for _ in BlockOwner]
        self._num_to_be_ready = max(1, num_blocks // READY_SHARE) if num_host_blocks else 0
        self._saving: set[int] = set()
        self._num_saving_unused = 0
        """How many blocks of `_saving` are in no table."""
        self._loading: dict[int, list[Sequence]] = {}
        """By block that is being loaded: the sequences that wait for it."""
        self._copies: list[BlockCopy] = []
        """Copies that `take_copies` has not returned yet."""

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def is_copying(self) -> bool:
        """Whether blocks are being copied, which become usable or free when their copies end."""
        return bool(self._saving or self._loading)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._evictor)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(self, seq: Sequence) -> int:
        """How many blocks `seq`, which has none yet, needs for its tokens and its state."""
        return self.num_blocks_for(len(seq)) + seq.num_state_blocks

    def num_shared_blocks(self, seq: Sequence) -> int:
        """How many prefix blocks `seq`, which has no blocks yet, would share with tables of others, and so need not
        allocate."""
        matched = self.prefixes.match(self.prefixes.hashes_of(seq, seq.num_reusable_tokens))
        return sum(block_id is not None and block_id not in self._evictor for block_id in matched)

    def ledger(self) -> BlockLedger:
        num_cached = len(self._evictor) + self._num_saving_unused
        return BlockLedger(self.num_blocks, len(self._free), num_cached, *self._num_owned)

    def host_ledger(self) -> HostLedger:
        return self._offloading.ledger(self._num_saving_unused)

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that a prefix match can find, in the pool or on the host."""
        return self.prefixes.hashes()

    def forget_prefixes(self) -> bool:
        """Free all blocks that are only cached; copies on the host stay. Returns False if prefixes can still be found
        in the pool, because their blocks are in use or being copied."""
        while self._evictor:
            block_id = self._evictor.evict()
            self.prefixes.drop(block_id)
            self._free.append(block_id)
        return not self.prefixes

    def take_cache_events(self) -> list[CacheEvent]:
        """Return which prefix blocks were stored and evicted since the last call, in order."""
        return self.prefixes.take_events()

    # -- a table's life -----------------------------------------------------------------------------------------

    def allocate(self, seq: Sequence, owner: BlockOwner, *, num_reusable_tokens: int, num_spare_blocks: int) -> bool:
        """Give `seq` blocks for all its tokens, beginning with the blocks of a cached prefix, and `num_state_blocks`.

        Takes at most `num_reusable_tokens` tokens from the prefix cache and leaves `num_spare_blocks` available. Sets
        `seq.block_table`, `seq.num_computed_tokens` and `seq.num_loading_blocks`. Returns False and changes nothing if
        there are too few blocks.
        """
        assert seq.seq_id not in self._tables, f"sequence {seq.seq_id} has blocks already"
        hashes = self.prefixes.hashes_of(seq, num_reusable_tokens)
        matched = self.prefixes.match(hashes)
        cached = [block_id for block_id in matched if block_id is not None]
        num_new = self.num_blocks_needed(seq) - len(cached)
        num_evictable = sum(block_id in self._evictor for block_id in cached)
        if self.num_available - num_evictable < num_new + num_spare_blocks:
            return False
        for block_id in cached:  # before any new block is taken, which may evict these
            self._touch(block_id, owner)
        loaded = {i: self._new_block(owner) for i, block_id in enumerate(matched) if block_id is None}
        for i, block_id in loaded.items():
            self._load(block_id, hashes[i])
        prefix = [loaded[i] if block_id is None else block_id for i, block_id in enumerate(matched)]
        rest = [self._new_block(owner) for _ in range(num_new - len(loaded))]
        num_of_tokens = len(rest) - seq.num_state_blocks
        seq.block_table, seq.state_block_ids = prefix + rest[:num_of_tokens], rest[num_of_tokens:]
        self._tables[seq.seq_id] = _Table(owner, seq.block_table, len(prefix), seq.state_block_ids)
        seq.num_computed_tokens = len(prefix) * self.block_size
        self._wait_for_loads(seq, prefix)
        return True

    def can_append(self, *seqs: Sequence, num_drafts: int = 0) -> bool:
        """Whether `append` would succeed for all of `seqs`, with `num_drafts` drafts each."""
        return sum([self._num_missing(seq, num_drafts) for seq in seqs]) <= self.num_available

    def append(self, seq: Sequence, num_drafts: int = 0) -> None:
        """Make room for every token of `seq` and `num_drafts` drafts after them.

        The sequence shares no block that it writes from `num_computed_tokens` on: shared blocks are full and computed.
        """
        num_missing = self._num_missing(seq, num_drafts)
        if num_missing:
            assert num_missing <= self.num_available, "ask can_append first"
            table = self._tables[seq.seq_id]
            table.block_ids += [self._new_block(table.owner) for _ in range(num_missing)]

    def _num_missing(self, seq: Sequence, num_drafts: int) -> int:
        """How many blocks `seq` lacks for its tokens and `num_drafts` drafts."""
        return max(0, self.num_blocks_for(len(seq) + num_drafts) - len(seq.block_table))

    def give_back(self, seq: Sequence) -> None:
        """Return the blocks after the last token of `seq`, which were allocated for drafts."""
        table = self._tables[seq.seq_id]
        while len(table.block_ids) > self.num_blocks_for(len(seq)):
            self._drop_ref(table.block_ids.pop(), table.owner)

    def register_computed(self, seq: Sequence, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, which must be computed, findable by prefix."""
        if not self.prefixes.is_enabled:
            return
        table = self._tables[seq.seq_id]
        num_full = num_tokens // self.block_size
        if num_full <= table.num_registered:
            return
        hashes = self.prefixes.hashes_of(seq, num_tokens)
        for index in range(table.num_registered, num_full):
            self.prefixes.store(table.block_ids[index], hashes[index])
        table.num_registered = num_full

    def forget(self, seq: Sequence) -> None:
        """Remove the blocks of `seq` from the prefix cache, and their copies on the host."""
        for block_id in self._tables[seq.seq_id].block_ids:
            if block_id in self.prefixes:
                self.prefixes.forget(block_id)

    def hand_over(self, seq: Sequence, owner: BlockOwner) -> None:
        """Change the owner kind of the blocks of `seq`."""
        table = self._tables[seq.seq_id]
        for block_id in chain(table.block_ids, table.state_ids):
            self._add_ref(block_id, owner)
            self._drop_ref(block_id, table.owner)
        table.owner = owner

    def free_state(self, seq: Sequence) -> None:
        """Drop the blocks that carried the state of `seq`."""
        table = self._tables[seq.seq_id]
        while table.state_ids:
            self._drop_ref(table.state_ids.pop(), table.owner)

    def free(self, seq: Sequence) -> None:
        """Drop every block of `seq`. The last blocks of the sequence will be evicted first."""
        assert not seq.num_loading_blocks, f"blocks of sequence {seq.seq_id} are being written"
        table = self._tables.pop(seq.seq_id)
        for block_id in chain(table.state_ids, reversed(table.block_ids)):
            self._drop_ref(block_id, table.owner)
        seq.block_table, seq.state_block_ids = [], []

    # -- copies -------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make now, in any order. The caller must report the end of each by `end_copy`."""
        self._save_ahead()
        copies, self._copies = self._copies, []
        return copies

    def end_copy(self, copy: BlockCopy) -> list[Sequence]:
        """Take in that a copy is done. Returns the sequences whose blocks have now all been loaded."""
        if copy.is_load:
            self._offloading.end_load(copy.host_block_id)
            waiting = self._loading.pop(copy.block_id)
            for seq in waiting:
                seq.num_loading_blocks -= 1
            return [seq for seq in waiting if not seq.num_loading_blocks]
        self._saving.remove(copy.block_id)
        is_findable = copy.block_id in self.prefixes
        self._offloading.end_save(copy.host_block_id, is_wanted=is_findable)
        if self._owner_of(copy.block_id) is None:
            self._num_saving_unused -= 1
            if is_findable:
                self._evictor.add_ready(copy.block_id)
            else:
                self._free.append(copy.block_id)
        return []

    def _save_ahead(self) -> None:
        """Begin to save the oldest cached blocks, until enough blocks are ready or being saved, or SAVES_AT_ONCE are
        being saved."""
        while (
            len(self._saving) < SAVES_AT_ONCE
            and len(self._free) + self._evictor.num_ready + len(self._saving) < self._num_to_be_ready
        ):
            block_id = self._evictor.next_waiting
            if block_id is None:
                return
            block_hash = self.prefixes.hash_of(block_id)
            if block_hash in self._offloading:
                self._evictor.remove(block_id)
                self._evictor.add_ready(block_id)
                continue
            copy = self._offloading.begin_save(block_id, block_hash)
            if copy is None:
                return
            self._evictor.remove(block_id)
            self._saving.add(block_id)
            self._num_saving_unused += 1
            self._copies.append(copy)

    def _load(self, block_id: int, block_hash: bytes) -> None:
        self._copies.append(self._offloading.begin_load(block_id, block_hash))
        self.prefixes.store(block_id, block_hash)
        self._loading[block_id] = []

    def _wait_for_loads(self, seq: Sequence, block_ids: list[int]) -> None:
        """Let `seq` wait for all loads of its blocks, including those that other sequences began."""
        loading = [block_id for block_id in block_ids if block_id in self._loading]
        seq.num_loading_blocks = len(loading)
        for block_id in loading:
            self._loading[block_id].append(seq)

    # -- blocks -------------------------------------------------------------------------------------------------

    def _owner_of(self, block_id: int) -> BlockOwner | None:
        in_sequences, in_grants, held = self._refs  # no loop: called for each block of a prompt, while streams wait
        if in_sequences[block_id]:
            return BlockOwner.SEQUENCE
        if in_grants[block_id]:
            return BlockOwner.GRANT
        return BlockOwner.HELD if held[block_id] else None

    def _new_block(self, owner: BlockOwner) -> int:
        """Take a free block, or evict a cached one if none is free."""
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id = self._evictor.evict()
            self.prefixes.drop(block_id)
        self._add_ref(block_id, owner)
        return block_id

    def _touch(self, block_id: int, owner: BlockOwner) -> None:
        """Reference a prefix block, whether it is in other tables or only cached; it can no longer be evicted."""
        if block_id in self._evictor:
            self._evictor.remove(block_id)
        self._add_ref(block_id, owner)

    def _add_ref(self, block_id: int, owner: BlockOwner) -> None:
        before = self._owner_of(block_id)
        self._refs[owner][block_id] += 1
        self._count_owned(block_id, before, self._owner_of(block_id))

    def _drop_ref(self, block_id: int, owner: BlockOwner) -> None:
        """Drop one reference. After the last one, the block is cached if a prefix match can find it, else free."""
        before = self._owner_of(block_id)
        self._refs[owner][block_id] -= 1
        after = self._owner_of(block_id)
        self._count_owned(block_id, before, after)
        if after is None and block_id not in self._saving:
            if block_id in self.prefixes:
                self._evictor.add(block_id)
            else:
                self._free.append(block_id)

    def _count_owned(self, block_id: int, before: BlockOwner | None, after: BlockOwner | None) -> None:
        if before is not None:
            self._num_owned[before] -= 1
        if after is not None:
            self._num_owned[after] += 1
        if block_id in self._saving:
            self._num_saving_unused += (after is None) - (before is None)

    # -- the audit ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount the pool from the tables. Returns one sentence per error; empty if there are none."""
        problems = []
        refs = [[0] * self.num_blocks for _ in BlockOwner]
        for seq_id, table in self._tables.items():
            block_ids = [*table.block_ids, *table.state_ids]
            if len(set(block_ids)) != len(block_ids):
                problems.append(f"sequence {seq_id} holds a block twice")
            for block_id in block_ids:
                refs[table.owner][block_id] += 1
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
            if block_id in self._loading and not is_used:
                problems.append(f"block {block_id} is loaded for nobody")
        if not self.ledger().is_balanced:
            problems.append(f"the ledger does not sum up to the pool: {self.ledger()}")
        return problems + self.prefixes.check_integrity()
