"""The KV pool of an engine whose memory is a device's, as transfers see it, and when that memory is written.

An engine that computes on a device says that a layer's KV is written when it has *launched* what writes it, and goes
on. `DeviceWatch` passes that on when the device has come so far; so whoever hears of a layer may read it, by any way:

    engine's thread   layer 0 launched ─ event ─> layer 1 launched ─ event ─> … tokens there ── catch_up ──> report
    watch's thread                         └─ wait ─> tell ───────────┴─ wait ─> tell ────────────┘

`DevicePool` copies and digests blocks on a stream beside the engine's, so that transfers of one layer overlap the
computing of the next. Blocks on their way between this memory and gRPC rest in pinned host memory, which a device
copies at full speed; a transport that reads and writes memory by its address (`memory`, `base_address`) needs none.

The memory is the engine's. The watch owns its thread, until `close`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
import xxhash

from kv_transfer import InvalidTransfer, KVLayout, KVPool, TransportMissing
from kv_transfer.nixl_agent import NixlAgent
from kv_transfer.pool import Digests, PeerPool, PoolAgent
from protos import tandem_kv_transfer_pb2 as pb
from worker_service.cuda_ipc import DevicePeers, record_cuda_event

_log = logging.getLogger(__name__)

BLOCKS_AT_ONCE = 128
"""Of a layer, copied to the host for their digests."""

DigestBlocks = Callable[[torch.Tensor, Sequence[int]], Digests]
"""xxh3_64 of blocks of a pool [layer, block, …] where they lie: [layer, len(block_ids)]."""


class DeviceEvent(Protocol):
    """What was launched up to a moment, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> object:
        """Return when it is done. Raises `RuntimeError` where the device failed."""


RecordEvent = Callable[[], DeviceEvent]
"""Marks what the calling thread has launched up to now."""
BesideEngine = Callable[[], AbstractContextManager[object]]
"""What is launched within runs beside the engine's work, and is done when the context is left."""


def cuda_stream_beside(device: torch.device) -> BesideEngine:
    # Ahead of the engine's: a gather of a megabyte would wait for all of a prompt's product, each time.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside() -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    return beside


def digest_on_host(tensor: torch.Tensor, block_ids: Sequence[int]) -> Digests:
    """A copy of the blocks to the host, some at a time, and the digests there: for a device that has no kernel for
    them."""
    digests = np.empty((len(tensor), len(block_ids)), dtype=np.uint64)
    for layer, blocks in enumerate(tensor):
        for first in range(0, len(block_ids), BLOCKS_AT_ONCE):
            ids = torch.tensor(block_ids[first : first + BLOCKS_AT_ONCE], dtype=torch.int64, device=tensor.device)
            copied = blocks.index_select(0, ids).cpu().view(torch.uint8).flatten(1).numpy()
            digests[layer, first : first + len(copied)] = [xxhash.xxh3_64_intdigest(block) for block in copied]
    return digests


class DeviceWatch:
    """`when_done` and `catch_up` are the engine's thread's; `close` ends the watch's own."""

    def __init__(self, record_event: RecordEvent = record_cuda_event) -> None:
        self._record_event = record_event
        self._untold: deque[tuple[DeviceEvent, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        self._thread.start()

    def when_done(self, tell: Callable[[], object]) -> None:
        """Call `tell`, on another thread and in order, when the device has done what this thread has launched."""
        event = self._record_event()
        with self._changed:
            self._untold.append((event, tell))
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Return when all is told that the device has done by now: before a step is reported, as after it a commit may
        name its blocks. The next step may be under way already; its layers are not waited for."""
        with self._changed:
            last_done = next((event for event, _ in reversed(self._untold) if self._is_done(event)), None)
            self._changed.wait_for(lambda: all(event is not last_done for event, _ in self._untold))

    def close(self) -> None:
        """Tell what is still to come, and return."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _is_done(self, event: DeviceEvent) -> bool:
        """A failed device does nothing more; its event may raise, or not."""
        return self._has_failed or event.query()

    def _wait_for(self, event: DeviceEvent) -> None:
        try:
            if not self._has_failed:
                event.synchronize()
        except RuntimeError:  # of the device: the engine's own thread meets it, too, and its process ends
            _log.exception("the device failed")
            self._has_failed = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._untold or self._is_closing)
                if not self._untold:
                    return
                event, tell = self._untold[0]
            self._wait_for(event)
            if not self._has_failed:
                try:
                    tell()
                except Exception:  # a commit finds out what has not been pushed, and pushes it then
                    _log.exception("a layer that is written could not be told of")
            with self._changed:
                self._untold.popleft()
                self._changed.notify_all()


class DevicePool(KVPool):
    """The blocks of `tensor`, contiguous, `[layer, block, …]` on a device.

    make_peers: called once, when the first process is to open this memory or another's. Raises `ValueError` where
    tensor and layout disagree.
    """

    def __init__(
        self,
        layout: KVLayout,
        tensor: torch.Tensor,
        digest_blocks: DigestBlocks,
        beside: BesideEngine = nullcontext,
        make_peers: Callable[[], DevicePeers] | None = None,
    ) -> None:
        num_bytes = tensor.numel() * tensor.itemsize
        if tensor.shape[:2] != (layout.num_layers, layout.num_blocks) or num_bytes != layout.pool_bytes:
            raise ValueError(
                f"the pool must have {layout.pool_bytes} bytes in {layout.num_layers} layers of {layout.num_blocks} "
                f"blocks, not {num_bytes} in {tuple(tensor.shape[:2])}"
            )
        if not tensor.is_contiguous():
            raise ValueError("the pool must be contiguous")
        self._address = tensor.data_ptr()
        super().__init__(layout, self._address)
        self.memory = "DRAM" if tensor.device.type == "cpu" else "VRAM"
        self.device_id = tensor.device.index or 0
        self._tensor = tensor
        self._bytes_LBN = tensor.view(torch.uint8).view(layout.num_layers, layout.num_blocks, layout.block_bytes)
        self._digest_blocks = digest_blocks
        self._beside = beside
        self._make_peers = make_peers
        self._made_peers: DevicePeers | None = None

    def describe_memory(self) -> pb.IpcEndpoint:
        self.bind_thread()
        return pb.IpcEndpoint(pool_bytes=self.layout.pool_bytes, cuda=self._peers().export(self._address))

    def open_peer(self, endpoint: pb.IpcEndpoint, num_blocks: int) -> PeerPool:
        if endpoint.WhichOneof("memory") != "cuda":
            raise InvalidTransfer("a pool in a device's memory cannot be copied into a host's")
        return self._peers().open(endpoint.cuda, self._rows(), self.layout.num_layers * num_blocks)

    def start_agent(self, name: str) -> PoolAgent:
        return NixlAgent(name, self)

    def bind_thread(self) -> None:
        """A new thread uses the first device, and has no CUDA context before it calls CUDA's runtime, which torch's
        `set_device` does not where the device is the current one already."""
        if self._tensor.device.type == "cuda":
            torch.cuda.set_device(self._tensor.device)
            torch.cuda.synchronize(self._tensor.device)

    def read(self, layer: int, block_ids: Sequence[int], *, prefix: bytes = b"") -> bytes:
        host = self._staging(len(block_ids))
        with self._beside():
            host.copy_(self._bytes_LBN[layer].index_select(0, self._on_device(block_ids)), non_blocking=True)
        return b"".join([prefix, host.numpy().data])

    def write(self, layer: int, block_ids: Sequence[int], data: bytes | memoryview) -> None:
        host = self._staging(len(block_ids))
        host.numpy()[:] = np.frombuffer(data, dtype=np.uint8).reshape(host.shape)
        with self._beside():
            blocks = host.to(self._tensor.device, non_blocking=True)
            self._bytes_LBN[layer].index_copy_(0, self._on_device(block_ids), blocks)

    def digests(self, block_ids: Sequence[int]) -> Digests:
        with self._beside():
            return self._digest_blocks(self._tensor, block_ids)

    def _peers(self) -> DevicePeers:
        if self._make_peers is None:
            raise TransportMissing("this pool's memory can be opened by no other process")
        if self._made_peers is None:
            self._made_peers = self._make_peers()
            # A row onto itself: what this compiles, the first transfer need not wait for.
            self._made_peers.copy(self._rows(), self._address, np.zeros((2, 1), dtype=np.int64)).synchronize()
        return self._made_peers

    def _rows(self) -> torch.Tensor:
        """int64 [block of a layer, words]"""
        return self._bytes_LBN.view(torch.int64).flatten(0, 1)

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Host memory that a device copies by itself; torch keeps it for the next one."""
        shape = (num_blocks, self.layout.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.memory == "VRAM")

    def _on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._tensor.device)
