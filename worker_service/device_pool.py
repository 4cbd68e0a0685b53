"""The KV pool of an engine in a device's memory, as transfers see it, and a watch that tells when layers are written.

An engine on a device reports a layer's KV as written when it has *launched* the writing kernels, and continues.
`DeviceWatch` passes the report on when the device has done the work, so that a receiver of the report may read the
layer:

    engine's thread   layer 0 launched ─ event ─> layer 1 launched ─ event ─> … tokens there ── catch_up ──> report
    watch's thread                         └─ wait ─> tell ───────────┴─ wait ─> tell ────────────┘

`DevicePool` copies and digests blocks on another stream than the engine's, so that the transfer of one layer overlaps
with computing the next. For gRPC, blocks go through pinned host memory, which a device copies at full speed. A
transport that accesses memory by its address (`memory`, `base_address`) does not need that.

The engine owns the memory. The watch owns its thread until `close`.
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
"""Blocks of a layer that are copied to the host at a time to compute their digests."""

DigestBlocks = Callable[[torch.Tensor, Sequence[int]], Digests]
"""Computes xxh3_64 of blocks of a pool [layer, block, …]: [layer, len(block_ids)]."""


class DeviceEvent(Protocol):
    """A point in a device's queue, with the interface of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> object:
        """Return when the device has reached it. Raises `RuntimeError` if the device failed."""


RecordEvent = Callable[[], DeviceEvent]
"""Records an event of what the calling thread has launched so far."""
BesideEngine = Callable[[], AbstractContextManager[object]]
"""Context whose launches run in parallel to the engine's work, and are done when the context is left."""


def cuda_stream_beside(device: torch.device) -> BesideEngine:
    # With priority over the engine: otherwise each gather of a megabyte would wait for a prompt's whole product.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside() -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    return beside


def digest_on_host(tensor: torch.Tensor, block_ids: Sequence[int]) -> Digests:
    """Copy the blocks to the host, some at a time, and compute their digests there: for devices without a kernel for
    that."""
    digests = np.empty((len(tensor), len(block_ids)), dtype=np.uint64)
    for layer, blocks in enumerate(tensor):
        for first in range(0, len(block_ids), BLOCKS_AT_ONCE):
            ids = torch.tensor(block_ids[first : first + BLOCKS_AT_ONCE], dtype=torch.int64, device=tensor.device)
            copied = blocks.index_select(0, ids).cpu().view(torch.uint8).flatten(1).numpy()
            digests[layer, first : first + len(copied)] = [xxhash.xxh3_64_intdigest(block) for block in copied]
    return digests


class DeviceWatch:
    """The engine's thread calls `when_done` and `catch_up`. `close` ends the watch's thread."""

    def __init__(self, record_event: RecordEvent = record_cuda_event) -> None:
        self._record_event = record_event
        self._untold: deque[tuple[DeviceEvent, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        self._thread.start()

    def when_done(self, tell: Callable[[], object]) -> None:
        """Call `tell` on the watch's thread, in order, when the device has done what this thread has launched so
        far."""
        event = self._record_event()
        with self._changed:
            self._untold.append((event, tell))
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Return when everything that the device has done by now has been told. Called before a step is reported, since
        a commit may then name its blocks. Does not wait for layers of the next step, which may already be running."""
        with self._changed:
            last_done = next((event for event, _ in reversed(self._untold) if self._is_done(event)), None)
            self._changed.wait_for(lambda: all(event is not last_done for event, _ in self._untold))

    def close(self) -> None:
        """Wait until everything has been told, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _is_done(self, event: DeviceEvent) -> bool:
        """Also true after the device has failed, when events may raise or not."""
        return self._has_failed or event.query()

    def _wait_for(self, event: DeviceEvent) -> None:
        try:
            if not self._has_failed:
                event.synchronize()
        except RuntimeError:  # a device error: the engine's thread gets it, too, and the process ends
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
                except Exception:  # the commit notices what was not pushed, and pushes it
                    _log.exception("a layer that is written could not be told of")
            with self._changed:
                self._untold.popleft()
                self._changed.notify_all()


class DevicePool(KVPool):
    """The blocks of `tensor`, contiguous, `[layer, block, …]` on a device.

    make_peers: called once, before this memory is first exported or a peer's first opened. Raises `ValueError` if
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
        """A new thread uses the first device, and has no CUDA context until it calls CUDA's runtime. torch's
        `set_device` makes no such call if the device is already the current one, so `synchronize` does."""
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
            # Copy a row onto itself: compiles the kernel, so that the first transfer need not wait.
            self._made_peers.copy(self._rows(), self._address, np.zeros((2, 1), dtype=np.int64)).synchronize()
        return self._made_peers

    def _rows(self) -> torch.Tensor:
        """int64 [block of a layer, words]"""
        return self._bytes_LBN.view(torch.int64).flatten(0, 1)

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Pinned host memory for asynchronous copies; torch caches it."""
        shape = (num_blocks, self.layout.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self.memory == "VRAM")

    def _on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._tensor.device)
