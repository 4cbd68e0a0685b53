"""Another process' KV pool in the memory of a GPU, opened here by CUDA's interprocess handles.

    receiver   export(pool's address) ──> handle of its allocation, offset in it ──a message──> open ──> address here
    sender     one launch copies many blocks of many layers ──event──> they are in the receiver's memory

On one GPU, and between two that reach each other (NVLink, PCIe): CUDA enables that when the memory is opened. Copies
run on a stream of their own, ahead of the engine's work. The mapping is this module's until `close`; it stays good, if
useless, when the process that owns the memory dies.
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
    """What we need of CUDA's driver. Its errors are `RuntimeError`s."""

    def export(self, address: int) -> tuple[bytes, int, int]:
        """The handle of the allocation that holds `address`, how far into it that is, and the allocation's bytes."""

    def open(self, handle: bytes) -> int:
        """Where that allocation begins in this process. As often as one likes; closed as often."""

    def close(self, address: int) -> None: ...


class CudaDriver:
    """The driver itself, in the calling thread's context. Needs `cuda-bindings`, which CUDA builds of torch bring."""

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
        # By its address: cuda-bindings have a name for its field up to 12.9.7 and 13.3 only.
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES), address - int(base), int(num_bytes)

    def open(self, handle: bytes) -> int:
        assert len(handle) == HANDLE_BYTES, "who opens it has seen to it"
        exported = self._driver.CUipcMemHandle()
        ctypes.memmove(exported.getPtr(), handle, HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        # CUDA does not say that it knows the size of what is opened so: whoever exports it says it.
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
    """Raises `InvalidTransfer` for a description that cannot be of a pool of so many rows."""
    if len(memory.handle) != HANDLE_BYTES:
        raise InvalidTransfer(f"a handle of CUDA's has {HANDLE_BYTES} bytes, not {len(memory.handle)}")
    if memory.offset + num_rows * row_bytes > memory.num_bytes:
        raise InvalidTransfer(f"a pool of {num_rows} rows at {memory.offset} does not fit its {memory.num_bytes} bytes")


class DevicePeers:
    """Opens peers' pools for the one of this process.

    copying: what is launched within goes to the copies' stream. record: an event there, of what was launched so far.
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
        """Raises `TransportMissing` where CUDA exports no handle of that memory."""
        try:
            handle, offset, num_bytes = self._driver.export(address)
        except RuntimeError as error:
            raise TransportMissing(
                f"other processes cannot open this GPU's memory ({error}). PYTORCH_CUDA_ALLOC_CONF must not ask for "
                "expandable_segments or cudaMallocAsync"
            ) from error
        return pb.CudaMemory(handle=handle, offset=offset, num_bytes=num_bytes)

    def open(self, memory: pb.CudaMemory, source: torch.Tensor, num_rows: int) -> PeerPool:
        """source: our pool, int64 `[row, words]`; the peer has `num_rows` rows of the same length. Raises as
        `KVPool.open_peer`."""
        check_memory(memory, num_rows, source.shape[1] * source.itemsize)
        try:
            base = self._driver.open(memory.handle)
        except RuntimeError as error:
            raise PeerUnreachable(
                f"cannot open the peer's GPU memory ({error}). The ipc transport needs both workers on one GPU, or on "
                "two with peer access, and containers to share the host's IPC and PID namespaces"
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
        """Once launched it goes on, whether this process stands still or not: a gigabyte takes a millisecond on one
        GPU, and tens between two."""
        if time.monotonic() > late_at_s():
            raise RuntimeError("this process stood still: the blocks may be somebody else's")
        return self._peers.copy(self._source, self._base + self._offset, rows_2R)

    def close(self) -> None:
        self._peers.close(self._base)


def cuda_peers(device: torch.device) -> DevicePeers:
    """Raises `TransportMissing` where Triton or CUDA's bindings are missing."""
    if reason := why_no_triton(device.type):
        raise TransportMissing(f"the ipc transport on a GPU needs Triton: {reason}")
    from engine.kernels.gpu.copy_rows import copy_rows

    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return DevicePeers(CudaDriver(), copy_rows, lambda: torch.cuda.stream(stream), record_cuda_event)


def record_cuda_event() -> torch.cuda.Event:
    """What the calling thread has launched up to now. Who waits for it sleeps: a thread that spins would take a core
    for as long as prompts are computed."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
