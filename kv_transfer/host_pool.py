"""A KV pool in this process' memory, and a peer's pool in this machine's memory. The host computes copies and digests.

Does not own the memory, which must outlive the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.errors import InvalidTransfer, TransportMissing
from kv_transfer.layout import KVLayout
from kv_transfer.nixl_agent import NixlAgent
from kv_transfer.pool import Copying, Digests, KVPool, PeerPool, PoolAgent, Rows
from kv_transfer.shared_memory import SharedMemory, open_peers_memory
from protos import tandem_kv_transfer_pb2 as pb


class HostPool(KVPool):
    """The blocks of `array`, a C-contiguous writable uint8 array `[layer, block, block_bytes]` shaped like `layout`.

    shared: the memory that `array` starts in, if other processes may open it. Raises `ValueError` if array and layout
    disagree.
    """

    def __init__(self, layout: KVLayout, array: npt.NDArray[np.uint8], shared: SharedMemory | None = None) -> None:
        shape = (layout.num_layers, layout.num_blocks, layout.block_bytes)
        if array.shape != shape or array.dtype != np.uint8:
            raise ValueError(f"the pool must be uint8 {shape}, not {array.dtype} {array.shape}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError("the pool must be C-contiguous and writable")
        super().__init__(layout, int(array.ctypes.data))
        self.array = array
        self._shared = shared

    def describe_memory(self) -> pb.IpcEndpoint:
        if self._shared is None:
            raise TransportMissing("this pool's memory is this process' own: no other one can open it")
        return pb.IpcEndpoint(pool_bytes=self.layout.pool_bytes, host=self._shared.describe())

    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        if endpoint.WhichOneof("memory") != "host":
            raise InvalidTransfer("a pool in the host's memory cannot be copied into a device's")
        size = (self.layout.num_layers * num_blocks, self.layout.block_bytes)
        memory = open_peers_memory(endpoint.host, size[0] * size[1])
        target = np.frombuffer(memory, dtype=np.uint8).reshape(size)
        return HostPeerPool(self.array.reshape(-1, self.layout.block_bytes), target)

    def start_agent(self, name: str) -> PoolAgent:
        return NixlAgent(name, self)

    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        layer_blocks = self.array[layer]
        slices = [layer_blocks[start : start + count].data for _, start, count in runs(block_ids)]
        return b"".join([prefix, *slices])

    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        source = np.frombuffer(data, dtype=np.uint8).reshape(len(block_ids), self.layout.block_bytes)
        layer_blocks = self.array[layer]
        for first, start, count in runs(block_ids):
            layer_blocks[start : start + count] = source[first : first + count]

    def digests(self, block_ids: Sequence[int]) -> Digests:
        num_layers = self.layout.num_layers
        values = (
            xxhash.xxh3_64_intdigest(self.array[layer, block_id])
            for layer in range(num_layers)
            for block_id in block_ids
        )
        flat = np.fromiter(values, dtype=np.uint64, count=num_layers * len(block_ids))
        return flat.reshape(num_layers, len(block_ids))


MAX_PIECE_BYTES = 256 << 10
"""Bytes that the host copies between checks of the deadline: 20 to 100 us."""


class HostPeerPool:
    """A peer's pool in host memory. Both pools are `[row, block_bytes]`. Unmapped with its last reference."""

    def __init__(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        self._source = source
        self._target: npt.NDArray[np.uint8] | None = target
        self._max_rows = max(1, MAX_PIECE_BYTES // source.shape[1])

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        for first in range(0, rows_2R.shape[1], self._max_rows):
            if time.monotonic() > late_at_s():
                break
            self._copy_piece(rows_2R[:, first : first + self._max_rows])
        return _Copied()

    def _copy_piece(self, rows_2R: Rows) -> None:
        source, target = self._source, self._target
        assert target is not None
        # Rows that are adjacent on both sides become one copy. Python integers: slicing with numpy's would take as long
        # as the copy.
        starts = np.flatnonzero((np.diff(rows_2R, prepend=-2) != 1).any(axis=0))
        counts = np.diff(starts, append=rows_2R.shape[1]).tolist()
        for src, dst, count in zip(*rows_2R[:, starts].tolist(), counts, strict=True):
            target[dst : dst + count] = source[src : src + count]

    def close(self) -> None:
        self._target = None


class _Copied:
    def synchronize(self) -> None:
        return


def runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge adjacent ids to (index of the first, its id, count), so that one copy moves several blocks."""
    merged: list[tuple[int, int, int]] = []
    for index, block_id in enumerate(block_ids):
        if merged and block_id == merged[-1][1] + merged[-1][2]:
            first, start, count = merged[-1]
            merged[-1] = (first, start, count + 1)
        else:
            merged.append((index, block_id, 1))
    return merged
