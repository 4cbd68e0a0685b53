"""Opens another process' KV pool in GPU memory by CUDA's interprocess handles.

    receiver   export(pool's address) ──> handle of its allocation, offset in it ──message──> sender: open ──> address
    sender     one launch copies many blocks of many layers ──event──> they are in the receiver's memory

Works on one GPU, and between two with peer access (NVLink, PCIe), which CUDA enables when the memory is opened. Copies
run on a stream of their own, with priority over the engine's work. This module owns the mapping until `close`; the
mapping stays valid, though useless, when the process that owns the memory dies.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from engine.kernels.gpu import why_no_triton
from kv_transfer import InvalidTransfer, PeerUnreachable, TransportMissing
from kv_transfer.pool import Copying, PeerPool, Rows
from protos import tandem_kv_transfer_pb2 as pb

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE"""
CopyRows = Callable[[torch.Tensor, int, Rows], None]
"""`engine.kernels.gpu.copy_rows.copy_rows`"""


class IpcDriver(Protocol):
    """The part of CUDA's driver that we need. Its errors are `RuntimeError`s."""

    def export(self, address: int) -> tuple[bytes, int, int]:
        """Return the handle of the allocation that holds `address`, the offset in it, and the allocation's size."""

    def open(self, handle: bytes) -> int:
        """Map the allocation and return its address in this process. Each `open` needs a `close`."""

    def close(self, address: int) -> None: ...


class CudaDriver:
    """The driver, in the calling thread's context. Needs `cuda-bindings`, which CUDA builds of torch install."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise TransportMissing(
                f"the ipc transport on a GPU needs cuda-bindings (pip install cuda-bindings): {error}"
            ) from error
        self._driver: Any = driver

    def export(self, address: int) -> tuple[bytes, int, int]:
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        (handle,) = self._call("cuIpcGetMemHandle", int(base))
        # By its address: cuda-bindings name the field only up to 12.9.7 and 13.3.
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES), address - int(base), int(num_bytes)

    def open(self, handle: bytes) -> int:
        assert len(handle) == HANDLE_BYTES, "who opens it has seen to it"
        exported = self._driver.CUipcMemHandle()
        ctypes.memmove(exported.getPtr(), handle, HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        # CUDA does not document that it knows the size of a mapping opened so: the exporter sends it.
        (address,) = self._call("cuIpcOpenMemHandle", exported, int(flags))
        return int(address)

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def _call(self, name: str, *arguments: object) -> tuple[Any, ...]:
        result, *values = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {result.name}")
        return tuple(values)


def check_memory(memory: pb.CudaMemory, num_rows: int, row_bytes: int) -> None:
    """Raise `InvalidTransfer` if this cannot describe a pool of `num_rows` rows."""
    if len(memory.handle) != HANDLE_BYTES:
        raise InvalidTransfer(f"a handle of CUDA's has {HANDLE_BYTES} bytes, not {len(memory.handle)}")
    if memory.offset + num_rows * row_bytes > memory.num_bytes:
        raise InvalidTransfer(f"a pool of {num_rows} rows at {memory.offset} does not fit its {memory.num_bytes} bytes")


class DevicePeers:
    """Opens peers' pools, to copy into them from this process' pool.

    copying: context that launches on the copies' stream. record: records an event of what was launched there so far.
    """

    def __init__(
        self,
        driver: IpcDriver,
        copy_rows: CopyRows,
        copying: Callable[[], AbstractContextManager[object]],
        record: Callable[[], Copying],
    ) -> None:
        self._driver = driver
        self._copy_rows = copy_rows
        self._copying = copying
        self._record = record

    def export(self, address: int) -> pb.CudaMemory:
        """Describe this memory to peers. Raises `TransportMissing` if CUDA exports no handle of it."""
        try:
            handle, offset, num_bytes = self._driver.export(address)
        except RuntimeError as error:
            raise TransportMissing(
                f"other processes cannot open this GPU's memory ({error}). PYTORCH_CUDA_ALLOC_CONF must not ask for "
                "expandable_segments or cudaMallocAsync; --transport grpc works without"
            ) from error
        return pb.CudaMemory(handle=handle, offset=offset, num_bytes=num_bytes)

    def open(self, memory: pb.CudaMemory, source: torch.Tensor, num_rows: int) -> PeerPool:
        """source: our pool, int64 `[row, words]`; the peer has `num_rows` rows of the same length. Raises what
        `KVPool.open_peer` raises."""
        check_memory(memory, num_rows, source.shape[1] * source.itemsize)
        try:
            base = self._driver.open(memory.handle)
        except RuntimeError as error:
            raise PeerUnreachable(
                f"cannot open the peer's GPU memory ({error}). The ipc transport needs both workers on one GPU, or on "
                "two with peer access, containers to share the host's IPC and PID namespaces, and no WSL 2"
            ) from error
        return DevicePeerPool(self, source, base, memory.offset)

    def copy(self, source: torch.Tensor, address: int, rows_2R: Rows) -> Copying:
        with self._copying():
            self._copy_rows(source, address, rows_2R)
            return self._record()

    def close(self, base: int) -> None:
        self._driver.close(base)


class DevicePeerPool:
    """See `kv_transfer.pool.PeerPool`."""

    def __init__(self, peers: DevicePeers, source: torch.Tensor, base: int, offset: int) -> None:
        self._peers = peers
        self._source = source
        self._base = base
        self._offset = offset

    def copy(self, rows_2R: Rows, late_at_s: Callable[[], float]) -> Copying:
        """A launched copy continues even if this process stands still: a gigabyte takes a millisecond on one GPU, and
        tens of milliseconds between two."""
        if time.monotonic() > late_at_s():
            raise RuntimeError("this process stood still: the blocks may be somebody else's")
        return self._peers.copy(self._source, self._base + self._offset, rows_2R)

    def close(self) -> None:
        self._peers.close(self._base)


def cuda_peers(device: torch.device) -> DevicePeers:
    """Raises `TransportMissing` if Triton or CUDA's bindings are missing."""
    if reason := why_no_triton(device.type):
        raise TransportMissing(f"the ipc transport on a GPU needs Triton: {reason}")
    from engine.kernels.gpu.copy_rows import copy_rows

    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return DevicePeers(CudaDriver(), copy_rows, lambda: torch.cuda.stream(stream), record_cuda_event)


def record_cuda_event() -> torch.cuda.Event:
    """Record an event of what the calling thread has launched so far. Waiting for it sleeps: a spinning thread would
    take a core as long as prompts are computed."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
