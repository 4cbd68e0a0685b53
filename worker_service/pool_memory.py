"""Allocates an engine's KV pool so that the worker's transport can reach it, and presents it to transfers.

    PoolMemory(…) ──allocate──> the engine's tensor ──engine made──> as_pool: the same bytes, for transfers
        └─ rank_program: for each other rank on a GPU, which serves its own pool ─────┘

With "ipc", senders open a receiver's pool: on a CPU it must be in shared memory, on a GPU nothing is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.gpu import why_no_triton
from engine.kv_cache import kv_pool_in
from engine.kv_memory import KVMemory, RankProgram
from engine.kv_shape import KVCacheShape
from engine.running.executor import RankLost
from kv_transfer import HostPool, KVLayout, KVPool, SharedMemory
from worker_service.cuda_ipc import cuda_peers
from worker_service.device_pool import DevicePool, DigestBlocks, cuda_stream_beside, digest_on_host
from worker_service.pool_of_ranks import PoolOfRanks
from worker_service.rank_pool import RankPool


class PoolMemory(KVMemory):
    """Allocates a worker's pool, whose memory the tensor owns. With several ranks on GPUs, each rank has its own pool.

    is_received: peers write into the pool. on_rank_lost: called, on any thread, when a rank's pool can no longer be
    reached, so that the worker must end."""

    def __init__(
        self, transport: str, *, is_received: bool, on_rank_lost: Callable[[RankLost], None] = lambda error: None
    ) -> None:
        self._transport = transport
        self._is_received = is_received
        self._on_rank_lost = on_rank_lost
        self._shared: SharedMemory | None = None
        self._ranks: list[Connection[bytes, bytes]] = []
        """To all ranks but rank 0, in order."""

    def allocate(self, shape: KVCacheShape, device: str) -> torch.Tensor:
        """Also raises `TransportMissing` if the system has no shared memory."""
        if self._transport != "ipc" or not self._is_received or device != "cpu":
            return super().allocate(shape, device)
        return self.allocate_shared(shape)[0]

    def allocate_shared(self, shape: KVCacheShape) -> tuple[torch.Tensor, int]:
        self._shared = SharedMemory(shape.pool_bytes)
        return kv_pool_in(self._shared.buffer, shape), self._shared.fd

    def rank_program(self, device: str) -> RankProgram:
        if device == "cpu":
            return super().rank_program(device)
        ours, theirs = Pipe()
        self._ranks.append(ours)
        return RankProgram(module="worker_service.rank", connection=theirs)

    def as_pool(self, tensor: torch.Tensor, shape: KVCacheShape, order: str) -> KVPool:
        """Present the allocated pool as bytes. Raises `TransportMissing` if other processes cannot open it, `RankLost`
        if a rank does not describe its pool."""
        pool = transfer_pool(tensor, shape, order, self._shared)
        if self._ranks:
            others = [RankPool(rank, ours, self._on_rank_lost) for rank, ours in enumerate(self._ranks, start=1)]
            pool = PoolOfRanks([pool, *others])
        if self._transport == "ipc" and (self._is_received or tensor.device.type != "cpu"):
            pool.describe_memory()  # raises now rather than at the first request
        return pool


def transfer_pool(tensor: torch.Tensor, shape: KVCacheShape, order: str, shared: SharedMemory | None = None) -> KVPool:
    """Present an engine's pool to transfers as bytes, wherever it is. Shares the memory, which the engine owns.

    shared: the memory of a tensor on a CPU, if other processes may open it."""
    layout = KVLayout(
        num_layers=shape.num_layers,
        num_blocks=shape.num_blocks,
        block_size=shape.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        num_parts=shape.num_parts,
        order=order,
    )
    device = tensor.device
    if device.type != "cpu":
        digest_blocks = _digest_blocks(device.type, layout.block_bytes)
        pool = DevicePool(layout, tensor, digest_blocks, cuda_stream_beside(device), lambda: cuda_peers(device))
        pool.digests([0])  # compiles the kernel, so that the first transfer need not wait
        return pool
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return HostPool(layout, array.reshape(shape.num_layers, shape.num_blocks, shape.block_bytes), shared)


def _digest_blocks(device: str, block_bytes: int) -> DigestBlocks:
    """Digests on the device if blocks are large enough and Triton can run there (if not, the attention backend has
    reported that), else on the host."""
    if not why_no_triton(device):
        from engine.kernels.gpu.digest import block_digests, can_digest  # needs Triton

        if can_digest(block_bytes):
            return block_digests
    return digest_on_host
