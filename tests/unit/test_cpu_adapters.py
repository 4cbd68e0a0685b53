"""What the CPU kernels add to a product for adapters: compared with float64, and independent of the rows beside a
row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch

from engine.kernels.cpu_adapters import (
    AdaptedPanelGatedLinear,
    AdaptedPanelLinear,
    PanelAdapters,
)
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear
from engine.layers import ACTIVATIONS, Activation
from engine.lora.adapters import AddedPart

BFLOAT16 = torch.bfloat16
Added = dict[int, list[AddedPart]]

pytestmark = pytest.mark.usefixtures("cpu_threads")


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


def added_of(inputs: int, sizes: list[int], ranks: dict[int, list[int]]) -> Added:
    """`ranks`: for each adapter, one rank for each of the stacked products. 0: the adapter leaves that product as it
    is."""
    starts = np.cumsum([0, *sizes]).tolist()
    return {
        number: [
            AddedPart(
                start,
                drawn(rank, inputs, seed=100 * number + rank + start) / inputs**0.5,
                drawn(size, rank, seed=7 * number + rank + start),
            )
            for start, size, rank in zip(starts, sizes, ranks_of_one, strict=False)
            if rank
        ]
        for number, ranks_of_one in ranks.items()
    }


def expected_of(x: torch.Tensor, weight: torch.Tensor, added: Added, ids: list[int]) -> torch.Tensor:
    """Computed in float64, but for the rounding between an adapter's two products."""
    y = x.double() @ weight.double().T
    for number, parts in added.items():
        rows = np.flatnonzero(np.array(ids) == number)
        for part in parts:
            shrunk = (x[rows].double() @ part.down.double().T).to(BFLOAT16)
            y[rows, part.start : part.start + len(part.up)] += shrunk.double() @ part.up.double().T
    return y


SHAPES: list[tuple[int, list[int]]] = [(576, [576, 192, 192]), (64, [31]), (130, [48, 16, 1]), (2, [1]), (1536, [576])]
RANKS: dict[int, list[int]] = {1: [16, 16, 16], 2: [3, 0, 5], 4: [40, 1, 16], 7: [0, 8, 0]}
"""Adapters 3, 5 and 6 do not exist. The ranks end within a pair, within 16, and beyond."""
IDS = [1, 0, 2, 1, 4, 3, 7, 0, 1, 2, 4, 4, 9, 1]
"""The adapter of each row: some change nothing, and one is unknown."""


Product = TypeVar("Product", AdaptedPanelLinear, AdaptedPanelGatedLinear)


def rows_of(num_rows: int) -> list[int]:
    return [IDS[i % len(IDS)] for i in range(num_rows)]


def with_added(product: Product, added: Added) -> Product:
    for number, parts in added.items():
        product.put(number, product.prepare(parts))
    return product


def linear_of(inputs: int, sizes: list[int], added: Added) -> tuple[torch.Tensor, AdaptedPanelLinear, PanelAdapters]:
    weight = drawn(sum(sizes), inputs, seed=1)
    plain, adapters = PanelLinear(weight), PanelAdapters(())
    return weight, with_added(AdaptedPanelLinear(plain, inputs, adapters), added), adapters


@pytest.mark.parametrize(("inputs", "sizes"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 14, 37, 300])
def test_added_products_against_float64(num_rows: int, inputs: int, sizes: list[int]) -> None:
    added = added_of(inputs, sizes, {number: ranks[: len(sizes)] for number, ranks in RANKS.items()})
    added = {number: parts for number, parts in added.items() if parts}
    weight, product, adapters = linear_of(inputs, sizes, added)
    x, ids = drawn(num_rows, inputs, seed=2), rows_of(num_rows)
    adapters.assign(np.array(ids))
    expected = expected_of(x, weight, added, ids)
    # A sum near the middle of two neighbours in bfloat16 may be rounded either way, and is then multiplied.
    torch.testing.assert_close(product(x).double(), expected, rtol=2**-7, atol=2e-2 * inputs**0.5 * 2**-3)


@pytest.mark.parametrize(("inputs", "size"), [(576, 1536), (64, 24), (130, 1)])
@pytest.mark.parametrize("num_rows", [1, 14, 300])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_added_to_a_gate_and_what_it_is_applied_to(
    activation: Activation, num_rows: int, inputs: int, size: int
) -> None:
    added = {key: parts for key, parts in added_of(inputs, [size, size], RANKS).items() if parts}
    weight, adapters = drawn(2 * size, inputs, seed=1) / inputs**0.5, PanelAdapters(())
    gated = PanelGatedLinear(*weight.chunk(2), None, None, activation)
    product = with_added(AdaptedPanelGatedLinear(gated, inputs, adapters), added)
    x, ids = drawn(num_rows, inputs, seed=2), rows_of(num_rows)
    adapters.assign(np.array(ids))
    gate, up = expected_of(x, weight, added, ids).chunk(2, dim=1)
    found, expected = product(x).double(), ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(found, expected, rtol=2**-4, atol=0.15)
    assert (found - expected).norm() <= 2**-7 * expected.norm()
    adapters.assign(np.array([], dtype=np.int64))
    assert torch.equal(product(x), gated(x))


def test_rows_without_an_adapter_have_the_bits_of_the_product_by_itself() -> None:
    added = added_of(576, [96], {1: [16], 2: [8]})
    weight, product, adapters = linear_of(576, [96], added)
    x, ids = drawn(300, 576, seed=2), np.array(rows_of(300))
    plain = PanelLinear(weight)(x)
    adapters.assign(ids)
    y = product(x)
    is_changed = np.isin(ids, [1, 2])
    assert torch.equal(y[~is_changed], plain[~is_changed])
    assert (y[is_changed] != plain[is_changed]).any(dim=1).all()
    adapters.assign(ids * 0)
    assert torch.equal(product(x), plain)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(is_gated: bool) -> None:
    """Nor on their adapters, on how many rows share its own adapter, or on the number of threads."""
    added = added_of(576, [96, 96], {1: [16, 16], 2: [3, 40], 3: [0, 64]})
    for part in (part for parts in added.values() for part in parts):
        part.down[:, 288:] = -part.down[:, :288]
    weight = drawn(192, 576, seed=1) / 24
    adapters = PanelAdapters(())
    product: Callable[[torch.Tensor], torch.Tensor]
    if is_gated:
        gated = PanelGatedLinear(*weight.chunk(2), None, None)
        product = with_added(AdaptedPanelGatedLinear(gated, 576, adapters), added)
    else:
        plain = PanelLinear(weight)
        product = with_added(AdaptedPanelLinear(plain, 576, adapters), added)
    x, ids = drawn(400, 576, seed=2), np.array([(i * i) % 4 for i in range(200)] + [1] * 200)
    # Large numbers that nearly cancel each other: if added up in another order, another rest would be left.
    x[:, 288:] = 100 * x[:, :288] + x[:, 288:]
    x[:, :288] *= 100
    adapters.assign(ids)
    whole = product(x)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 12, 13, 150):
            for first in range(0, 400, max(num_rows, 11)):
                some = slice(first, first + num_rows)
                adapters.assign(ids[some])
                assert torch.equal(product(x[some].contiguous()), whole[some]), (num_threads, num_rows, first)


def test_of_one_that_is_gone_nothing_is_left() -> None:
    added, ids = added_of(64, [40], {1: [16], 2: [5]}), [1, 0, 2, 2, 1]
    _, product, adapters = linear_of(64, [40], added)
    _, other, _ = linear_of(64, [40], {1: added[1]})
    x = drawn(len(ids), 64, seed=2)
    adapters.assign(np.array(ids))
    with_both = product(x)
    product.remove(2)
    product.remove(9)
    other._adapters.assign(np.array(ids))  # type: ignore[attr-defined]
    assert torch.equal(product(x), other(x))
    assert not torch.equal(product(x), with_both)
    product.put(2, product.prepare(added[2]))
    assert torch.equal(product(x), with_both)


def test_what_does_not_fit_is_refused() -> None:
    weight, product, adapters = linear_of(64, [32], added_of(64, [32], {1: [4]}))
    del weight
    x = drawn(3, 64, seed=1)
    adapters.assign(np.array([1, 1]))
    with pytest.raises(RuntimeError, match="one row for each adapter id"):
        product(x)
    adapters.assign(np.array([1, -1, 1]))
    with pytest.raises(RuntimeError, match="adapter ids must be in"):
        product(x)
    down, up, pairs = torch.zeros(1, 32, 16, 2, dtype=BFLOAT16), torch.zeros(4, 16, 2, dtype=BFLOAT16), [(0, 2), (6, 2)]
    made = torch.classes.tandem_cpu.AddedProduct(64, 2)
    made.add(1, down, up, torch.tensor(pairs))
    for change in ([(0, 2), (7, 2)], [(-1, 2), (0, 2)], [(0, 2), (0, 3)], [(0, 2), (0, 2), (0, 0)]):
        with pytest.raises(RuntimeError, match="pairs"):
            made.add(1, down, up, torch.tensor(change))
    with pytest.raises(RuntimeError, match="of the product's inputs"):
        made.add(1, torch.zeros(1, 31, 16, 2, dtype=BFLOAT16), up, torch.tensor(pairs))
    with pytest.raises(RuntimeError, match="id must be in"):
        made.add(0, down, up, torch.tensor(pairs))
