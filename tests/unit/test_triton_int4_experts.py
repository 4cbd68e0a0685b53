"""The Triton kernel of experts with 4-bit weights, compared with float64, plain torch and products of single
weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import UNIT, ends_of, int4_weight_of, randn
from triton_device import DEVICE, ROUNDS_AS_A_GPU  # must come before the kernels

from engine.int4_weight import Int4Weight
from engine.kernels.gpu.experts import expert_config, tiles_of
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.int4 import ScaledInt4, int4_product
from engine.kernels.gpu.int4_experts import int4_expert_product
from engine.kernels.gpu.invariant_parts import INVARIANT_PARTS
from engine.kernels.gpu.parts import TRITON_PARTS, TritonInt4Experts
from engine.layers import ACTIVATIONS, Activation
from engine.models.expert_products import ScaledExperts, of_expert

BFLOAT16 = torch.bfloat16
DTYPES = [pytest.param(x, marks=pytest.mark.slow if x == torch.float16 else ()) for x in UNIT]
SCALES = pytest.mark.parametrize("scale_dtype", [BFLOAT16, torch.float32])
"""The dtype that scales and offsets are rounded to. With the first, kernels get a scale and its offset in one word."""


def stack_of(
    num_experts: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype = torch.float32,
) -> Int4Weight:
    return int4_weight_of(num_experts * num_outputs, num_inputs, group_size, dtype, scale_dtype, DEVICE)


def product(x: torch.Tensor, stack: Int4Weight, counts: list[int]) -> torch.Tensor:
    config = expert_config(gpu_kind(DEVICE), len(x), len(counts), x.itemsize)
    tiles = tiles_of(ends_of(counts, DEVICE), len(x), config.block_t)
    return int4_expert_product(x, ScaledInt4.of(stack), len(counts), tiles, config)


def exact_product(x: torch.Tensor, stack: Int4Weight, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product, the sum of its terms' sizes), in float64."""
    weight = stack.dequantized().double().unflatten(0, (len(counts), -1))
    terms = x.double()[:, None, :] * weight[torch.repeat_interleave(torch.tensor(counts)).to(x.device)]
    return terms.sum(dim=2), terms.abs().sum(dim=2)


CASES = {
    "one row": ([0, 0, 1, 0], 33, 192, 64),
    "few rows": ([1, 0, 2, 0, 0, 1, 3], 96, 512, 128),
    "all inputs share a scale": ([5, 1, 0, 18], 40, 224, 224),
    "groups that tiles cut": ([2, 0, 9], 64, 576, 192),
    "tiles of 32": ([21, 0, 14], 64, 96, 32),
    "tiles of 64": ([70, 0, 3], 100, 256, 256),
    "tiles of 128": ([150, 0], 130, 160, 32),
}
"""Rows of experts, outputs, inputs, inputs of a group: some sizes divide evenly; with others, the last tile has
fewer."""


@pytest.mark.one_in(3)
@SCALES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_products_against_float64(case: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    counts, num_outputs, num_inputs, group_size = CASES[case]
    stack = stack_of(len(counts), num_outputs, num_inputs, group_size, dtype, scale_dtype)
    x = randn(sum(counts), num_inputs, dtype=dtype, seed=1, device=DEVICE)
    expected, size_of_terms = exact_product(x, stack, counts)
    y = product(x, stack, counts)
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert ((y.double() - expected).abs() <= UNIT[dtype] * size_of_terms).all()


@pytest.mark.skipif(ROUNDS_AS_A_GPU, reason="there tiles may take their inputs in another order")
@SCALES
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_multiplies_as_a_layer_of_its_weight_does(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """To the bit, with tiles of the same inputs."""
    counts, stack = [3, 0, 18, 1], stack_of(4, 40, 320, 64, dtype, scale_dtype)
    x = randn(22, 320, dtype=dtype, seed=1, device=DEVICE)
    config = replace(expert_config(gpu_kind(DEVICE), 22, 4, x.itemsize), num_programs=0)
    parts = [
        int4_product(rows, ScaledInt4.of(of_expert(stack, e, 4)), None, config)
        for e, rows in enumerate(x.split(counts))
        if len(rows)
    ]
    assert torch.equal(product(x, stack, counts), torch.cat(parts))


@SCALES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 96])
def test_each_weight_is_what_it_is_widened_to(group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Rows of 0 with a single 1 pick out one weight each."""
    stack = stack_of(2, 50, 96, group_size, dtype, scale_dtype)
    assert (ScaledInt4.of(stack).offset is None) == (scale_dtype == BFLOAT16)
    y = product(torch.eye(96, dtype=dtype, device=DEVICE).repeat(2, 1), stack, [96, 96])
    for e, widened in enumerate(y.split(96)):
        assert torch.equal(widened, of_expert(stack, e, 2).dequantized().T)


@SCALES
def test_nothing_but_a_rows_own_is_read(scale_dtype: torch.dtype) -> None:
    """The rows of other experts, the scales of experts without rows, and all memory around are NaN. Outputs and inputs
    end within a tile."""
    counts, (num_outputs, num_inputs, group_size) = [0, 3, 2, 0], (33, 160, 32)
    stack = stack_of(4, num_outputs, num_inputs, group_size, BFLOAT16, scale_dtype)
    x = randn(5, num_inputs, dtype=BFLOAT16, seed=1, device=DEVICE)
    expected = product(x, stack, counts)
    clean = ScaledInt4.of(stack)
    weight = replace(clean, scale=among_nan(clean.scale), offset=among_nan(clean.offset))
    for tensor in (weight.scale, weight.offset):
        for e in (0, 3):
            if tensor is not None:
                tensor.unflatten(0, (4, num_outputs))[e] = -1 if tensor.dtype == torch.int32 else torch.nan
    config = expert_config(gpu_kind(DEVICE), 5, 4, 2)
    tiles = tiles_of(ends_of(counts, DEVICE), 5, config.block_t)
    for own in (slice(0, 3), slice(3, 5)):
        rows = among_nan(torch.full_like(x, torch.nan))
        assert rows is not None
        rows[own] = x[own]
        y = int4_expert_product(rows, weight, 4, tiles, config)
        assert torch.equal(y[own], expected[own])
        assert int(y.isnan().all(1).sum()) == 5 - len(x[own])


def among_nan(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in the middle of memory that is otherwise NaN; a word of ones is two NaN."""
    if tensor is None:
        return None
    fill = -1 if tensor.dtype == torch.int32 else torch.nan
    memory = torch.full((3 * len(tensor), *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
    memory[len(tensor) : 2 * len(tensor)] = tensor
    return memory[len(tensor) : 2 * len(tensor)]


def test_tiles_without_rows_load_nothing() -> None:
    """Not even the weights of their expert: no expert has the number that they name."""
    weight = ScaledInt4.of(stack_of(2, 16, 64, 32, BFLOAT16))
    x, config = randn(5, 64, dtype=BFLOAT16, device=DEVICE), expert_config(gpu_kind(DEVICE), 5, 2, 2)
    tiles = torch.tensor([[1, 0, 5], [1 << 20, 0, 0], [1 << 20, 5, 5]], dtype=torch.int32, device=DEVICE)
    y = int4_expert_product(x, weight, 2, tiles, config)
    assert torch.equal(y, int4_expert_product(x, weight, 2, tiles[:1], config))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_feed_forward_is_that_of_plain_torch(activation: Activation, dtype: torch.dtype) -> None:
    """Also with `batch_invariant`: the order of a row's sums does not depend on the number of rows."""
    assert TRITON_PARTS.int4_experts is INVARIANT_PARTS.int4_experts is TritonInt4Experts
    counts = [3, 0, 18, 1, 0]
    x, ends = randn(sum(counts), 64, dtype=dtype, device=DEVICE), ends_of(counts, DEVICE)
    stacks = stack_of(5, 192, 64, 32, dtype), stack_of(5, 64, 96, 96, dtype, BFLOAT16)
    y, expected = (kind(*stacks, activation)(x, ends) for kind in (TritonInt4Experts, ScaledExperts))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert (y.double() - expected.double()).norm() <= 2 * UNIT[dtype] * expected.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """In tiles of any size, and at any place in a tile."""
    if DEVICE == "cuda" and dtype != torch.float32:
        pytest.skip("tensor cores may add up larger tiles otherwise")
    experts = TritonInt4Experts(stack_of(3, 128, 128, 32, dtype), stack_of(3, 128, 64, 64, dtype))
    x = randn(200, 128, dtype=dtype, device=DEVICE) / 8
    alone = experts(x[:1], ends_of([0, 1, 0], DEVICE))
    for before, beside in ((0, 3), (5, 9), (30, 10), (40, 30), (90, 100)):
        rows = torch.cat((x[1 : 1 + before], x[:1], x[1 : 1 + beside]))
        y = experts(rows, ends_of([before // 2, before - before // 2 + 1 + beside, 0], DEVICE))
        assert torch.equal(y[before], alone[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_rows_of_other_experts() -> None:
    experts = TritonInt4Experts(stack_of(4, 128, 64, 32, BFLOAT16), stack_of(4, 64, 64, 64, BFLOAT16))
    x, ends = randn(9, 64, dtype=BFLOAT16, device=DEVICE), ends_of([9, 0, 0, 0], DEVICE)
    experts(x, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = experts(x, ends)
    for counts in ([0, 0, 0, 9], [1, 2, 0, 6], [9, 0, 0, 0]):
        ends.copy_(ends_of(counts, DEVICE))
        graph.replay()
        assert torch.equal(out, experts(x, ends))
