"""Which cached blocks have a copy in host memory, and what is being copied. Integers only, no torch.

Owns the ids of the host's blocks, and the hashes of what is in them. Does not own the memory, nor copies anything
(`engine.running.host_copies`), nor knows who uses a block of the pool (`engine.scheduling.block_manager`).

    a block of the host          FREE ──begin_save──> SAVING ──end──> KEPT ──evicted by a newer one, forgotten──> FREE
                                                         └─ forgotten meanwhile ─────────────────────────────────────┘
                                 KEPT ──begin_load──> KEPT, and read: not evicted before the load's end

The least recently saved or loaded goes first. What is loaded stays here, too: when it is evicted from the pool again,
nothing need be copied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from engine.scheduling.block_ledger import HostLedger


class BlockCopy(NamedTuple):
    """All layers of a block, from the pool to the host's memory, or from there."""

    is_load: bool
    """From the host's."""
    block_id: int
    host_block_id: int


class Offloading:
    """Of no host blocks, where nothing is offloaded: it has nothing, then, and takes nothing."""

    def __init__(self, num_host_blocks: int, on_evicted: Callable[[bytes], object]) -> None:
        """`on_evicted`: told by whose hash a copy was found that gave way to another's."""
        self._on_evicted = on_evicted
        self.num_host_blocks = num_host_blocks
        self._free: deque[int] = deque(range(num_host_blocks))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """Oldest first."""
        self._saving: dict[int, bytes] = {}
        """By host block, what it is to be found by."""
        self._reads: set[int] = set()
        """Host blocks that are loaded from: by one load each, since whoever comes then finds the pool's block."""
        self._forgotten: set[int] = set()
        """Found by nothing any more, and still being read."""

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def hashes(self) -> list[bytes]:
        return list(self._kept)

    def ledger(self, num_saving: int) -> HostLedger:
        return HostLedger(self.num_host_blocks, len(self._free), len(self._kept), num_saving)

    def begin_save(self, block_id: int, block_hash: bytes) -> BlockCopy | None:
        """None where all that is kept is being read."""
        assert block_hash not in self._kept, "it is there"
        if not self._free:
            evicted = next((each for each, host_block in self._kept.items() if host_block not in self._reads), None)
            if evicted is None:
                return None
            self.forget(evicted)
            self._on_evicted(evicted)
        host_block_id = self._free.popleft()
        self._saving[host_block_id] = block_hash
        return BlockCopy(False, block_id, host_block_id)

    def end_save(self, host_block_id: int, *, is_wanted: bool) -> None:
        """It is copied. Not wanted: nothing is to find it."""
        block_hash = self._saving.pop(host_block_id)
        if is_wanted and block_hash not in self._kept:
            self._kept[block_hash] = host_block_id
        else:
            self._free.append(host_block_id)

    def begin_load(self, block_id: int, block_hash: bytes) -> BlockCopy:
        host_block_id = self._kept[block_hash]
        self._kept.move_to_end(block_hash)
        assert host_block_id not in self._reads, "it is in the pool, or will be"
        self._reads.add(host_block_id)
        return BlockCopy(True, block_id, host_block_id)

    def end_load(self, host_block_id: int) -> None:
        self._reads.remove(host_block_id)
        if host_block_id in self._forgotten:
            self._forgotten.remove(host_block_id)
            self._free.append(host_block_id)

    def forget(self, block_hash: bytes) -> None:
        """Nothing finds it any more. What is being read, or saved, is free afterwards."""
        host_block_id = self._kept.pop(block_hash, None)
        if host_block_id is None:
            return
        if host_block_id in self._reads:
            self._forgotten.add(host_block_id)
        else:
            self._free.append(host_block_id)

    def check_integrity(self) -> list[str]:
        """What is wrong, one sentence each."""
        places = Counter([*self._free, *self._kept.values(), *self._saving, *self._forgotten])
        wrong = [host_block for host_block in range(self.num_host_blocks) if places[host_block] != 1]
        return [f"host block {host_block} is in {places[host_block]} places" for host_block in wrong]
