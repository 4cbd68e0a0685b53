"""CUDA's interprocess handles for pools in the memory of pretended GPUs. This memory is shared memory, which other
processes really open, and which the same process may open, too, unlike with CUDA. The host makes the copies between
pools, as late as they may come."""

from __future__ import annotations

import ctypes

import torch
from device_peers import copy_rows_of_host

from engine import kv_cache
from engine.kv_cache import kv_pool_in
from engine.kv_shape import KVCacheShape
from kv_transfer import SharedMemory
from kv_transfer.pool import Rows
from kv_transfer.shared_memory import open_peers_memory
from pretend_gpu.device import PretendGpu
from pretend_gpu.devices import current, used
from pretend_gpu.memory import DeviceTensor, on_host
from pretend_gpu.races import places_of_rows
from pretend_gpu.streams import Event, Stream, current_stream, stream_context
from protos import tandem_kv_transfer_pb2 as pb
from worker_service.cuda_ipc import DevicePeers

HANDLE_BYTES = 64


class PretendDriver:
    """See `worker_service.cuda_ipc.IpcDriver`. A handle names the shared memory and its size."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu
        self._allocate_on_host = kv_cache.allocate_kv_pool
        self._allocations: dict[int, SharedMemory] = {}
        self.pools: dict[int, torch.Tensor] = {}
        """The pools that it allocated on the host, by address."""
        self._opened: dict[int, memoryview] = {}

    def allocate_kv_pool(self, shape: KVCacheShape, device: str) -> torch.Tensor:
        """Replaces `engine.kv_memory.allocate_kv_pool`."""
        if device == "cpu":
            return self._allocate_on_host(shape, device)
        shared = SharedMemory(shape.pool_bytes)
        memory = kv_pool_in(shared.buffer, shape)
        self._allocations[memory.data_ptr()] = shared
        self.pools[memory.data_ptr()] = memory
        return DeviceTensor(memory, self._gpu.memory)

    def export(self, address: int) -> tuple[bytes, int, int]:
        used()  # in the calling thread's context
        shared = self._allocations[address]
        num_bytes = len(shared.buffer)
        described = num_bytes.to_bytes(8, "little") + shared.describe().SerializeToString()
        return described.ljust(HANDLE_BYTES, b"\xff"), 0, num_bytes

    def open(self, handle: bytes) -> int:
        used()
        memory = pb.HostMemory.FromString(handle[8:].rstrip(b"\xff"))
        view = memoryview(open_peers_memory(memory, int.from_bytes(handle[:8], "little")))
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._opened[address] = view
        return address

    def close(self, address: int) -> None:
        used()
        del self._opened[address]

    def peers(self, device: torch.device) -> DevicePeers:
        """Replaces `worker_service.cuda_ipc.cuda_peers`."""
        stream = Stream(device, priority=-1)

        def copy_rows(source: torch.Tensor, address: int, rows_2R: Rows) -> None:
            assert rows_2R.flags.c_contiguous  # the kernel asserts this, too
            with current(used()):  # a launch goes to the current device
                memory, rows_2R = on_host(source), rows_2R.copy()  # a launch copies its arguments
                self._gpu.memory.accesses.touch(
                    memory, places_of_rows(memory, rows_2R[0]), "a copy to a peer", is_written=False
                )
                current_stream().later(lambda: copy_rows_of_host(memory, address, rows_2R))

        def record() -> Event:
            event = Event(blocking=True)
            event.record()
            return event

        return DevicePeers(self, copy_rows, lambda: stream_context(stream), record)
