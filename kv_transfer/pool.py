"""A KV pool as bytes: addresses, copies and digests of blocks. `KVPool` is what transfers ask for; `HostPool` is one in
this process' memory. Who has a pool in a device's memory brings a class of its own.

Does not own the memory, and does not know who owns which block: callers (receiver, transports) ask the grants first.
The memory must outlive the pool and every transfer that uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.layout import KVLayout

Digests = npt.NDArray[np.uint64]


class KVPool(ABC):
    """Blocks `[layer, block, block_bytes]`, one after another in memory."""

    memory = "DRAM"
    """Where the bytes live, in NIXL's words: DRAM or VRAM."""
    device_id = 0

    def __init__(self, layout: KVLayout, base_address: int) -> None:
        self.layout = layout
        self.base_address = base_address

    def address(self, layer: int, block_id: int) -> int:
        """Where block `block_id` of `layer` begins."""
        return self.base_address + (layer * self.layout.num_blocks + block_id) * self.layout.block_bytes

    def bind_thread(self) -> None:
        """To be called by a transport's own thread before it gives this memory's addresses to a library: one that asks
        which device the calling thread uses gets this memory's. Nothing to do where the memory is a host's."""
        return

    @abstractmethod
    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        """`prefix` and a copy of the blocks, one after another: `len(block_ids) * block_bytes` bytes."""

    @abstractmethod
    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        """Copy `data`, blocks one after another, into the blocks. The caller has checked ids and length."""

    @abstractmethod
    def digests(self, block_ids: Sequence[int]) -> Digests:
        """xxh3_64 of each block of each layer: uint64 `[layer, len(block_ids)]`."""


class HostPool(KVPool):
    """The blocks of `array`, a C-contiguous writable uint8 array `[layer, block, block_bytes]` shaped like `layout`.

    Raises `ValueError` where array and layout disagree.
    """

    def __init__(self, layout: KVLayout, array: npt.NDArray[np.uint8]) -> None:
        shape = (layout.num_layers, layout.num_blocks, layout.block_bytes)
        if array.shape != shape or array.dtype != np.uint8:
            raise ValueError(f"the pool must be uint8 {shape}, not {array.dtype} {array.shape}")
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError("the pool must be C-contiguous and writable")
        super().__init__(layout, int(array.ctypes.data))
        self.array = array

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


def runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbouring ids merged: (index of the first, its id, how many), so that one copy moves several blocks."""
    merged: list[tuple[int, int, int]] = []
    for index, block_id in enumerate(block_ids):
        if merged and block_id == merged[-1][1] + merged[-1][2]:
            first, start, count = merged[-1]
            merged[-1] = (first, start, count + 1)
        else:
            merged.append((index, block_id, 1))
    return merged
