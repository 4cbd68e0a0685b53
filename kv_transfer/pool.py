"""A KV pool as bytes: addresses, copies and digests of blocks. Transfers use the interface `KVPool`, wherever the
memory is. `HostPool` (host_pool.py) is a pool in this process' memory; a pool in a device's memory has its own class.

Processes on one machine can open each other's pools: `describe_memory` says how, `open_peer` does it. NIXL agents
(`start_agent`) also reach pools on other machines.

Does not own the memory, and does not know who owns which block: callers (receiver, transports) check grants first.
The memory must outlive the pool and every transfer that uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import KVLayout
from protos import tandem_kv_transfer_pb2 as pb

Digests = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
"""[2, rows]: source rows in our pool, and target rows in a peer's. A row is a block of a layer: `layer * num_blocks +
block`. One C-contiguous array, so that a launch can send it to the device as it is."""


class Copying(Protocol):
    """Copies in progress, with the interface of `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Return when the copies are done. Raises `RuntimeError` if the device failed."""


class PeerPool(Protocol):
    """A peer's pool that this process has opened. The opener closes it once no copy is in progress."""

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        """Begin to copy rows of our pool over the peer's, after earlier calls' copies. Called by one thread.
        If the host copies, it stops once `late_at_s` has passed. Raises `RuntimeError` if the device failed."""

    def close(self) -> None: ...


class PoolAgent(Protocol):
    """NIXL's agent of one pool, in as many processes as the pool is spread over. The caller that starts it closes it.
    Any thread may use it; all methods except `enter_push` and `leave_push` may block."""

    def describe(self) -> pb.NixlEndpoint:
        """Describe how peers reach this pool."""

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        """Open a peer's pool with `num_blocks` blocks, which its agent `name` described by `endpoint`. The caller has
        checked layout and memory, but not the number of parts. Raises `InvalidTransfer`, `PeerUnreachable`."""

    def enter_push(self) -> None:
        """A sender begins to write here: make progress until it leaves."""

    def leave_push(self) -> None: ...

    def close(self) -> None:
        """End the agent. The caller has closed all peers' pools."""


class KVPool(ABC):
    """Blocks `[layer, block, block_bytes]`, contiguous in one memory, or spread over several.

    base_address: address of the first block; None: the blocks are not one piece of this process' memory.
    """

    memory = "DRAM"
    """Where the bytes are, in NIXL's terms: DRAM or VRAM."""
    device_id = 0

    def __init__(self, layout: KVLayout, base_address: int | None) -> None:
        self.layout = layout
        self.base_address = base_address

    @abstractmethod
    def describe_memory(self) -> pb.IpcEndpoint:
        """Describe how another process of this machine opens this memory; the caller fills in `machine`.

        Raises `TransportMissing` if no other process can open it."""

    @abstractmethod
    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        """Open a peer's pool with `num_blocks` blocks, described by `endpoint`. The caller has checked its layout.

        Raises `InvalidTransfer` if the description cannot be that of such a pool, `PeerUnreachable` if its memory
        cannot be opened."""

    def bind_thread(self) -> None:
        """Make this memory's device the calling thread's current one. A transport's own thread calls this before it
        passes addresses of this memory to a library. Does nothing for host memory."""
        return

    @abstractmethod
    def start_agent(self, name: str) -> PoolAgent:
        """Start a NIXL agent, which peers know by `name`. Raises `TransportMissing` if NIXL is not installed or has no
        UCX, here or in another process that has a part of the pool."""

    @abstractmethod
    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        """Return `prefix` followed by a copy of the blocks: `len(block_ids) * block_bytes` bytes."""

    @abstractmethod
    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        """Copy `data`, which is consecutive blocks, into the blocks. The caller has checked ids and length."""

    @abstractmethod
    def digests(self, block_ids: Sequence[int]) -> Digests:
        """xxh3_64 of each block of each layer: uint64 `[layer, len(block_ids)]`."""
