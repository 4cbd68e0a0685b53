"""A KV pool as bytes: addresses, copies and digests of blocks. `KVPool` is the interface that transfers use, wherever
the memory is. In this process' memory it is `HostPool` (host_pool.py); a pool in a device's memory needs a class of its
own.

Processes on one machine may open each other's pools: `describe_memory` says how, `open_peer` does it. NIXL agents
(`start_agent`) also do it between machines.

Does not own the memory, and does not know who owns which block: callers (receiver, transports) ask the grants first.
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
"""[2, rows]: what of our pool is copied, and over what of a peer's. A row is a block of a layer of one pool: `layer *
num_blocks + block`. One array, in C's order: a launch sends it to the device as it is."""


class Copying(Protocol):
    """Copies that were begun, as `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Return when they are done. Raises `RuntimeError` where the device failed."""


class PeerPool(Protocol):
    """A peer's pool, opened by this process. The opener closes it, when nothing is copied any more."""

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        """Begin to copy rows of our pool over theirs, in the order of earlier calls. Called by one thread.
        Where the host copies, it stops when `late_at_s` has passed. Raises `RuntimeError` where the device failed."""

    def close(self) -> None: ...


class PoolAgent(Protocol):
    """What NIXL does for one pool, in as many processes as the pool lies in. The caller that starts it closes it. Used
    by any thread; all methods except `enter_push` and `leave_push` may block."""

    def describe(self) -> pb.NixlEndpoint:
        """How peers reach this pool."""

    def open_peer(self, name: str, endpoint: pb.NixlEndpoint, num_blocks: int) -> PeerPool:
        """The pool of a peer with `num_blocks` blocks, whose agent `name` described it so: layout and memory are
        checked already, but not whether it lies in as many parts. Raises `InvalidTransfer`, `PeerUnreachable`."""

    def enter_push(self) -> None:
        """A sender begins to write here: make progress until it leaves."""

    def leave_push(self) -> None: ...

    def close(self) -> None:
        """The caller has closed all peers' pools."""


class KVPool(ABC):
    """Blocks `[layer, block, block_bytes]`, one after another in memory, or in several memories.

    base_address: where the first one begins; None: they do not lie in one piece of this process' memory.
    """

    memory = "DRAM"
    """Where the bytes live, in NIXL's words: DRAM or VRAM."""
    device_id = 0

    def __init__(self, layout: KVLayout, base_address: int | None) -> None:
        self.layout = layout
        self.base_address = base_address

    @abstractmethod
    def describe_memory(self) -> pb.IpcEndpoint:
        """How another process of this machine opens this memory; its `machine` is left to the caller.

        Raises `TransportMissing` where none can."""

    @abstractmethod
    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        """The pool of a peer with `num_blocks` blocks, which described its memory so; its layout is checked already.

        Raises `InvalidTransfer` for a description that cannot be of such a pool, `PeerUnreachable` where its memory
        cannot be opened."""

    def bind_thread(self) -> None:
        """To be called by a transport's own thread before it gives this memory's addresses to a library: one that asks
        which device the calling thread uses gets this memory's. Nothing to do where the memory is a host's."""
        return

    @abstractmethod
    def start_agent(self, name: str) -> PoolAgent:
        """One of NIXL's, which its peers know by `name`. Raises `TransportMissing` where NIXL is not installed or has
        no UCX, here or in another process that has a part of the pool."""

    @abstractmethod
    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        """`prefix` and a copy of the blocks, one after another: `len(block_ids) * block_bytes` bytes."""

    @abstractmethod
    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        """Copy `data`, blocks one after another, into the blocks. The caller has checked ids and length."""

    @abstractmethod
    def digests(self, block_ids: Sequence[int]) -> Digests:
        """xxh3_64 of each block of each layer: uint64 `[layer, len(block_ids)]`."""
