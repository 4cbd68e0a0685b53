"""All experts' products at once equal, to the bit, those of one expert after the other, however threads share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu_experts import PanelExperts
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear
from engine.layers import Activation
from engine.models.expert_products import ExpertWeight
from engine.quantization import as_int8
from engine.weight import Weight, as_int4

BFLOAT16 = torch.bfloat16
QUANTISERS: dict[str, Callable[[Weight], Weight]] = {"plain": lambda weight: weight, "int8": as_int8, "int4": as_int4}
NUMS_ROWS = {
    "one row": [0, 0, 1, 0],
    "a token's": [1, 1, 0, 1],
    "few": [3, 0, 2, 13],
    "many and few": [1, 300, 0, 17],
    "the last has none": [40, 1, 5, 0],
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_cpu_kernels()


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weights_of(num_inputs: int, size: int, form: str) -> list[ExpertWeight]:
    generator = torch.Generator().manual_seed(size)

    def weight(*shape: int) -> Weight:
        return QUANTISERS[form]((torch.randn(*shape, generator=generator) / 8).to(BFLOAT16))

    shapes = (size, num_inputs), (size, num_inputs), (num_inputs, size)
    return [(weight(*shapes[0]), weight(*shapes[1]), weight(*shapes[2])) for _ in range(4)]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("form", QUANTISERS)
@pytest.mark.parametrize("rows", NUMS_ROWS)
@pytest.mark.parametrize(("num_inputs", "size"), [(64, 32), (96, 416), (544, 64)])
def test_experts_are_those_of_one_after_the_other(
    num_inputs: int, size: int, rows: str, form: str, activation: Activation
) -> None:
    weights = weights_of(num_inputs, size, form)
    x = torch.randn(sum(NUMS_ROWS[rows]), num_inputs, generator=torch.Generator().manual_seed(1)).to(BFLOAT16)
    ends = torch.tensor(NUMS_ROWS[rows]).cumsum(0).int()
    found = PanelExperts(iter(weights), activation)(x, ends)
    expected = torch.empty_like(x)
    for (gate, up, down), (start, end) in zip(weights, pairwise([0, *ends.tolist()]), strict=True):
        if start < end:
            inner = PanelGatedLinear(gate, up, None, None, activation)(x[start:end])
            expected[start:end] = PanelLinear(down)(inner)
    assert torch.equal(found, expected)


def test_no_rows_at_all() -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    assert experts(torch.empty(0, 64, dtype=BFLOAT16), torch.zeros(4, dtype=torch.int32)).shape == (0, 64)


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (torch.tensor([1, 2, 3, 4]), r"ends \[E\], int32"),
        (torch.tensor([1, 2, 4]).int(), r"ends \[E\], int32"),
        (torch.tensor([1, 0, 3, 4]).int(), "must not fall"),
        (torch.tensor([-1, 0, 3, 4]).int(), "must not fall"),
        (torch.tensor([1, 2, 3, 5]).int(), "nor be more than there are rows"),
        (torch.tensor([1, 2, 3, 3]).int(), "each row must have an expert"),
    ],
)
def test_ends_that_do_not_fit(ends: torch.Tensor, why: str) -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    with pytest.raises(RuntimeError, match=why):
        experts(torch.zeros(4, 64, dtype=BFLOAT16), ends)


def test_rows_of_another_size() -> None:
    experts = PanelExperts(iter(weights_of(64, 32, "plain")))
    with pytest.raises(RuntimeError, match="of K inputs"):
        experts(torch.zeros(4, 62, dtype=BFLOAT16), torch.tensor([4, 4, 4, 4]).int())
