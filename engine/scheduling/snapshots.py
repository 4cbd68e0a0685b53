"""Which cached prefixes have a snapshot of the states after them, and where to take one. Integers only, no torch.

Layers that keep a state (`engine.models.recurrent_states`) cannot go on from the keys and values of a prefix: they also
need their state as it was after it. A snapshot is a copy of a sequence's state after a full block of tokens, in as many
blocks of the pool as carry a state to another engine. A prefix can be reused as far as it has a snapshot.

    a step ends at a point ──saved──> kept ──one of its blocks, or of its prefix' blocks, is evicted──> gone

A snapshot takes as much memory as the keys and values of hundreds or thousands of tokens. So few are taken, where later
prompts may go on (R. Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025): near the end of a
prompt, which a conversation's next turn continues; and where a prompt leaves the way to another one's snapshot, since
others may leave it there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

MIN_TOKENS = 128
"""A snapshot must spare at least so many tokens: to take it, a prompt is cut in two steps."""
WORTH = 16
"""… and so many that, times WORTH, their keys and values take as much memory as the snapshot."""
ANSWER_START_TOKENS = 8
"""A chat template ends a prompt with the first tokens of an answer, which the conversation's next turn may not repeat,
such as `<think>`. So a prompt's last point comes at least so many tokens before its end."""


def min_snapshot_tokens(num_state_blocks: int, block_size: int) -> int:
    """How many tokens a snapshot must spare at least. `num_state_blocks`: its blocks."""
    return max(MIN_TOKENS, num_state_blocks * block_size // WORTH)


def snapshot_points(
    num_prompt_tokens: int, *, num_reused: int, num_shared: int, block_size: int, min_tokens: int
) -> list[int]:
    """After how many tokens of a prompt to take snapshots, in order.

    `num_reused`: tokens up to the snapshot that it begins with. `num_shared`: tokens up to where it leaves the way to
    another one. `min_tokens`: how many tokens a snapshot must spare at least.
    """
    last = (num_prompt_tokens - ANSWER_START_TOKENS) // block_size * block_size
    points: list[int] = []
    for point in (min(num_shared, last), last):
        if point - (points[-1] if points else num_reused) >= min_tokens:
            points.append(point)
    return points


class Match(NamedTuple):
    num_shared: int
    """Leading blocks of a prompt after which, or after later ones, there is some snapshot."""
    num_reused: int
    """Leading blocks up to the last snapshot that is the prompt's own."""
    block_ids: tuple[int, ...]
    """That snapshot's."""


class Snapshots:
    """The snapshots in one pool. A snapshot is known by the hash of the last block before it.

    The blocks that snapshots come after form a tree: with each block, it has the one before. So a conversation of many
    turns, each with a snapshot, takes memory and time for each of its blocks once.
    """

    def __init__(self, on_change: Callable[[bytes, bool], object]) -> None:
        """`on_change(hash, is_stored)`: a block of a prefix became reusable, since a snapshot comes after it or at its
        end, or it no longer is."""
        self._on_change = on_change
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        """By snapshot: the blocks that hold it."""
        self._hash_of: dict[int, bytes] = {}
        """By block: the snapshot that it holds a part of."""
        self._before: dict[bytes, bytes | None] = {}
        """By hash of a prefix' block: that of the block before it."""
        self._after: dict[bytes, set[bytes]] = {}
        """By hash of a prefix' block: those of the next blocks on the ways to snapshots."""

    def __contains__(self, block_id: int) -> bool:
        """Whether the block holds a part of a snapshot."""
        return block_id in self._hash_of

    def has(self, snapshot: bytes) -> bool:
        return snapshot in self._blocks_of

    def reusable_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that a snapshot comes after. With a block, all those before it are there."""
        return list(self._before)

    def longest(self, hashes: Seq[bytes]) -> Match:
        """Find the last snapshot on the way of a prompt with blocks of these hashes."""
        num_shared = next((i for i, block_hash in enumerate(hashes) if block_hash not in self._before), len(hashes))
        for num_reused in range(num_shared, 0, -1):
            if (block_ids := self._blocks_of.get(hashes[num_reused - 1])) is not None:
                return Match(num_shared, num_reused, block_ids)
        return Match(num_shared, 0, ())

    def store(self, hashes: Seq[bytes], block_ids: Iterable[int]) -> None:
        """Keep a snapshot after the blocks of `hashes`, which must be cached, unless there is one."""
        snapshot = hashes[-1]
        if snapshot in self._blocks_of:
            return
        self._blocks_of[snapshot] = tuple(block_ids)
        self._hash_of |= dict.fromkeys(self._blocks_of[snapshot], snapshot)
        first_new = len(hashes)
        while first_new and hashes[first_new - 1] not in self._before:
            first_new -= 1
        for before, block_hash in zip([None, *hashes][first_new:], hashes[first_new:], strict=False):
            self._before[block_hash] = before
            self._after[block_hash] = set()
            if before is not None:
                self._after[before].add(block_hash)
            self._on_change(block_hash, True)

    def superseded(self, hashes: Seq[bytes]) -> tuple[int, ...]:
        """Return the blocks of the snapshot before the one after the blocks of `hashes`, if it is hardly of use beside
        that one: no other way begins between them, and they are closer together than a snapshot takes blocks."""
        for num_blocks in range(len(hashes) - 1, 0, -1):
            before = hashes[num_blocks - 1]
            if len(self._after[before]) > 1:
                return ()
            if (block_ids := self._blocks_of.get(before)) is not None:
                return block_ids if len(hashes) - num_blocks < len(block_ids) else ()
        return ()

    def drop_holding(self, block_id: int) -> tuple[int, ...]:
        """Drop the snapshot that the block holds a part of. Returns its blocks."""
        return self.drop(self._hash_of[block_id])

    def drop_needing(self, block_hash: bytes) -> list[int]:
        """Drop the snapshots after a prefix' block, which are of no use without it. Returns their blocks."""
        ways, snapshots = [block_hash], list[bytes]()
        while ways:
            block_hash = ways.pop()
            ways += self._after.get(block_hash, ())
            if block_hash in self._blocks_of:
                snapshots.append(block_hash)
        return [block_id for snapshot in snapshots for block_id in self.drop(snapshot)]

    def drop(self, snapshot: bytes) -> tuple[int, ...]:
        """Drop a snapshot, if there is one. Returns its blocks."""
        block_ids = self._blocks_of.pop(snapshot, ())
        for block_id in block_ids:
            del self._hash_of[block_id]
        last: bytes | None = snapshot
        while last in self._after and not self._after[last] and last not in self._blocks_of:
            before = self._before.pop(last)
            del self._after[last]
            if before is not None:
                self._after[before].remove(last)
            self._on_change(last, False)
            last = before
        return block_ids

    def check_integrity(self, cached: Container[bytes]) -> list[str]:
        """Return one sentence per error. `cached`: the hashes of all blocks that can be found."""
        held = {block_id: snapshot for snapshot, block_ids in self._blocks_of.items() for block_id in block_ids}
        problems = [] if held == self._hash_of else ["the snapshots and their blocks differ"]
        after: dict[bytes, set[bytes]] = {block_hash: set() for block_hash in self._before}
        for block_hash, before in self._before.items():
            if before is not None:
                after.setdefault(before, set()).add(block_hash)
        ends = {block_hash for block_hash, following in after.items() if not following}
        if after != self._after or not ends <= self._blocks_of.keys() <= after.keys():
            problems.append("the snapshots and their prefixes differ")
        num_lost = sum(block_hash not in cached for block_hash in self._before)
        return [*problems, f"{num_lost} blocks before snapshots are not cached"] if num_lost else problems
