"""Which block of the pool a prefix is found in, and what others are told of it. Integers only, no torch.

Owns the hashes of blocks, both ways, and those of what lies in host memory beside the pool
(`engine.scheduling.offloading`). Does not own blocks, nor knows who uses one (`engine.scheduling.block_manager`).

    block computed ──store──> findable here ──drop──> findable on the host, where it was copied, or nowhere
    told of:                  stored, unless the host has it                     evicted, if nowhere
"""

from __future__ import annotations

from engine.scheduling.block_ledger import CacheEvent
from engine.scheduling.offloading import Offloading
from engine.scheduling.sequence import Sequence
from prefix_hash import extend_block_hashes, salted_key


class PrefixCache:
    """Of one pool. Not enabled, it has nothing and finds nothing."""

    def __init__(self, *, block_size: int, key: bytes, is_enabled: bool, num_host_blocks: int) -> None:
        self.is_enabled = is_enabled
        self.offloading = Offloading(num_host_blocks, self._note_evicted_on_host)
        self._block_size = block_size
        self._key = key
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._events: list[CacheEvent] = []

    def __contains__(self, block_id: int) -> bool:
        """Whether a prefix may find this block."""
        return block_id in self._hash_of

    def __len__(self) -> int:
        """How many blocks of the pool may be found."""
        return len(self._hash_of)

    def hash_of(self, block_id: int) -> bytes:
        """Of a block that may be found."""
        return self._hash_of[block_id]

    def hashes_of(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Of the full blocks of its first `num_tokens` tokens, which are known; none where prefixes are not kept.

        The sequence has them from then on: one that waits for memory is asked for them in each step."""
        if not self.is_enabled:
            return []
        num_full = num_tokens // self._block_size
        if len(seq.block_hashes) < num_full:
            key = salted_key(self._key, seq.cache_salt, seq.lora_digest)
            extend_block_hashes(seq.block_hashes, seq.token_ids[: num_full * self._block_size], self._block_size, key)
        return seq.block_hashes[:num_full]

    def match(self, hashes: list[bytes]) -> list[int | None]:
        """The blocks of a prefix; None for one that has to be loaded."""
        blocks = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None and block_hash not in self.offloading:
                break
            blocks.append(block_id)
        return blocks

    def hashes(self) -> list[bytes]:
        """Of all blocks that may be found, here or on the host."""
        return list({**self._block_of, **dict.fromkeys(self.offloading.hashes())})

    def store(self, block_id: int, block_hash: bytes) -> None:
        """The block is found by this hash from now on, unless another is, or it is found by another."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash
            self._note(block_hash, is_stored=True)

    def drop(self, block_id: int) -> None:
        """What a block held is found there no more."""
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self._note(block_hash, is_stored=False)

    def forget(self, block_id: int) -> None:
        """Nor on the host."""
        self.offloading.forget(self._hash_of[block_id])
        self.drop(block_id)

    def take_events(self) -> list[CacheEvent]:
        """What was stored and evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each."""
        is_same = {block_id: block_hash for block_hash, block_id in self._block_of.items()} == self._hash_of
        problems = [] if is_same else ["the prefix cache and the blocks' hashes differ"]
        return problems + self.offloading.check_integrity()

    def _note(self, block_hash: bytes, *, is_stored: bool) -> None:
        """It is in the pool from now on, or there no more. What the host has as well is findable anyway."""
        if block_hash not in self.offloading:
            self._events.append(CacheEvent(is_stored, block_hash))

    def _note_evicted_on_host(self, block_hash: bytes) -> None:
        if block_hash not in self._block_of:
            self._events.append(CacheEvent(False, block_hash))
