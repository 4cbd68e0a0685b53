"""Products of experts by plain torch, and which a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expert_cases import FORMS, UNIT, ends_of, exact_product, randn, stack_of

from engine.model_loader.eight_bit_weights import DummyEightBitWeights
from engine.model_loader.weights import DummyWeights, Weights
from engine.models.decoder import PLAIN_PARTS
from engine.models.expert_products import ExpertProducts, PlainExperts, ScaledExperts, ScaledStack
from engine.models.experts_config import qwen_experts
from engine.models.parts import PartsFactory
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
    gate_up, down = stack_of((4, 48, 40), 16, form, dtype), stack_of((4, 40, 24), 0, form, dtype)
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
    weights = [
        torch.stack([stack.of_expert(e).dequantized() for e in range(4)]) for stack in (experts.gate_up, experts.down)
    ]
    x = randn(8, 48, dtype=BFLOAT16)
    expected = PlainExperts(*weights)(x, ends_of(counts)).double()
    assert expected.abs().max() > 0.1
    assert (experts(x, ends_of(counts)).double() - expected).norm() < 0.01 * expected.norm()


# -- which ----------------------------------------------------------------------------------------------------------


def products_of(weights: Weights, intermediate_size: int = 24) -> ExpertProducts:
    """Of 48 hidden numbers."""
    assert EXPERTS is not None
    config = replace(EXPERTS, intermediate_size=intermediate_size)
    return PartsFactory(weights, PLAIN_PARTS, 1e-6).experts("layer.experts", config, 48)


class Changed(DummyEightBitWeights):
    """But for one weight."""

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
            assert torch.equal(stack.weight[e].float(), torch.cat([part.weight.float() for part in parts]))
            assert torch.equal(stack.scale[e], torch.cat([part.scale for part in parts]))
        assert (stack.weight.dtype, stack.group_size, stack.dtype) == (torch.float8_e4m3fn, 16, BFLOAT16)


@pytest.mark.parametrize("change", [ScaledWeight.dequantized, in_int8, in_one_group])
@pytest.mark.parametrize("name", ["0.gate_proj", "3.up_proj", "2.down_proj"])
def test_weights_that_are_not_alike_are_widened(name: str, change: Callable[[ScaledWeight], Weight]) -> None:
    assert isinstance(products_of(Changed(f"layer.experts.{name}.weight", change)), PlainExperts)
    assert isinstance(products_of(DummyWeights(3, "bfloat16", "cpu")), PlainExperts)


def rank_of(whole: Weights, rank: int) -> ShardedWeights:
    return ShardedWeights(whole, cuts_of_rank(rank, num_ranks=2, num_key_parts=1), has_biases=rank == 0)


def test_ranks_have_a_part_of_each_expert() -> None:
    """Unless that would cut a group in two."""
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
    assert ScaledStack.of([one, one.dequantized()], 2) is None
    stack = ScaledStack.of(iter([one, one]), 2)
    assert stack is not None
    assert torch.equal(stack.of_expert(1).dequantized(), one.dequantized())
