"""The Triton kernels of adapters, compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_device import DEVICE

from engine.kernels.gpu.lora import TILE_ROWS, StackedAdapters, add_adapters, max_tiles, tiles_of
from engine.lora.adapters import AddedPart
from engine.lora.modules import LoRARoom

BFLOAT16 = torch.bfloat16
UNIT = {torch.float32: 2**-19, torch.float16: 2**-9, BFLOAT16: 2**-6}
RANKS: dict[int, list[int]] = {1: [16, 16, 16], 2: [3, 0, 5], 4: [40, 1, 16], 6: [0, 8, 0]}
"""For each adapter, its rank in each product. Adapters 3, 5 and 7 change nothing."""
NUM_ADAPTERS = 7
Added = dict[int, list[AddedPart]]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=DEVICE, dtype=dtype)


def added_of(inputs: int, sizes: list[int], dtype: torch.dtype) -> Added:
    starts = np.cumsum([0, *sizes]).tolist()
    added: Added = {}
    for number, ranks in RANKS.items():
        for start, size, rank in zip(starts, sizes, ranks, strict=False):
            if rank:
                down = randn(rank, inputs, dtype=dtype, seed=10 * number + start) / inputs**0.5
                up = randn(size, rank, dtype=dtype, seed=10 * number + start + 1) / rank**0.5
                added.setdefault(number, []).append(AddedPart(start, down, up))
    return added


def expected_of(x: torch.Tensor, y: torch.Tensor, added: Added, ids: list[int]) -> torch.Tensor:
    """Computed in float64, but for the rounding between an adapter's two products."""
    expected = y.double()
    for row, number in enumerate(ids):
        for part in added.get(number, []):
            shrunk = (part.down.double() @ x[row].double()).to(x.dtype).double()
            expected[row, part.start : part.start + len(part.up)] += part.up.double() @ shrunk
    return expected


def on_device(ids: list[int], num_tiles: int | None = None) -> torch.Tensor:
    return torch.from_numpy(tiles_of(np.array(ids), num_tiles or max_tiles(len(ids), NUM_ADAPTERS))).to(DEVICE)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("inputs", "sizes"), [(64, [48, 16, 20]), (130, [70]), (1100, [33, 33])], ids=["qkv", "one", "two pieces"]
)
def test_what_is_added_against_float64(inputs: int, sizes: list[int], dtype: torch.dtype) -> None:
    """Rows without an adapter keep their bits, and so do outputs that an adapter does not change."""
    ids = [1, 0, 4, 2, 3, 6, 0, 4, *[1] * 20, 2]
    added = added_of(inputs, sizes, dtype)
    stacked = StackedAdapters.of(added, sizes, inputs, NUM_ADAPTERS)
    x, y = (randn(len(ids), size, dtype=dtype, seed=size) for size in (inputs, sum(sizes)))
    expected, before = expected_of(x, y, added, ids), y.clone()
    add_adapters(x, stacked, on_device(ids), y)
    torch.testing.assert_close(y.double(), expected, rtol=UNIT[dtype], atol=UNIT[dtype])
    is_same = torch.equal
    for row, number in enumerate(ids):
        changed = torch.zeros(sum(sizes), dtype=torch.bool, device=DEVICE)
        for part in added.get(number, []):
            changed[part.start : part.start + len(part.up)] = True
        assert is_same(y[row, ~changed], before[row, ~changed])
        assert not changed.any() or not is_same(y[row, changed], before[row, changed])


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Nor on its place in a tile, or on the number of tiles without an adapter."""
    ids = [1, 4, *[1] * 17, 2, 0, 4]
    added = added_of(1100, [40], BFLOAT16)
    stacked = StackedAdapters.of(added, [40], 1100, NUM_ADAPTERS)
    x, plain = randn(len(ids), 1100, dtype=BFLOAT16, seed=1), randn(len(ids), 40, dtype=BFLOAT16, seed=2)
    whole = plain.clone()
    add_adapters(x, stacked, on_device(ids), whole)
    for rows in ([0], [1], [18, 19], [21, 2, 0], list(range(3, 20))):
        y = plain[rows]
        add_adapters(x[rows], stacked, on_device([ids[row] for row in rows], 9), y)
        assert torch.equal(y, whole[rows]), rows


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_those_that_come_later_add_the_same(dtype: torch.dtype) -> None:
    """They take the places that are kept for them, one after another in the same place."""
    sizes, inputs, ids = [48, 16, 20], 130, [1, 0, 4, 2, 6, 0, 4, *[1] * 20, 2]
    added = added_of(inputs, sizes, dtype)
    x, plain = (randn(len(ids), size, dtype=dtype, seed=size) for size in (inputs, sum(sizes)))
    expected = plain.clone()
    add_adapters(x, StackedAdapters.of(added, sizes, inputs, NUM_ADAPTERS), on_device(ids), expected)
    room = LoRARoom(num=3, max_rank=40)
    stacked = StackedAdapters.of({1: added[1]}, sizes, inputs, 3, room=room, dtype=dtype, device=str(DEVICE))
    assert set(stacked.slots) == {4, 5, 6}
    where = {1: 1, 4: 4, 2: 5, 6: 6}
    for number in (4, 6, 2):
        stacked.put(where[number], *stacked.prepare(added[4]))  # one of a larger rank comes first
        stacked.put(where[number], *stacked.prepare(added[number]))
    y, tiles = plain.clone(), on_device([where.get(number, 0) for number in ids])
    add_adapters(x, stacked, tiles, y)
    assert torch.equal(y, expected)
    stacked.remove(4)
    y = plain.clone()
    add_adapters(x, stacked, tiles, y)
    is_of_4 = torch.tensor([number == 4 for number in ids], device=DEVICE)
    assert torch.equal(y[is_of_4], plain[is_of_4])
    assert torch.equal(y[~is_of_4], expected[~is_of_4])


def test_rows_are_sorted_into_tiles_of_one_adapter() -> None:
    tiles = tiles_of(np.array([2, 0, 1, 2, *[5] * 18]), 5)
    assert tiles[:, 0].tolist() == [1, 2, 5, 5, 0]
    assert tiles[:, 1:3].tolist() == [[2, -1], [0, 3], [4, 5], [20, 21], [-1, -1]]
    assert tiles[2, 1:].tolist() == list(range(4, 20))
    assert tiles[3, 3:].tolist() == [-1] * (TILE_ROWS - 2)


@pytest.mark.parametrize("num_adapters", [1, 3, 40])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 50])
def test_so_many_tiles_are_enough_and_may_be_needed(num_rows: int, num_adapters: int) -> None:
    """The worst case: one row of each other adapter, and all the rest of the last one."""
    worst = np.minimum(np.arange(num_rows), num_adapters - 1) + 1
    most = max_tiles(num_rows, num_adapters)
    assert (tiles_of(worst, most)[:, 0] > 0).all()
    generator = np.random.default_rng(1)
    for _ in range(20):
        tiles_of(generator.integers(0, num_adapters + 1, num_rows), most)
