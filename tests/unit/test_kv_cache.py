"""The pool's shape and what is done to whole blocks of it."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCacheShape, allocate_kv_pool, clear_blocks, copy_blocks

SHAPE = KVCacheShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=3, head_dim=8, dtype="bfloat16")


def test_one_block_of_one_layer_is_contiguous_and_of_the_size_told() -> None:
    pool = allocate_kv_pool(SHAPE, "cpu")
    assert pool.is_contiguous()
    assert pool.shape == (2, 5, 2, 3, 4, 8)
    assert not pool.any()
    assert SHAPE.block_bytes == 2 * 3 * 4 * 8 * 2
    assert pool.stride(1) * pool.itemsize == SHAPE.block_bytes
    assert pool.nbytes == SHAPE.pool_bytes


def numbered_pool() -> torch.Tensor:
    pool = allocate_kv_pool(SHAPE, "cpu")
    for layer in range(2):
        for block in range(5):
            pool[layer, block] = 10 * layer + block + 1
    return pool


def content(pool: torch.Tensor) -> list[list[float]]:
    assert (pool.flatten(2).amax(2) == pool.flatten(2).amin(2)).all()
    return pool[:, :, 0, 0, 0, 0].tolist()


def test_copies_all_layers_and_reads_before_it_writes() -> None:
    pool = numbered_pool()
    copy_blocks(pool, [(0, 3), (3, 4)])
    assert content(pool) == [[1, 2, 3, 1, 4], [11, 12, 13, 11, 14]]


def test_clears_all_layers() -> None:
    pool = numbered_pool()
    clear_blocks(pool, [1, 4])
    assert content(pool) == [[1, 0, 3, 4, 0], [11, 0, 13, 14, 0]]
