"""Products of experts in plain torch, and which of them a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expert_cases import FORMS, UNIT, ends_of, exact_product, int4_weight_of, randn
from expert_cases import stack_of as eight_bit_stack

from engine.int4_weight import Int4Weight
from engine.model_loader.eight_bit_weights import DummyEightBitWeights
from engine.model_loader.int4_weights import DummyInt4Weights
from engine.model_loader.weights import DummyWeights, Weights
from engine.models.expert_products import (
    ExpertProducts,
    PlainExperts,
    ScaledExperts,
    of_expert,
    stack_of,
)
from engine.models.experts_config import qwen_experts
from engine.models.parts import PLAIN_PARTS, PartsFactory
from engine.models.stored_weights import StoredWeights
from engine.scaled_weight import ScaledWeight
from engine.tensor_parallel.sharded_weights import ShardedWeights, cuts_of_rank
from engine.weight import Weight

EXPERTS = qwen_experts(
    {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "hidden_size": 48,
        "norm_topk_prob": True,
    },
    2,
)
BLOCKS = StoredWeights(quantizations=("fp8",), block=(16, 16))
BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("counts", [[2, 0, 5, 1], [0, 0, 1, 0]])
def test_experts_in_8_bits_against_float64(counts: list[int], dtype: torch.dtype, form: torch.dtype) -> None:
    gate_up, down = eight_bit_stack((4, 48, 40), 16, form, dtype), eight_bit_stack((4, 40, 24), 0, form, dtype)
    x = randn(sum(counts), 40, dtype=dtype)
    gate, up = exact_product(x, gate_up, counts)[0].chunk(2, dim=1)
    expected, _ = exact_product(torch.nn.functional.silu(gate) * up, down, counts)
    y = ScaledExperts(gate_up, down)(x, ends_of(counts))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert (y.double() - expected).norm() <= 2 * UNIT[dtype] * expected.norm()


def test_plain_experts_are_what_they_are_in_8_bits_widened() -> None:
    counts, scaled = [2, 0, 5, 1], DummyEightBitWeights(3, "bfloat16", "cpu", BLOCKS)
    experts = products_of(scaled)
    assert isinstance(experts, ScaledExperts)
    weights = [stack.dequantized().unflatten(0, (4, -1)) for stack in (experts.gate_up, experts.down)]
    x = randn(8, 48, dtype=BFLOAT16)
    expected = PlainExperts(*weights)(x, ends_of(counts)).double()
    assert expected.abs().max() > 0.1
    assert (experts(x, ends_of(counts)).double() - expected).norm() < 0.01 * expected.norm()


# -- which ----------------------------------------------------------------------------------------------------------


def products_of(weights: Weights, intermediate_size: int = 24) -> ExpertProducts:
    """The products of a layer's experts, with 48 hidden numbers."""
    assert EXPERTS is not None
    config = replace(EXPERTS, intermediate_size=intermediate_size)
    return PartsFactory(weights, PLAIN_PARTS, 1e-6).experts("layer.experts", config, 48)


class Changed(DummyEightBitWeights):
    """Dummy weights, one of which is changed."""

    def __init__(self, name: str, change: Callable[[ScaledWeight], Weight]) -> None:
        super().__init__(3, "bfloat16", "cpu", BLOCKS)
        self._name, self._change = name, change

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = super().take_product(name, shape)
        assert isinstance(weight, ScaledWeight)
        return self._change(weight) if name == self._name else weight


def in_int8(weight: ScaledWeight) -> ScaledWeight:
    return ScaledWeight(weight.weight.float().to(torch.int8), weight.scale, weight.group_size, weight.dtype)


def in_one_group(weight: ScaledWeight) -> ScaledWeight:
    return ScaledWeight(weight.weight, weight.scale[:, :1], weight.weight.shape[1], weight.dtype)


def test_weights_in_8_bits_stay_as_they_are() -> None:
    weights = DummyEightBitWeights(3, "bfloat16", "cpu", BLOCKS)
    experts = products_of(weights)
    assert isinstance(experts, ScaledExperts)
    for stack, kinds, shape in ((experts.gate_up, ("gate", "up"), (24, 48)), (experts.down, ("down",), (48, 24))):
        for e in range(4):
            parts = [weights.take_product(f"layer.experts.{e}.{kind}_proj.weight", shape) for kind in kinds]
            held = of_expert(stack, e, 4)
            assert torch.equal(held.weight.float(), torch.cat([part.weight.float() for part in parts]))
            assert torch.equal(held.scale, torch.cat([part.scale for part in parts]))
        assert (stack.weight.dtype, stack.group_size, stack.dtype) == (torch.float8_e4m3fn, 16, BFLOAT16)


@pytest.mark.parametrize("change", [ScaledWeight.dequantized, in_int8, in_one_group])
@pytest.mark.parametrize("name", ["0.gate_proj", "3.up_proj", "2.down_proj"])
def test_weights_that_are_not_alike_are_widened(name: str, change: Callable[[ScaledWeight], Weight]) -> None:
    assert isinstance(products_of(Changed(f"layer.experts.{name}.weight", change)), PlainExperts)
    assert isinstance(products_of(DummyWeights(3, "bfloat16", "cpu")), PlainExperts)


def rank_of(whole: Weights, rank: int) -> ShardedWeights:
    return ShardedWeights(whole, cuts_of_rank(rank, num_ranks=2, num_key_parts=1), has_biases=rank == 0)


def test_ranks_have_a_part_of_each_expert() -> None:
    """Unless that would cut a group of inputs in two."""
    counts, whole = [2, 0, 5, 1], DummyEightBitWeights(3, "bfloat16", "cpu", BLOCKS)
    x, parts = randn(8, 48, dtype=BFLOAT16), [products_of(rank_of(whole, rank), 16) for rank in range(2)]
    assert all(isinstance(part, ScaledExperts) for part in parts)
    expected = products_of(whole, 32)(x, ends_of(counts)).double()
    total = sum(part(x, ends_of(counts)).double() for part in parts)
    assert (total - expected).norm() < 0.01 * expected.norm()
    with pytest.raises(ValueError, match="cuts a weight at input 12, where 16 share a scale; give quantization none"):
        products_of(rank_of(whole, 0), 12)


def test_a_stack_is_of_weights_asked_for_one_after_the_other() -> None:
    one = DummyEightBitWeights(3, "bfloat16", "cpu", BLOCKS).take_product("a", (16, 32))
    assert isinstance(one, ScaledWeight)
    others = one.dequantized(), int4_weight_of(16, 32, 32, BFLOAT16)
    for other in others:
        assert stack_of([one, other], 2) is stack_of([other, one], 2) is None
    stack = stack_of(iter([one, one]), 2)
    assert isinstance(stack, ScaledWeight)
    assert torch.equal(of_expert(stack, 1, 2).dequantized(), one.dequantized())


# -- 4 bits ---------------------------------------------------------------------------------------------------------

GROUPS_OF_32 = StoredWeights(quantizations=("int4",), packing="gptq", group_size=32)


class Int4Experts(DummyInt4Weights):
    """Dummy weights in 4 bits for 64 hidden numbers; one of them may be changed."""

    def __init__(self, name: str = "", change: Callable[[Int4Weight], Weight] = lambda weight: weight) -> None:
        super().__init__(3, "bfloat16", "cpu", GROUPS_OF_32)
        self._name, self._change = name, change

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        weight = super().take_product(name, shape)
        assert isinstance(weight, Int4Weight)
        return self._change(weight) if name == self._name else weight


def int4_products_of(weights: Weights, intermediate_size: int = 96, hidden_size: int = 64) -> ExpertProducts:
    assert EXPERTS is not None
    config = replace(EXPERTS, intermediate_size=intermediate_size)
    return PartsFactory(weights, PLAIN_PARTS, 1e-6).experts("layer.experts", config, hidden_size)


def test_weights_in_4_bits_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is widened while they are loaded."""
    monkeypatch.setattr(Int4Weight, "dequantized", None)
    weights = Int4Experts()
    experts = int4_products_of(weights)
    assert isinstance(experts, ScaledExperts)
    for stack, kinds, shape in ((experts.gate_up, ("gate", "up"), (96, 64)), (experts.down, ("down",), (64, 96))):
        assert isinstance(stack, Int4Weight)
        for e in range(4):
            parts = [weights.take_product(f"layer.experts.{e}.{kind}_proj.weight", shape) for kind in kinds]
            for i, held in enumerate(of_expert(stack, e, 4).tensors):
                assert torch.equal(held, torch.cat([part.tensors[i] for part in parts]))
        assert (stack.group_size, stack.dtype) == (32, BFLOAT16)


def in_larger_groups(weight: Int4Weight) -> Int4Weight:
    return Int4Weight(weight.packed, weight.scale[:, :1], weight.offset[:, :1], weight.dtype)


def in_8_bits(weight: Int4Weight) -> ScaledWeight:
    return ScaledWeight(weight.integers().to(torch.int8), weight.scale[:, :1], weight.num_inputs, weight.dtype)


@pytest.mark.parametrize("change", [Int4Weight.dequantized, in_larger_groups, in_8_bits])
@pytest.mark.parametrize("name", ["0.gate_proj", "3.up_proj", "2.down_proj"])
def test_weights_in_4_bits_that_are_not_alike_are_widened(name: str, change: Callable[[Int4Weight], Weight]) -> None:
    assert isinstance(int4_products_of(Int4Experts(f"layer.experts.{name}.weight", change)), PlainExperts)


def test_experts_in_4_bits_are_what_they_are_widened() -> None:
    counts, experts = [2, 0, 5, 1], int4_products_of(Int4Experts())
    assert isinstance(experts, ScaledExperts)
    weights = [stack.dequantized().unflatten(0, (4, -1)) for stack in (experts.gate_up, experts.down)]
    x = randn(8, 64, dtype=BFLOAT16)
    expected = PlainExperts(*weights)(x, ends_of(counts)).double()
    assert expected.abs().max() > 0.1
    assert (experts(x, ends_of(counts)).double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("group_size", [32, 64, 192, -1])
def test_ranks_have_a_part_of_each_expert_in_4_bits(group_size: int) -> None:
    """The groups of a part are those of the whole weight, or pieces of them: rank 1 begins at input 96."""
    stored = replace(GROUPS_OF_32, group_size=group_size)
    counts, whole = [2, 0, 5, 1], DummyInt4Weights(3, "bfloat16", "cpu", stored)
    x, parts = randn(8, 192, dtype=BFLOAT16), [int4_products_of(rank_of(whole, rank), 96, 192) for rank in range(2)]
    for part in parts:
        assert isinstance(part, ScaledExperts)
        assert isinstance(part.down, Int4Weight)
        assert part.down.group_size == {32: 32, 64: 32, 192: 96, -1: 96}[group_size]
    expected = int4_products_of(whole, 192, 192)(x, ends_of(counts)).double()
    total = sum(part(x, ends_of(counts)).double() for part in parts)
    assert (total - expected).norm() < 0.01 * expected.norm()


def test_ranks_whose_parts_would_be_of_no_whole_groups_are_refused() -> None:
    whole = DummyInt4Weights(3, "bfloat16", "cpu", replace(GROUPS_OF_32, group_size=96))
    with pytest.raises(ValueError, match="cuts a weight at input 48, where 96 share a scale; give quantization none"):
        int4_products_of(rank_of(whole, 0), 48, 192)
