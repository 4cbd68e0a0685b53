"""The digest kernel compared, bit for bit, with the library that computes digests on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_device import DEVICE

from engine.kernels.gpu.digest import MIN_BLOCK_BYTES, block_digests, can_digest
from kv_transfer.host_pool import HostPool
from kv_transfer.layout import DIGEST, KVLayout


def pool_of(num_bytes: int, *, num_layers: int = 2, num_blocks: int = 5, seed: int = 0) -> torch.Tensor:
    """[layer, block, 1, 1, 1, bytes], random bytes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, num_blocks, 1, 1, 1, num_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def expected_digests(pool: torch.Tensor, block_ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """The digests as transfers compute them."""
    num_layers, num_blocks = pool.shape[:2]
    array = pool.contiguous().view(torch.uint8).numpy().reshape(num_layers, num_blocks, -1)
    layout = KVLayout(
        num_layers=num_layers, num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_dim=array.shape[2] // 2,
        dtype="float8_e4m3fn",
    )  # fmt: skip
    return HostPool(layout, array).digests(block_ids)


@pytest.mark.parametrize(
    "num_bytes", [248, 256, 320, 512, 1016, 1024, 1032, 1088, 2040, 2048, 2056, 3072, 4032, 4096, 10_240, 16_384]
)
def test_digests_are_those_of_transfers(num_bytes: int) -> None:
    assert DIGEST == "xxh3_64"
    pool, block_ids = pool_of(num_bytes), [4, 0, 2]
    np.testing.assert_array_equal(block_digests(pool.to(DEVICE), block_ids), expected_digests(pool, block_ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_digests_of_a_pool_of_numbers(dtype: torch.dtype) -> None:
    pool = torch.randn(3, 4, 2, 2, 16, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    block_bytes = 2 * 2 * 16 * 40 * dtype.itemsize
    as_bytes = pool.view(torch.uint8).reshape(3, 4, 1, 1, 1, block_bytes)
    np.testing.assert_array_equal(block_digests(pool.to(DEVICE), [3, 1]), expected_digests(as_bytes, [3, 1]))


@pytest.mark.parametrize("fill", [0, 255])
def test_digests_of_equal_bytes(fill: int) -> None:
    pool = torch.full((1, 2, 1, 1, 1, 3000), fill, dtype=torch.uint8)
    np.testing.assert_array_equal(block_digests(pool.to(DEVICE), [1]), expected_digests(pool, [1]))


def test_every_bit_counts() -> None:
    pool = pool_of(2048, num_layers=1, num_blocks=1)
    before = block_digests(pool.to(DEVICE), [0])
    for place in (0, 1023, 1024, 1984, 2047):
        changed = pool.clone()
        changed[..., place] ^= 16
        assert block_digests(changed.to(DEVICE), [0]) != before


def test_no_blocks_have_no_digests() -> None:
    assert block_digests(pool_of(1024).to(DEVICE), []).shape == (2, 0)


@pytest.mark.parametrize("num_bytes", [8, 240, MIN_BLOCK_BYTES, 1020])
def test_blocks_that_it_cannot_hash_are_refused(num_bytes: int) -> None:
    assert not can_digest(num_bytes)
    with pytest.raises(ValueError, match=f"at least 241 bytes, a multiple of 8, not {num_bytes}"):
        block_digests(pool_of(num_bytes).to(DEVICE), [0])
