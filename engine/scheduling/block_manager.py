"""Gives sequences the blocks for their tokens, beginning with cached prefixes. Integers only, no torch.

Owns the block tables of one pool. Does not own the blocks' memory; `engine.scheduling.block_pool` counts who uses which
block.

    allocate ──> a table, owned by a SEQUENCE or a GRANT ──append, give_back, register_computed──> … ──free──> gone
                     └──hand_over──> owned by another kind (a committed grant, a computed prompt that is HELD)

With host memory (`engine.scheduling.offloading`), the oldest cached blocks are copied there before the pool runs out of
free blocks, so that evicting them loses nothing; prefixes are looked up in both memories. A block that is being loaded
from the host is already in a table and findable. Until it is loaded, its sequence (`Sequence.num_loading_blocks`) must
be neither computed nor freed. `take_copies` returns the copies to make; the caller reports each by `end_copy`.

With models whose layers keep a state, a table also has the blocks that hold one outside of the sequence's row:

    state_ids    allocated with the others; take the state to another engine
    loaded_ids   the row is loaded from them: a grant's, which another engine fills, or a snapshot's, which the prefix
                 cache keeps  ──loaded──> drop_loaded
    saved        begin_snapshot ──> a step saves the row to them ──keep_snapshot──> kept with the cached prefix

`check_integrity` recounts everything from the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from engine.scheduling.block_ledger import BlockLedger, BlockOwner, CacheEvent, HostLedger
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.sequence import Sequence
from engine.scheduling.snapshots import snapshot_points


@dataclass(slots=True)
class _Table:
    """The blocks of one sequence. `block_ids`, `state_ids` and `loaded_ids` are the same list objects as the sequence's
    `block_table`, `state_block_ids` and `loaded_state_ids`."""

    owner: BlockOwner
    block_ids: list[int]
    num_registered: int = 0
    """Leading blocks whose hashes have been offered to the prefix cache."""
    state_ids: list[int] = field(default_factory=list)
    loaded_ids: list[int] = field(default_factory=list)
    saved: dict[bytes, list[int]] = field(default_factory=dict)
    """By snapshot that launched steps save: its blocks."""

    def in_order_of_eviction(self) -> Iterator[int]:
        """All blocks: the last ones of the sequence come first."""
        return chain(*self.saved.values(), self.loaded_ids, self.state_ids, reversed(self.block_ids))


class _Prefix(NamedTuple):
    """What the prefix cache has for a sequence."""

    hashes: list[bytes]
    matched: Seq[int | None] = ()
    """The blocks of the prefix that can be reused; None stands for one that must be loaded from the host."""
    snapshot_ids: Seq[int] = ()
    """The blocks of the snapshot after it, if the sequence needs its state."""
    num_shared: int = 0
    """Leading blocks up to where the sequence leaves the way to a snapshot."""


class BlockManager:
    """Hands out the blocks of one pool and keeps prefixes.

    A sequence's blocks are freed by `free` and by nothing else, except those after its last token (`give_back`) and
    those of states that it no longer needs (`drop_loaded`, `keep_snapshot`).
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
        min_snapshot_tokens: int = 0,
    ) -> None:
        """`num_state_blocks`: blocks that carry a sequence's recurrent state; 0 for models without.
        `min_snapshot_tokens`: see `engine.scheduling.snapshots.min_snapshot_tokens`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_state_blocks = num_state_blocks
        self._min_snapshot_tokens = min_snapshot_tokens
        self._tables: dict[int, _Table] = {}
        self.prefixes = PrefixCache(
            block_size=block_size, key=prefix_key, is_enabled=enable_prefix_caching, num_host_blocks=num_host_blocks,
            has_states=num_state_blocks > 0,
        )  # fmt: skip
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
        allocate. With states, a grant may share more."""
        matched = self._find_prefix(seq, BlockOwner.SEQUENCE, seq.num_reusable_tokens).matched
        return sum(block_id is not None and not self._pool.is_evictable(block_id) for block_id in matched)

    def ledger(self) -> BlockLedger:
        return self._pool.ledger()

    def host_ledger(self) -> HostLedger:
        return self._pool.host_ledger()

    def cached_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that can be reused, in the pool or on the host."""
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
        `seq.block_table`, `seq.num_computed_tokens` and `seq.num_loading_blocks`, and what the sequence needs for its
        state. Returns False and changes nothing if there are too few blocks.
        """
        assert seq.seq_id not in self._tables, f"sequence {seq.seq_id} has blocks already"
        prefix = self._find_prefix(seq, owner, num_reusable_tokens)
        num_for_others = self.num_available - num_spare_blocks
        if self._num_taken_by(seq, prefix) > num_for_others and prefix.snapshot_ids:
            prefix = _Prefix(prefix.hashes)  # a snapshot takes room itself: without it there may be enough
        if self._num_taken_by(seq, prefix) > num_for_others:
            return False
        kept = [block_id for block_id in prefix.matched if block_id is not None]
        for block_id in chain(kept, prefix.snapshot_ids):  # before any new block is taken, which may evict these
            self._pool.add_ref(block_id, owner)
        from_host = {i: self._pool.take(owner) for i, block_id in enumerate(prefix.matched) if block_id is None}
        for i, block_id in from_host.items():
            self._load(block_id, prefix.hashes[i])
        reused = [from_host[i] if block_id is None else block_id for i, block_id in enumerate(prefix.matched)]
        rest = [self._pool.take(owner) for _ in range(self.num_blocks_needed(seq) - len(reused))]
        num_of_tokens = len(rest) - seq.num_state_blocks
        seq.block_table, states = reused + rest[:num_of_tokens], rest[num_of_tokens:]
        is_granted = owner is BlockOwner.GRANT
        seq.state_block_ids = [] if is_granted else states
        seq.loaded_state_ids = states if is_granted else [*prefix.snapshot_ids]
        seq.has_state_to_load = len(prefix.snapshot_ids) > 0
        seq.num_computed_tokens = len(reused) * self.block_size
        seq.snapshot_points = self._snapshot_points(seq, prefix)
        self._tables[seq.seq_id] = _Table(
            owner, seq.block_table, len(reused), seq.state_block_ids, seq.loaded_state_ids
        )
        self._wait_for_loads(seq, reused)
        return True

    def _find_prefix(self, seq: Sequence, owner: BlockOwner, num_reusable_tokens: int) -> _Prefix:
        """Look up the longest cached prefix. With layers that keep a state, it ends at a snapshot, except a grant's,
        whose state comes from another engine."""
        hashes = self.prefixes.hashes_of(seq, num_reusable_tokens)
        matched = self.prefixes.match(hashes)
        if not self.num_state_blocks or owner is BlockOwner.GRANT:
            return _Prefix(hashes, matched)
        num_shared, num_reused, snapshot_ids = self.prefixes.snapshots.longest(hashes)
        return _Prefix(hashes, matched[:num_reused], snapshot_ids, num_shared)

    def _num_taken_by(self, seq: Sequence, prefix: _Prefix) -> int:
        """How many available blocks `seq` takes if it begins with `prefix`."""
        kept = [block_id for block_id in prefix.matched if block_id is not None]
        num_evictable = sum(map(self._pool.is_evictable, chain(kept, prefix.snapshot_ids)))
        return self.num_blocks_needed(seq) - len(kept) + num_evictable

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
        """Remove the blocks of `seq` from the prefix cache, their copies on the host, and all snapshots on its way."""
        for block_hash in seq.block_hashes:
            self._pool.release(self.prefixes.snapshots.drop(block_hash))
        for block_id in self._tables[seq.seq_id].block_ids:
            if block_id in self.prefixes:
                self._pool.release(self.prefixes.forget(block_id))

    def hand_over(self, seq: Sequence, owner: BlockOwner) -> None:
        """Change the owner kind of the blocks of `seq`."""
        table = self._tables[seq.seq_id]
        for block_id in table.in_order_of_eviction():
            self._pool.add_ref(block_id, owner)
            self._pool.drop_ref(block_id, table.owner)
        table.owner = owner

    def free(self, seq: Sequence) -> None:
        """Drop every block of `seq`. The last blocks of the sequence will be evicted first: at once, if they come after
        all snapshots on its way, since no sequence can go on from them."""
        assert not seq.num_loading_blocks, f"blocks of sequence {seq.seq_id} are being written"
        # Was kept before the answer, which may have taken long. The prefix is of no use without it.
        num_shared, _, snapshot_ids = self.prefixes.snapshots.longest(seq.block_hashes)
        self._pool.touch(snapshot_ids)
        table = self._tables.pop(seq.seq_id)
        for block_id in table.in_order_of_eviction():
            self._pool.drop_ref(block_id, table.owner)
        if num_shared:
            self._pool.evict_first(table.block_ids[num_shared:])
        seq.block_table, seq.state_block_ids, seq.loaded_state_ids, seq.has_state_to_load = [], [], [], False

    # -- states -------------------------------------------------------------------------------------------------

    def drop_loaded(self, seq: Sequence) -> None:
        """Drop the blocks that the row of `seq` was loaded from."""
        table = self._tables[seq.seq_id]
        while table.loaded_ids:
            self._pool.drop_ref(table.loaded_ids.pop(), table.owner)

    def begin_snapshot(self, seq: Sequence, num_tokens: int, num_spare_blocks: int) -> list[int]:
        """Take blocks for a snapshot after the first `num_tokens` tokens; none if that does not leave
        `num_spare_blocks` available, or if there is such a snapshot already, or another sequence is saving one. A
        launched step must fill them."""
        if self.num_available - num_spare_blocks < self.num_state_blocks:
            return []
        snapshot = self.prefixes.hashes_of(seq, num_tokens)[-1]
        if self.prefixes.snapshots.has(snapshot) or any(snapshot in table.saved for table in self._tables.values()):
            return []
        table = self._tables[seq.seq_id]
        table.saved[snapshot] = [self._pool.take(table.owner) for _ in range(self.num_state_blocks)]
        return table.saved[snapshot]

    def keep_snapshot(self, seq: Sequence, num_tokens: int) -> None:
        """Keep the snapshot after the first `num_tokens` tokens, which `begin_snapshot` took blocks for."""
        table = self._tables[seq.seq_id]
        hashes = self.prefixes.hashes_of(seq, num_tokens)
        for block_id, block_hash in zip(table.block_ids, hashes, strict=False):
            self._pool.prefer(block_id, block_hash)  # an older one would be evicted sooner, and the snapshot too
        block_ids = table.saved.pop(hashes[-1])
        self.prefixes.snapshots.store(hashes, block_ids)
        for block_id in block_ids:
            self._pool.drop_ref(block_id, table.owner)
        self._pool.evict_first(self.prefixes.snapshots.superseded(hashes))

    def _snapshot_points(self, seq: Sequence, prefix: _Prefix) -> list[int]:
        if not self.num_state_blocks or not self.prefixes.is_enabled:
            return []
        return snapshot_points(
            seq.num_prompt_tokens,
            num_reused=seq.num_computed_tokens,
            num_shared=prefix.num_shared * self.block_size,
            block_size=self.block_size,
            min_tokens=self._min_snapshot_tokens,
        )

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
            block_ids = [*table.in_order_of_eviction()]
            if len(set(block_ids)) != len(block_ids):
                problems.append(f"sequence {seq_id} holds a block twice")
            for block_id in block_ids:
                refs[table.owner][block_id] += 1
        for block_id in self._loading:
            if not any(refs[owner][block_id] for owner in BlockOwner):
                problems.append(f"block {block_id} is loaded for nobody")
        return problems + self._pool.check_integrity(refs)
