"""Where the memory of a KV pool comes from, and what else has to run where others are to reach it."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from engine.kv_cache import KVCacheShape, allocate_kv_pool, kv_pool_in


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """What the process of an engine's other rank runs (engine/tensor_parallel)."""

    module: str = "engine.tensor_parallel"
    connection: Connection[bytes, bytes] | None = None
    """For that process, beside the engine's own. Whoever starts it hands this one over, and closes it here."""


class KVMemory:
    """Where a pool's memory comes from: here this process' own. Who lets others reach it brings a class of its own."""

    def allocate(self, shape: KVCacheShape, device: str) -> torch.Tensor:
        """The pool, contiguous and zeroed. Raises `ValueError` where a CPU has not so much memory."""
        return allocate_kv_pool(shape, device)

    def rank_program(self, device: str) -> RankProgram:
        """For the next one of several ranks, which allocates a pool of its own on a GPU. Asked in their order."""
        del device
        return RankProgram()

    def allocate_shared(self, shape: KVCacheShape) -> tuple[torch.Tensor, int]:
        """A pool on a CPU, zeroed, in memory that other processes may map; and its file descriptor, open as long as
        this object lives."""
        fd = os.memfd_create("tandem-kv")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, shape.pool_bytes)
        return kv_pool_in(mmap.mmap(fd, shape.pool_bytes), shape), fd
