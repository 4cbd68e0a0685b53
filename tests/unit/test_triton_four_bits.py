"""The Triton kernels of experts with MXFP4 weights, compared with float64 and plain torch."""

from __future__ import annotations

import pytest
import torch
from expert_cases import UNIT, ends_of, randn
from triton_device import DEVICE  # must come before the kernels

from engine.kernels.gpu.experts import expert_config, tiles_of
from engine.kernels.gpu.four_bits import clamped_gate, four_bit_product
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.parts import TRITON_PARTS, TritonFourBitExperts
from engine.model_loader.mxfp4 import widen
from engine.models.four_bit_experts import GROUP, ClampedGate, FourBitStack

BFLOAT16 = torch.bfloat16
DTYPES = [pytest.param(x, marks=pytest.mark.slow if x == torch.float16 else ()) for x in UNIT]
GATE = ClampedGate(alpha=1.702, limit=7.0)


def stack_of(
    num_experts: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, low: int = 116, high: int = 124
) -> FourBitStack:
    """Weights of all 16 numbers, with scales from 2 to the (`low` - 127) up."""
    generator = torch.Generator().manual_seed(num_outputs)
    pairs = torch.randint(256, (num_experts, num_outputs, num_inputs // 2), dtype=torch.uint8, generator=generator)
    shape = (num_experts, num_outputs, num_inputs // GROUP)
    scales = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    bias = randn(num_experts, num_outputs, dtype=dtype, seed=2)
    return FourBitStack(pairs.to(DEVICE), scales.to(DEVICE), bias.to(DEVICE))


def widened(stack: FourBitStack, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K]"""
    return widen(stack.pairs.unflatten(2, (-1, 16)), stack.scales, dtype).transpose(1, 2)


def product(x: torch.Tensor, stack: FourBitStack, counts: list[int]) -> torch.Tensor:
    config = expert_config(gpu_kind(DEVICE), len(x), len(counts), x.itemsize)
    return four_bit_product(x, stack, tiles_of(ends_of(counts, DEVICE), len(x), config.block_t), config)


def exact_product(x: torch.Tensor, stack: FourBitStack, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product and bias, the sum of its terms' sizes), in float64."""
    experts = torch.repeat_interleave(torch.tensor(counts)).to(x.device)
    terms = x.double()[:, None, :] * widened(stack, x.dtype).double()[experts]
    bias = stack.bias.double()[experts]
    return terms.sum(dim=2) + bias, terms.abs().sum(dim=2) + bias.abs()


CASES = {
    "one row": ([0, 0, 1, 0], 33, 128),
    "few rows": ([1, 0, 2, 0, 0, 1, 3], 96, 320),
    "tiles of 32": ([21, 0, 14], 64, 96),
    "tiles of 64": ([70, 0, 3], 100, 64),
    "tiles of 128": ([150, 0], 130, 32),
}
"""Rows of experts, outputs, inputs."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_products_against_float64(case: str, dtype: torch.dtype) -> None:
    counts, num_outputs, num_inputs = CASES[case]
    stack = stack_of(len(counts), num_outputs, num_inputs, dtype)
    x = randn(sum(counts), num_inputs, dtype=dtype, seed=1, device=DEVICE)
    expected, size_of_terms = exact_product(x, stack, counts)
    y = product(x, stack, counts)
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert ((y.double() - expected).abs() <= UNIT[dtype] * size_of_terms).all()


@pytest.mark.parametrize("dtype", UNIT)
def test_each_weight_is_what_it_is_widened_to(dtype: torch.dtype) -> None:
    """Rows of 0 with a single 1 pick out one weight each: all 16 numbers with all powers of two that leave them
    finite."""
    num_powers = 140 if dtype == torch.float16 else 253
    pairs = torch.arange(0, 16, dtype=torch.uint8).repeat(2)  # 0 to 15, twice: 32 bytes, of two groups
    stack = FourBitStack(
        (pairs | pairs << 4).repeat(1, num_powers, 1).to(DEVICE),
        torch.arange(num_powers, dtype=torch.uint8).view(1, -1, 1).repeat(1, 1, 2).to(DEVICE),
        torch.zeros(1, num_powers, dtype=dtype, device=DEVICE),
    )
    x = torch.eye(64, dtype=dtype, device=DEVICE)
    y = product(x, stack, [64])
    expected = widened(stack, dtype)[0].T
    assert expected.isfinite().all()
    assert torch.equal(y, expected)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    """In tiles of any size, and at any place in a tile."""
    if DEVICE == "cuda":
        pytest.skip("tensor cores may add up larger tiles otherwise")
    stack = stack_of(3, 40, 128, BFLOAT16)
    x = randn(200, 128, dtype=BFLOAT16, device=DEVICE)
    alone = product(x[:1], stack, [0, 1, 0])
    for before, beside in ((0, 3), (5, 9), (30, 10), (40, 30), (90, 100)):
        rows = torch.cat((x[1 : 1 + before], x[:1], x[1 : 1 + beside]))
        y = product(rows, stack, [before // 2, before - before // 2 + 1 + beside, 0])
        assert torch.equal(y[before], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_that_of_plain_torch(dtype: torch.dtype) -> None:
    gate_up = 6 * randn(3, 5, 2 * 70, dtype=dtype, device=DEVICE)
    gate_up[0, 0, :4] = torch.tensor([float("nan"), 1.0, 1.0, float("nan")])
    y = clamped_gate(gate_up, GATE)
    assert (y.dtype, y.shape) == (dtype, (3, 5, 70))
    assert y[0, 0, :2].isnan().all()
    # The error of a GPU's exponential function, in units, grows with its argument: up to some 30 here.
    torch.testing.assert_close(y, GATE(gate_up), rtol=4 * UNIT[dtype], atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_feed_forward_is_that_of_plain_torch(dtype: torch.dtype) -> None:
    assert TRITON_PARTS.four_bit_experts is TritonFourBitExperts
    counts = [3, 0, 18, 1, 0]
    x = randn(sum(counts), 64, dtype=dtype, device=DEVICE)
    gate_up, down = stack_of(5, 192, 64, dtype), stack_of(5, 64, 96, dtype)
    y = TritonFourBitExperts(gate_up, down, GATE)(x, ends_of(counts, DEVICE))
    inner = GATE(exact_product(x, gate_up, counts)[0].to(dtype))
    expected, _ = exact_product(inner, down, counts)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert (y.double() - expected).norm() <= 2 * UNIT[dtype] * expected.norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_rows_of_other_experts() -> None:
    experts = TritonFourBitExperts(stack_of(4, 128, 64, BFLOAT16), stack_of(4, 64, 64, BFLOAT16), GATE)
    x, ends = randn(9, 64, dtype=BFLOAT16, device=DEVICE), ends_of([9, 0, 0, 0], DEVICE)
    experts(x, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = experts(x, ends)
    for counts in ([0, 0, 0, 9], [1, 2, 0, 6], [9, 0, 0, 0]):
        ends.copy_(ends_of(counts, DEVICE))
        graph.replay()
        assert torch.equal(out, experts(x, ends))
