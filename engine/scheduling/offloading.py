"""Tracks which cached blocks have a copy in host memory and which are being copied. Integers only, no torch.

Owns the ids of the host's blocks and the hashes of their contents. Does not own the memory, does not copy
(`engine.running.host_copies` does), and does not know who uses the pool's blocks (`engine.scheduling.block_manager`).

    a block of the host          FREE ──begin_save──> SAVING ──end──> KEPT ──evicted by a newer one, forgotten──> FREE
                                                         └─ forgotten meanwhile ─────────────────────────────────────┘
                                 KEPT ──begin_load──> KEPT, and read: not evicted before the load's end

The block that was saved or loaded least recently is evicted first. A loaded block also stays on the host, so that it
need not be copied again when the pool evicts it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from engine.scheduling.block_ledger import HostLedger


class BlockCopy(NamedTuple):
    """A copy of all layers of one block between the pool and host memory."""

    is_load: bool
    """True: from the host to the pool; False: from the pool to the host."""
    block_id: int
    host_block_id: int


class Offloading:
    """One per pool. With `num_host_blocks` 0, nothing is offloaded."""

    def __init__(self, num_host_blocks: int, on_evicted: Callable[[bytes], object]) -> None:
        """`on_evicted` is called with the hash of a copy that is evicted for a newer one."""
        self._on_evicted = on_evicted
        self.num_host_blocks = num_host_blocks
        self._free: deque[int] = deque(range(num_host_blocks))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """Hash to host block, oldest first."""
        self._saving: dict[int, bytes] = {}
        """Host block to the hash that it will be found by."""
        self._reads: set[int] = set()
        """Host blocks that are being loaded from, by one load each: later requests find the pool's block."""
        self._forgotten: set[int] = set()
        """Host blocks that can no longer be found but are still being loaded from."""

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def hashes(self) -> list[bytes]:
        return list(self._kept)

    def ledger(self, num_saving: int) -> HostLedger:
        return HostLedger(self.num_host_blocks, len(self._free), len(self._kept), num_saving)

    def begin_save(self, block_id: int, block_hash: bytes) -> BlockCopy | None:
        """Begin to copy a block to the host. Returns None if no host block is free and all kept ones are being read."""
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
        """The copy is done. Keep it if `is_wanted`, else free the host block."""
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
        """Make a kept copy unfindable and free it; a copy that is being read is freed when its load ends."""
        host_block_id = self._kept.pop(block_hash, None)
        if host_block_id is None:
            return
        if host_block_id in self._reads:
            self._forgotten.add(host_block_id)
        else:
            self._free.append(host_block_id)

    def check_integrity(self) -> list[str]:
        """Return one sentence per error."""
        places = Counter([*self._free, *self._kept.values(), *self._saving, *self._forgotten])
        wrong = [host_block for host_block in range(self.num_host_blocks) if places[host_block] != 1]
        return [f"host block {host_block} is in {places[host_block]} places" for host_block in wrong]
