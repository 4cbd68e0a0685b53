"""The Triton kernels of a mixture's experts with 8-bit weights, compared with float64 and plain torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from expert_cases import FORMS, UNIT, ends_of, exact_product, randn, stack_of
from triton_device import DEVICE  # must come before the kernels

from engine.float8 import why_no_float8
from engine.kernels.gpu.choose import choose_experts
from engine.kernels.gpu.experts import expert_config, expert_product, max_tiles, sum_of_experts, tiles_of
from engine.kernels.gpu.gpu_kind import H200, gpu_kind
from engine.kernels.gpu.parts import TRITON_PARTS, TritonScaledExperts
from engine.layers import ACTIVATIONS, Activation
from engine.models import chosen_experts, expert_choice
from engine.models.expert_products import ExpertProducts, ScaledExperts
from engine.models.experts_config import ExpertsConfig

BFLOAT16 = torch.bfloat16
DTYPES = [pytest.param(x, marks=pytest.mark.slow if x == torch.float16 else ()) for x in UNIT]
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
NO_FLOAT8 = CAPABILITY is not None and why_no_float8(CAPABILITY) != ""

pytestmark = pytest.mark.skipif(NO_FLOAT8, reason="a GPU without 8-bit floats")


# -- tiles ----------------------------------------------------------------------------------------------------------


def expected_tiles(counts: list[int], tile_rows: int) -> list[list[int]]:
    ends = ends_of(counts).tolist()
    return [
        [expert, first, end]
        for expert, (count, end) in enumerate(zip(counts, ends, strict=True))
        for first in range(end - count, end, tile_rows)
    ]


@pytest.mark.parametrize(
    "counts", [[1], [0, 0, 1], [16, 17, 0, 1, 0], [0, 33, 0], [1] * 40, [0] * 250 + [100, 0, 0, 5, 0, 200]]
)
def test_tiles_are_of_one_expert_each_and_all_rows_are_in_one(counts: list[int]) -> None:
    expected = expected_tiles(counts, 16)
    tiles = tiles_of(ends_of(counts, DEVICE), sum(counts), 16).tolist()
    assert tiles[: len(expected)] == expected
    assert tiles[len(expected) :] == [[0, 0, 0]] * (len(tiles) - len(expected))


def test_there_are_as_many_tiles_as_there_can_be() -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_experts, num_rows = rng.randint(1, 9), rng.randint(1, 60)
        counts = [0] * num_experts
        for _ in range(num_rows):
            counts[rng.randrange(num_experts)] += 1
        assert len(expected_tiles(counts, 4)) <= max_tiles(num_rows, num_experts, 4)
    assert max_tiles(23, 3, 4) == 8 == len(expected_tiles([5, 9, 9], 4))
    assert max_tiles(2, 3, 4) == 2 == len(expected_tiles([1, 0, 1], 4))


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    assert [expert_config(H200, rows * 64, 64, 2).block_t for rows in (1, 8, 9, 16, 17, 48, 49)] == [
        16, 16, 32, 32, 64, 64, 128,
    ]  # fmt: skip
    assert {expert_config(H200, rows, 64, 2).block_k for rows in (1, 999, 9999)} == {128}


# -- products -------------------------------------------------------------------------------------------------------

CASES = {
    "one row": ([0, 0, 1, 0], 33, 200, 48),
    "few rows": ([1, 0, 2, 0, 0, 1, 3], 96, 512, 128),
    "tiles of 32": ([21, 0, 14], 64, 48, 16),
    "tiles of 64": ([70, 0, 3], 100, 256, 64),
    "tiles of 128": ([150, 0], 130, 90, 32),
    "a scale for each output": ([5, 1, 0, 18], 40, 100, 0),
}
"""Rows of experts, outputs, inputs, inputs of a group: some sizes divide evenly; with others, the last tile or group
has fewer."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_products_against_float64(case: str, dtype: torch.dtype, form: torch.dtype) -> None:
    counts, num_outputs, num_inputs, size = CASES[case]
    stack = stack_of((len(counts), num_outputs, num_inputs), size, form, dtype, DEVICE)
    x = randn(sum(counts), num_inputs, dtype=dtype, seed=1, device=DEVICE)
    config = expert_config(gpu_kind(DEVICE), len(x), len(counts), x.itemsize)
    y = expert_product(x, stack, len(counts), tiles_of(ends_of(counts, DEVICE), len(x), config.block_t), config)
    expected, size_of_terms = exact_product(x, stack, counts)
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert ((y.double() - expected).abs() <= UNIT[dtype] * size_of_terms).all()


def test_tiles_without_rows_load_nothing() -> None:
    """Not even the weights of their expert: no expert has the number that they name."""
    stack = stack_of((2, 16, 64), 0, torch.int8, BFLOAT16, DEVICE)
    x, config = randn(5, 64, dtype=BFLOAT16, device=DEVICE), expert_config(gpu_kind(DEVICE), 5, 2, 2)
    tiles = torch.tensor([[1, 0, 5], [1 << 20, 0, 0], [1 << 20, 5, 5]], dtype=torch.int32, device=DEVICE)
    y = expert_product(x, stack, 2, tiles, config)
    assert torch.equal(y, expert_product(x, stack, 2, tiles[:1], config))


def experts_of(
    num_experts: int,
    form: torch.dtype,
    dtype: torch.dtype,
    kind: type[ScaledExperts | TritonScaledExperts],
    activation: Activation = "silu",
) -> ExpertProducts:
    """Experts with 64 hidden and 40 inner numbers."""
    gate_up = stack_of((num_experts, 80, 64), 32, form, dtype, DEVICE)
    return kind(gate_up, stack_of((num_experts, 64, 40), 0, form, dtype, DEVICE), activation)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_feed_forward_is_that_of_plain_torch(activation: Activation, dtype: torch.dtype, form: torch.dtype) -> None:
    assert TRITON_PARTS.scaled_experts is TritonScaledExperts
    counts = [3, 0, 18, 1, 0]
    x, ends = randn(sum(counts), 64, dtype=dtype, device=DEVICE), ends_of(counts, DEVICE)
    y = experts_of(5, form, dtype, TritonScaledExperts, activation)(x, ends)
    expected = experts_of(5, form, dtype, ScaledExperts, activation)(x, ends).double()
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert (y.double() - expected).norm() <= 2 * UNIT[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """In tiles of any size, and at any place in a tile."""
    if DEVICE == "cuda" and dtype != torch.float32:
        pytest.skip("tensor cores may add up larger tiles otherwise")
    stacks = (stack_of((3, *shape), 0, torch.int8, dtype, DEVICE) for shape in ((128, 128), (128, 64)))
    experts = TritonScaledExperts(*stacks)
    x = randn(200, 128, dtype=dtype, device=DEVICE)
    alone = experts(x[:1], ends_of([0, 1, 0], DEVICE))
    for before, beside in ((0, 3), (5, 9), (30, 10), (40, 30), (90, 100)):
        rows = torch.cat((x[1 : 1 + before], x[:1], x[1 : 1 + beside]))
        y = experts(rows, ends_of([before // 2, before - before // 2 + 1 + beside, 0], DEVICE))
        assert torch.equal(y[before], alone[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_rows_of_other_experts() -> None:
    experts = experts_of(4, torch.float8_e4m3fn, BFLOAT16, TritonScaledExperts)
    x, ends = randn(9, 64, dtype=BFLOAT16, device=DEVICE), ends_of([9, 0, 0, 0], DEVICE)
    experts(x, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = experts(x, ends)
    for counts in ([0, 0, 0, 9], [1, 2, 0, 6], [9, 0, 0, 0]):
        ends.copy_(ends_of(counts, DEVICE))
        graph.replay()
        torch.testing.assert_close(out, experts(x, ends), rtol=0, atol=0)


# -- the choice -----------------------------------------------------------------------------------------------------

DEEPSEEK_V3 = ExpertsConfig(
    first_layer=0, num_experts=256, num_experts_per_token=8, num_shared_experts=1, intermediate_size=64, num_groups=8,
    num_chosen_groups=4, scoring="sigmoid", norms_weights=True, scaling=2.5,
)  # fmt: skip
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3, num_experts=160, num_experts_per_token=6, num_chosen_groups=3, scoring="softmax", norms_weights=False
)
CHOICES = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V2, weights normed": replace(DEEPSEEK_V2, norms_weights=True),
    "Qwen3": replace(DEEPSEEK_V2, num_experts=128, num_experts_per_token=8, num_groups=1, num_chosen_groups=1),
    "few": replace(DEEPSEEK_V2, num_experts=5, num_experts_per_token=5, num_groups=1, num_chosen_groups=1),
    "groups of one": replace(DEEPSEEK_V2, num_experts=6, num_experts_per_token=2, num_groups=6, num_chosen_groups=2),
}


@pytest.mark.parametrize("config", CHOICES.values(), ids=CHOICES)
def test_a_token_gets_the_experts_that_plain_torch_chooses(config: ExpertsConfig) -> None:
    logits = randn(40, config.num_experts, dtype=torch.float32, device=DEVICE) * 3
    bias = randn(config.num_experts, dtype=torch.float32, seed=1, device=DEVICE) * 0.1
    bias_E = bias if config.scoring == "sigmoid" else None
    experts, weights = choose_experts(logits, bias_E, config)
    expected_experts, expected_weights = expert_choice.choose_experts(logits, bias_E, config)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    alone = choose_experts(logits[7:8], bias_E, config)
    assert torch.equal(alone[0][0], experts[7])
    assert torch.equal(alone[1][0], weights[7])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_of_equals_the_first_is_chosen_and_of_nan_some_that_there_is() -> None:
    logits = torch.zeros(3, 256, device=DEVICE)
    logits[1], logits[2, 40] = float("nan"), float("nan")
    experts, weights = choose_experts(logits, torch.zeros(256, device=DEVICE), DEEPSEEK_V3)
    assert experts[0].tolist() == list(range(8))
    assert ((experts >= 0) & (experts < 256)).all()
    assert weights[1].isnan().all()


# -- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_chosen", "size"), [(1, 1, 16), (5, 3, 100), (40, 8, 1500)])
def test_sums_of_a_tokens_experts(num_tokens: int, num_chosen: int, size: int, dtype: torch.dtype) -> None:
    y = randn(num_tokens * num_chosen, size, dtype=dtype, device=DEVICE)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = randn(num_tokens, num_chosen, dtype=torch.float32, seed=2, device=DEVICE)
    ours, theirs = (each(y, order, weights) for each in (sum_of_experts, chosen_experts.sum_of_experts))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=UNIT[dtype], atol=1e-5)
    # In the order of the choices, whatever other tokens there are.
    for token in (0, num_tokens - 1):
        rows = [order.tolist().index(token * num_chosen + choice) for choice in range(num_chosen)]
        alone = sum_of_experts(
            y[rows].contiguous(), torch.arange(num_chosen, device=DEVICE), weights[token : token + 1]
        )
        assert torch.equal(alone[0], ours[token])
