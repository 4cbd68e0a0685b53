"""Maps prefix hashes to blocks of the pool, and records events about them for others. Integers only, no torch.

Owns the maps between hashes and blocks, in both directions, the hashes of copies in host memory
(`engine.scheduling.offloading`), and the snapshots of states (`engine.scheduling.snapshots`). Does not own blocks and
does not know who uses them (`engine.scheduling.block_manager`).

    block computed ──store──> findable here ──drop──> findable on the host, where it was copied, or nowhere
    event:                    stored, unless the host has it                     evicted, if nowhere

With layers that keep a state, others are told of a block once a snapshot comes after it: without one it cannot be
reused.
"""

from __future__ import annotations

from engine.scheduling.block_ledger import CacheEvent
from engine.scheduling.offloading import Offloading
from engine.scheduling.sequence import Sequence
from engine.scheduling.snapshots import Snapshots
from prefix_hash import extend_block_hashes, salted_key


class PrefixCache:
    """One per pool. If it is not enabled, it stores nothing and finds nothing."""

    def __init__(
        self, *, block_size: int, key: bytes, is_enabled: bool, num_host_blocks: int, has_states: bool = False
    ) -> None:
        """`has_states`: the model has layers that keep a state. Its blocks are not copied to the host."""
        assert not (has_states and num_host_blocks)
        self.is_enabled = is_enabled
        self.snapshots = Snapshots(self._note_reusable)
        self._has_states = has_states
        self.offloading = Offloading(num_host_blocks, self._note_evicted_on_host)
        self._block_size = block_size
        self._key = key
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._events: list[CacheEvent] = []

    def __contains__(self, block_id: int) -> bool:
        """Whether a prefix match can find this block, or a snapshot that it holds a part of."""
        return block_id in self._hash_of or block_id in self.snapshots

    def __len__(self) -> int:
        """How many blocks of the pool can be found, without those of snapshots."""
        return len(self._hash_of)

    def block_of(self, block_hash: bytes) -> int | None:
        """Return the block that can be found by this hash, or None."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> bytes:
        """Return the hash of a block that can be found."""
        return self._hash_of[block_id]

    def hashes_of(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks of the first `num_tokens` tokens of `seq`, which must be known; empty if
        the cache is not enabled.

        `seq` keeps the hashes, because a sequence that waits for memory needs them in each step."""
        if not self.is_enabled:
            return []
        num_full = num_tokens // self._block_size
        if len(seq.block_hashes) < num_full:
            key = salted_key(self._key, seq.cache_salt, seq.lora_digest)
            extend_block_hashes(seq.block_hashes, seq.token_ids[: num_full * self._block_size], self._block_size, key)
        return seq.block_hashes[:num_full]

    def match(self, hashes: list[bytes]) -> list[int | None]:
        """Return the blocks of the longest cached prefix; None stands for a block that must be loaded from the host."""
        blocks = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None and block_hash not in self.offloading:
                break
            blocks.append(block_id)
        return blocks

    def hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that can be reused, in the pool or on the host."""
        if self._has_states:
            return self.snapshots.reusable_hashes()
        return list({**self._block_of, **dict.fromkeys(self.offloading.hashes())})

    def store(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable by `block_hash`, unless the hash has a block or the block has a hash already."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            self._note(block_hash, is_stored=True)

    def replace(self, block_id: int, other: int) -> None:
        """Find `other`, which cannot be found yet, where `block_id` was found."""
        block_hash = self._hash_of.pop(block_id)
        self._block_of[block_hash] = other
        self._hash_of[other] = block_hash

    def drop(self, block_id: int) -> list[int]:
        """Make a block of the pool unfindable, or the snapshot that it holds a part of. Returns all blocks that can no
        longer be found: with a block, the snapshots after it are lost."""
        if block_id in self.snapshots:
            return [*self.snapshots.drop_holding(block_id)]
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self._note(block_hash, is_stored=False)
        return [block_id, *self.snapshots.drop_needing(block_hash)]

    def forget(self, block_id: int) -> list[int]:
        """Make a block of the pool, and its copy on the host, unfindable. Returns what `drop` returns."""
        self.offloading.forget(self._hash_of[block_id])
        return self.drop(block_id)

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> list[str]:
        """Return one sentence per error."""
        is_same = {block_id: block_hash for block_hash, block_id in self._block_of.items()} == self._hash_of
        problems = [] if is_same else ["the prefix cache and the blocks' hashes differ"]
        return problems + self.offloading.check_integrity() + self.snapshots.check_integrity(self._block_of)

    def _note(self, block_hash: bytes, *, is_stored: bool) -> None:
        """Record that a block became findable in the pool, or no longer is. If the host has a copy, others see no
        change. With states, others are told of reusable blocks instead."""
        if not self._has_states and block_hash not in self.offloading:
            self._events.append(CacheEvent(is_stored, block_hash))

    def _note_reusable(self, block_hash: bytes, is_stored: bool) -> None:
        self._events.append(CacheEvent(is_stored, block_hash))

    def _note_evicted_on_host(self, block_hash: bytes) -> None:
        if block_hash not in self._block_of:
            self._events.append(CacheEvent(False, block_hash))
