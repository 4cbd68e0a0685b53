"""Allocates the memory of KV pools, and says which program a rank runs so that others can reach its pool."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from engine.kv_cache import allocate_kv_pool, kv_pool_in
from engine.kv_shape import KVCacheShape


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The program that the process of another rank runs (engine/tensor_parallel)."""

    module: str = "engine.tensor_parallel"
    connection: Connection[bytes, bytes] | None = None
    """An additional connection for that process. Whoever starts the process passes it on, and closes it here."""


class KVMemory:
    """Allocates pools in this process' own memory. Subclasses allocate memory that other processes can reach."""

    def allocate(self, shape: KVCacheShape, device: str) -> torch.Tensor:
        """Allocate a pool, contiguous and zeroed. Raises `ValueError` if the host has not enough memory."""
        return allocate_kv_pool(shape, device)

    def rank_program(self, device: str) -> RankProgram:
        """The program of the next rank, which on a GPU allocates its own pool. Called once per rank, in order."""
        del device
        return RankProgram()

    def allocate_shared(self, shape: KVCacheShape) -> tuple[torch.Tensor, int]:
        """Allocate a zeroed pool on a CPU in memory that other processes can map. Also returns its file descriptor,
        which stays open as long as this object lives."""
        fd = os.memfd_create("tandem-kv")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, shape.pool_bytes)
        return kv_pool_in(mmap.mmap(fd, shape.pool_bytes), shape), fd
