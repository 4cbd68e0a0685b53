"""Gives sequences the blocks for their tokens, beginning with cached prefixes. Integers only, no torch.

Owns the block tables of one pool. Does not own the blocks' memory; `engine.scheduling.block_pool` counts who uses which
block.

    allocate ──> a table, owned by a SEQUENCE or a GRANT ──append, give_back, register_computed──> … ──free──> gone
                     └──hand_over──> owned by another kind (a committed grant, a computed prompt that is HELD)

With host memory (`engine.scheduling.offloading`), the oldest cached blocks are copied there before the pool runs out of
free blocks, so that evicting them loses nothing; prefixes are looked up in both memories. A block that is being loaded
from the host is already in a table and findable. Until it is loaded, its sequence (`Sequence.num_loading_blocks`) must
be neither computed nor freed. `take_copies` returns the copies to make; the caller reports each by `end_copy`.

With models whose layers keep a state, the blocks that carry one to another engine are in the same table as the
sequence's others, until `free_state` or `free`. `check_integrity` recounts everything from the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from engine.scheduling.block_ledger import BlockLedger, BlockOwner, CacheEvent, HostLedger
from engine.scheduling.block_pool import BlockPool
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


class BlockManager:
    """Hands out the blocks of one pool and keeps prefixes.

    A sequence's blocks are freed by `free` and by nothing else, except those after its last token (`give_back`) and
    those of a loaded state (`free_state`).
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
        self.prefixes = PrefixCache(
            block_size=block_size, key=prefix_key, is_enabled=enable_prefix_caching, num_host_blocks=num_host_blocks
        )
        self._pool = BlockPool(num_blocks, self.prefixes)
        self._loading: dict[int, list[Sequence]] = {}
        """By block that is being loaded: the sequences that wait for it."""
        self._loads: list[BlockCopy] = []
        """Loads that `take_copies` has not returned yet."""

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def is_copying(self) -> bool:
        """Whether blocks are being copied, which become usable or free when their copies end."""
        return self._pool.is_saving or bool(self._loading)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones after eviction."""
        return self._pool.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(self, seq: Sequence) -> int:
        """How many blocks `seq`, which has none yet, needs for its tokens and its state."""
        return self.num_blocks_for(len(seq)) + seq.num_state_blocks

    def num_shared_blocks(self, seq: Sequence) -> int:
        """How many prefix blocks `seq`, which has no blocks yet, would share with tables of others, and so need not
        allocate."""
        matched = self.prefixes.match(self.prefixes.hashes_of(seq, seq.num_reusable_tokens))
        return sum(block_id is not None and not self._pool.is_evictable(block_id) for block_id in matched)

    def ledger(self) -> BlockLedger:
        return self._pool.ledger()

    def host_ledger(self) -> HostLedger:
        return self._pool.host_ledger()

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that a prefix match can find, in the pool or on the host."""
        return self.prefixes.hashes()

    def forget_prefixes(self) -> bool:
        """Free all blocks that are only cached; copies on the host stay. Returns False if prefixes can still be found
        in the pool, because their blocks are in use or being copied."""
        return self._pool.forget_prefixes()

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
        num_evictable = sum(map(self._pool.is_evictable, cached))
        if self.num_available - num_evictable < num_new + num_spare_blocks:
            return False
        for block_id in cached:  # before any new block is taken, which may evict these
            self._pool.add_ref(block_id, owner)
        loaded = {i: self._pool.take(owner) for i, block_id in enumerate(matched) if block_id is None}
        for i, block_id in loaded.items():
            self._load(block_id, hashes[i])
        prefix = [loaded[i] if block_id is None else block_id for i, block_id in enumerate(matched)]
        rest = [self._pool.take(owner) for _ in range(num_new - len(loaded))]
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
            table.block_ids += [self._pool.take(table.owner) for _ in range(num_missing)]

    def _num_missing(self, seq: Sequence, num_drafts: int) -> int:
        """How many blocks `seq` lacks for its tokens and `num_drafts` drafts."""
        return max(0, self.num_blocks_for(len(seq) + num_drafts) - len(seq.block_table))

    def give_back(self, seq: Sequence) -> None:
        """Return the blocks after the last token of `seq`, which were allocated for drafts."""
        table = self._tables[seq.seq_id]
        while len(table.block_ids) > self.num_blocks_for(len(seq)):
            self._pool.drop_ref(table.block_ids.pop(), table.owner)

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
            self._pool.add_ref(block_id, owner)
            self._pool.drop_ref(block_id, table.owner)
        table.owner = owner

    def free_state(self, seq: Sequence) -> None:
        """Drop the blocks that carried the state of `seq`."""
        table = self._tables[seq.seq_id]
        while table.state_ids:
            self._pool.drop_ref(table.state_ids.pop(), table.owner)

    def free(self, seq: Sequence) -> None:
        """Drop every block of `seq`. The last blocks of the sequence will be evicted first."""
        assert not seq.num_loading_blocks, f"blocks of sequence {seq.seq_id} are being written"
        table = self._tables.pop(seq.seq_id)
        for block_id in chain(table.state_ids, reversed(table.block_ids)):
            self._pool.drop_ref(block_id, table.owner)
        seq.block_table, seq.state_block_ids = [], []

    # -- copies -------------------------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make now, in any order. The caller must report the end of each by `end_copy`."""
        copies, self._loads = self._loads + self._pool.save_ahead(), []
        return copies

    def end_copy(self, copy: BlockCopy) -> list[Sequence]:
        """Take in that a copy is done. Returns the sequences whose blocks have now all been loaded."""
        if not copy.is_load:
            self._pool.end_save(copy)
            return []
        self.prefixes.offloading.end_load(copy.host_block_id)
        waiting = self._loading.pop(copy.block_id)
        for seq in waiting:
            seq.num_loading_blocks -= 1
        return [seq for seq in waiting if not seq.num_loading_blocks]

    def _load(self, block_id: int, block_hash: bytes) -> None:
        self._loads.append(self.prefixes.offloading.begin_load(block_id, block_hash))
        self.prefixes.store(block_id, block_hash)
        self._loading[block_id] = []

    def _wait_for_loads(self, seq: Sequence, block_ids: list[int]) -> None:
        """Let `seq` wait for all loads of its blocks, including those that other sequences began."""
        loading = [block_id for block_id in block_ids if block_id in self._loading]
        seq.num_loading_blocks = len(loading)
        for block_id in loading:
            self._loading[block_id].append(seq)

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
        for block_id in self._loading:
            if not any(refs[owner][block_id] for owner in BlockOwner):
                problems.append(f"block {block_id} is loaded for nobody")
        return problems + self._pool.check_integrity(refs)
