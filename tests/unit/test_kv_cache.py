"""The pool's shape, and operations on whole blocks of the pool."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import kv_cache
from engine.kv_cache import PIECE_BYTES, allocate_kv_pool, clear_blocks, rounded_for_pool
from engine.kv_shape import KVCacheShape, kv_dtype_of

FLOAT8 = "float8_e4m3fn"
SHAPE = KVCacheShape(num_layers=2, num_blocks=5, block_size=4, num_kv_heads=3, head_dim=8, dtype="bfloat16")


def test_one_block_of_one_layer_is_contiguous_and_of_the_size_told() -> None:
    pool = allocate_kv_pool(SHAPE, "cpu")
    assert pool.is_contiguous()
    assert pool.shape == (2, 5, 2, 3, 4, 8)
    assert not pool.any()
    assert SHAPE.block_bytes == 2 * 3 * 4 * 8 * 2
    assert pool.stride(1) * pool.itemsize == SHAPE.block_bytes
    assert pool.nbytes == SHAPE.pool_bytes


def test_what_a_token_has_in_a_layer_need_not_be_two() -> None:
    shape = replace(SHAPE, num_parts=1)
    pool = allocate_kv_pool(shape, "cpu")
    assert pool.shape == (2, 5, 1, 3, 4, 8)
    assert pool.nbytes == shape.pool_bytes == SHAPE.pool_bytes / 2


def test_8_bits_halve_the_pool() -> None:
    shape = replace(SHAPE, dtype="float8_e4m3fn")
    assert allocate_kv_pool(shape, "cpu").nbytes == shape.pool_bytes == SHAPE.pool_bytes / 2


@pytest.mark.parametrize(("kv_cache_dtype", "expected"), [("auto", "float16"), ("fp8", FLOAT8), ("fp8_e4m3", FLOAT8)])
def test_what_a_pool_holds(kv_cache_dtype: str, expected: str) -> None:
    assert kv_dtype_of(kv_cache_dtype, "float16") == expected


def test_what_is_too_large_for_8_bits_is_saturated() -> None:
    x = torch.tensor([0.0, 0.3, -1.0, 447.0, 449.0, 465.0, -1e30, float("inf"), float("nan")], dtype=torch.bfloat16)
    rounded = rounded_for_pool(x, torch.float8_e4m3fn).float()
    assert rounded[:8].tolist() == [0.0, 0.3125, -1.0, 448.0, 448.0, 448.0, -448.0, 448.0]
    assert rounded[8].isnan()
    assert rounded_for_pool(x, torch.bfloat16) is x


def numbered_pool(dtype: str) -> torch.Tensor:
    pool = allocate_kv_pool(replace(SHAPE, dtype=dtype), "cpu")
    for layer in range(2):
        for block in range(5):
            pool[layer, block] = 10 * layer + block + 1
    return pool


def content(pool: torch.Tensor) -> list[list[float]]:
    pool = pool.float()
    assert (pool.flatten(2).amax(2) == pool.flatten(2).amin(2)).all()
    return pool[:, :, 0, 0, 0, 0].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", FLOAT8])
def test_clears_all_layers(dtype: str) -> None:
    pool = numbered_pool(dtype)
    clear_blocks(pool, [1, 4])
    assert content(pool) == [[1, 0, 3, 4, 0], [11, 0, 13, 14, 0]]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no huge pages here")
@pytest.mark.parametrize(("slowest", "has_all"), [(0.001, True), (1e15, False)], ids=["quick", "slow"])
def test_a_cpus_pool_asks_for_huge_pages_while_they_come_quickly(
    slowest: float, has_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "SLOWEST_BYTES_PER_S", slowest)
    shape = replace(SHAPE, num_blocks=2 * PIECE_BYTES // SHAPE.block_bytes)
    pool = allocate_kv_pool(shape, "cpu")
    assert pool.nbytes > 2 * PIECE_BYTES
    assert not pool.view(torch.uint8).any()
    first, last = (flags_of_mapping(pool.data_ptr() + at) for at in (0, pool.nbytes - 1))
    assert "hg" in first
    assert ("hg" in last) == has_all
    assert "sh" not in first  # private memory: no other process may see its content


def flags_of_mapping(address: int) -> list[str]:
    """The flags that Linux reports for the memory mapping at `address`."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", first):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_there = begin <= address < end
        elif is_there and first == "VmFlags:":
            return rest
    raise AssertionError("no such mapping")
