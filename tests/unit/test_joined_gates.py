"""Which gates and `up`s of transformers' modules become one product, and that all compute what they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.layers import GatedLinear, Linear
from engine.models.parts import PLAIN_PARTS, Parts
from engine.models.product_modules import GatedProducts
from engine.models.transformers_products import OurProducts, replace_products
from engine.quantization import as_int8
from engine.weight import Weight, as_int4

pytestmark = pytest.mark.usefixtures("one_thread")


class OtherGatedLinear(GatedLinear):
    """A part that is not plain torch, and computes the same."""


PARTS = replace(PLAIN_PARTS, gated_linear=OtherGatedLinear)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, change: Callable[[FeedForward], None]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.mlp, self.head = nn.Embedding(5, 32), FeedForward(), nn.Linear(32, 5)
        change(self.mlp)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def as_they_are(mlp: FeedForward) -> None:
    pass


def one_bias(mlp: FeedForward) -> None:
    mlp.up_proj = nn.Linear(32, 48, bias=False)


def one_up_for_all(mlp: FeedForward) -> None:
    mlp.up_proj = nn.Linear(32, 1)


def odd_inputs(mlp: FeedForward) -> None:
    mlp.gate_proj, mlp.up_proj = nn.Linear(31, 48), nn.Linear(31, 48)


@pytest.mark.parametrize("change", [as_they_are, one_bias, one_up_for_all, odd_inputs])
@torch.inference_mode()
def test_what_does_not_go_together_stays_apart(change: Callable[[FeedForward], None]) -> None:
    model = Model(change)
    x = torch.randn(1, 3, model.mlp.up_proj.in_features)
    expected = model.mlp(x)
    replace_products(model, OurProducts(lambda *_: PARTS, PARTS, Linear), {}, "cpu")
    assert isinstance(model.mlp, GatedProducts) == (change is as_they_are)
    torch.testing.assert_close(model.mlp(x), expected)


def test_gates_in_another_dtype_than_the_models_stay() -> None:
    model = Model(as_they_are)
    model.embed.bfloat16()
    replace_products(model, OurProducts(lambda *_: PARTS, PARTS, Linear), {}, "cpu")
    assert isinstance(model.mlp, FeedForward)


@pytest.mark.parametrize("adaptable", [{"mlp.gate_proj", "mlp.up_proj"}, set()])
def test_what_adapters_may_change_of_a_gate(adaptable: set[str]) -> None:
    """Its outputs come first in the product, as they do in the part."""
    asked = []

    class Adapters:
        def adapt_gated(
            self, make: Callable[[], GatedLinear], _linear: Any, outputs: dict[str, int], inputs: int
        ) -> GatedLinear:
            asked.append((list(outputs.items()), inputs))
            return make()

        def check_all_taken(self) -> None:
            pass

    model, adapters = Model(as_they_are), Adapters()
    ours = OurProducts(lambda *_: PARTS, PARTS, Linear, adapters, frozenset(adaptable))  # type: ignore[arg-type]
    replace_products(model, ours, {}, "cpu")
    assert isinstance(model.mlp, GatedProducts)
    assert asked == ([([("mlp.gate_proj", 48), ("mlp.up_proj", 48)], 32)] if adaptable else [])


@torch.inference_mode()
def test_gates_that_different_parts_compute_stay_apart() -> None:
    """As where one of the two is too large for a kernel's weight."""
    model = Model(as_they_are)
    all_parts = iter((PARTS, replace(PARTS)) * 2)
    replace_products(model, OurProducts(lambda *_: next(all_parts, PARTS), PARTS, Linear), {}, "cpu")
    assert not isinstance(model.mlp, GatedProducts)


def widening() -> Parts:
    """Parts that take weights in 8 or 4 bits, and widen them."""

    def wide(weight: Any) -> torch.Tensor:
        found: torch.Tensor = weight if isinstance(weight, torch.Tensor) else weight.dequantized()
        return found.float()

    def gated_linear(gate: Any, up: Any, *further: Any) -> GatedLinear:
        return OtherGatedLinear(wide(gate), wide(up), *further)

    return replace(PARTS, linear=lambda weight, *bias: Linear(wide(weight), *bias), gated_linear=gated_linear)


@pytest.mark.parametrize(
    ("of_gate", "of_up", "is_joined"), [(as_int4, as_int4, True), (as_int8, as_int4, False), (as_int8, None, False)]
)
@torch.inference_mode()
def test_gates_that_a_checkpoint_stores_in_another_form_stay_apart(
    of_gate: Callable[[Weight], Any], of_up: Callable[[Weight], Any] | None, is_joined: bool
) -> None:
    model, x = Model(as_they_are), torch.randn(1, 3, 32)
    stored = {}
    for name, quantise in (("gate_proj", of_gate), ("up_proj", of_up)):
        layer = getattr(model.mlp, name)
        if quantise is not None:
            stored[f"mlp.{name}"] = narrow = quantise(layer.weight.data.bfloat16())
            layer.weight.data = narrow.dequantized().float()
    expected = model.mlp(x)
    replace_products(model, OurProducts(lambda *_: PARTS, widening(), Linear), stored, "cpu")
    assert isinstance(model.mlp, GatedProducts) == is_joined
    torch.testing.assert_close(model.mlp(x), expected, rtol=1e-4, atol=1e-4)
