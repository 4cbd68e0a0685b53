"""Where a worker's pool is, by its transport. In each place it has the engine's bytes."""

from __future__ import annotations

import mmap
import os
import socket

import numpy as np
import pytest
import torch

from engine.kv_cache import KV_ORDER
from engine.kv_memory import RankProgram
from engine.kv_shape import KVCacheShape
from engine.running.executor import RankLost
from kv_transfer import TransportMissing
from kv_transfer.shared_memory import open_peers_memory
from worker_service.pool_memory import PoolMemory, transfer_pool
from worker_service.rank_pool import PoolServer

SHAPE = KVCacheShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=3, head_dim=8, dtype="bfloat16")


@pytest.mark.parametrize("transport", ["grpc", "ipc", "nixl"])
def test_what_the_engine_writes_is_what_travels(transport: str) -> None:
    memory = PoolMemory(transport, is_received=True)
    tensor = memory.allocate(SHAPE, "cpu")
    assert tensor.shape == SHAPE.axes
    assert tensor.is_contiguous()
    assert not tensor.any()
    pool = memory.as_pool(tensor, SHAPE, KV_ORDER)
    tensor[1, 3] = torch.randn(SHAPE.axes[2:], generator=torch.Generator().manual_seed(1))
    assert pool.read(1, [3]) == tensor[1, 3].view(torch.uint8).numpy().tobytes()
    assert not any(pool.read(1, [2]))


def test_over_ipc_others_open_it_and_over_others_nobody_can() -> None:
    memory = PoolMemory("ipc", is_received=True)
    tensor = memory.allocate(SHAPE, "cpu")
    pool = memory.as_pool(tensor, SHAPE, KV_ORDER)
    opened = open_peers_memory(pool.describe_memory().host, SHAPE.pool_bytes)
    np.frombuffer(opened, dtype=np.uint8)[:] = 7
    assert bool((tensor.view(torch.uint8) == 7).all())
    for own in (PoolMemory("grpc", is_received=True), PoolMemory("ipc", is_received=False)):
        with pytest.raises(TransportMissing):
            own.as_pool(own.allocate(SHAPE, "cpu"), SHAPE, KV_ORDER).describe_memory()


def test_a_worker_whose_memory_nobody_can_open_does_not_start_with_ipc() -> None:
    memory = PoolMemory("ipc", is_received=True)
    with pytest.raises(TransportMissing):
        memory.as_pool(torch.zeros(SHAPE.axes, dtype=torch.bfloat16), SHAPE, KV_ORDER)


@pytest.mark.parametrize("transport", ["grpc", "ipc"])
def test_what_other_processes_of_an_engine_write_is_what_travels(transport: str) -> None:
    memory = PoolMemory(transport, is_received=True)
    tensor, fd = memory.allocate_shared(SHAPE)
    pool = memory.as_pool(tensor, SHAPE, KV_ORDER)
    with mmap.mmap(fd, SHAPE.pool_bytes) as theirs:
        theirs[-2:] = b"xy"
        assert pool.read(1, [4]).endswith(b"xy")
        if transport == "ipc":
            opened = open_peers_memory(pool.describe_memory().host, SHAPE.pool_bytes)
            assert opened[-2:] == b"xy"


def test_ranks_on_gpus_have_theirs_and_the_worker_hears_of_one_that_is_lost() -> None:
    """The rank here loses its connection. On a CPU all ranks share one memory."""
    lost: list[RankLost] = []
    memory = PoolMemory("grpc", is_received=True, on_rank_lost=lost.append)
    assert memory.rank_program("cpu") == RankProgram()
    programs = [memory.rank_program("cuda") for _ in range(2)]
    own, *others = (torch.full(SHAPE.axes, float(rank), dtype=torch.bfloat16) for rank in range(3))
    for program, tensor in zip(programs, others, strict=True):
        assert program.module == "worker_service.rank"
        assert program.connection is not None
        PoolServer(transfer_pool(tensor, SHAPE, KV_ORDER), program.connection).start()
    pool = memory.as_pool(own, SHAPE, KV_ORDER)
    assert pool.layout.num_layers == 6
    tensors = (own, *others)
    for layer in range(6):
        assert pool.read(layer, [3]) == tensors[layer // 2][layer % 2, 3].view(torch.uint8).numpy().tobytes()
    assert programs[1].connection is not None
    assert lost == []
    with socket.socket(fileno=os.dup(programs[1].connection.fileno())) as theirs:
        theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankLost, match="rank 2 of the engine does not answer"):
        pool.digests([3])
    assert len(lost) == 1
