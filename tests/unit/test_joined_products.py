"""Products of one input in transformers' code that become one product: which are found, and what they compute then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from test_transformers_models import CONFIGS
from torch import nn
from transformers_cases import QWEN3_5

from engine.layers import Linear
from engine.models import load_model_shape
from engine.models.parts import PLAIN_PARTS
from engine.models.product_modules import Sibling
from engine.models.product_probe import WatchedProducts
from engine.models.recurrent_layers import siblings_in
from engine.models.transformers_config import TransformersConfig
from engine.models.transformers_products import OurProducts, replace_products
from engine.quantization import as_int8
from engine.weight import as_int4

pytestmark = pytest.mark.usefixtures("one_thread")


class OtherLinear(Linear):
    """A part that is not plain torch, and computes the same."""


PARTS = replace(PLAIN_PARTS, linear=OtherLinear)


def shape_of(config: dict[str, Any]) -> TransformersConfig:
    shape = load_model_shape(config, "transformers")
    assert isinstance(shape, TransformersConfig)
    return shape


def config_of(name: str, architecture: str) -> dict[str, Any]:
    config = CONFIGS[name]()
    config.architectures = [architecture]
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return fields


def test_what_a_step_gives_the_very_same_input() -> None:
    shape = shape_of(config_of("gemma3", "Gemma3ForCausalLM"))
    layer = "model.layers.0"
    assert shape.siblings[:2] == (
        tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
    )
    assert len(shape.siblings) == 2 * 3


def test_layers_of_delta_rules() -> None:
    shape = shape_of(QWEN3_5)
    (of_names, _), name = siblings_in(shape.recurrent_layers[0]), shape.recurrent_layers[0].name
    assert of_names == tuple(f"{name}.in_proj_{of}" for of in ("qkv", "z", "b", "a"))


class Layers(nn.Module):
    """Products of 8 numbers, and how they are called."""

    def __init__(self, call: Callable[[Layers, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 32), nn.Linear(8, 16)
        self.head = nn.Linear(8, 5)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def all_three(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * m.c(x) + m.b(x).sum(-1, keepdim=True)


def changed_between(m: Layers, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    a = m.a(x)
    x += 1
    return a * m.c(x)


def of_equal_inputs(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) * m.c(x.clone())


def another_between(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) + m.b(x * 2)[..., :16] + m.c(x)


def twice(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) + m.c(x) + m.a(x)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (all_three, (("m.a", "m.c", "m.b"),)),
        (changed_between, ()),
        (of_equal_inputs, ()),
        (another_between, ()),
        (twice, ()),
    ],
)
def test_only_products_of_one_unchanged_input_are_siblings(
    call: Callable[[Layers, torch.Tensor], torch.Tensor], expected: tuple[tuple[str, ...], ...]
) -> None:
    layers = Layers(call)
    watched = WatchedProducts(layers, "m")
    with torch.no_grad():
        layers(torch.randn(1, 3, 8))
    assert watched.siblings() == expected


def joined(ours: OurProducts, layers: Layers, stored: dict[str, Any] | None = None) -> list[str]:
    """Replace the products; returns the names of those that are part of a joint one."""
    replace_products(layers, ours, stored or {}, "cpu")
    return [name for name, module in layers.named_modules() if isinstance(module, Sibling)]


@torch.inference_mode()
def test_the_results_are_those_of_single_products() -> None:
    """Also when they are called in another order, or with another input in between."""
    torch.manual_seed(1)
    layers, x, other = Layers(all_three), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    expected = {name: (getattr(layers, name)(x), getattr(layers, name)(other)) for name in "abc"}
    ours = OurProducts(lambda *_: PARTS, PARTS, Linear, siblings=(("a", "c", "b"),))
    assert joined(ours, layers) == ["a", "b", "c"]
    for order in ("acb", "bca", "cab", "aab"):
        for name in order:
            for number, given in enumerate((x, other)):
                torch.testing.assert_close(getattr(layers, name)(given), expected[name][number])
    for name in "acb":
        torch.testing.assert_close(getattr(layers, name)(x), expected[name][0])
    assert layers.a._joint._x is None, "nothing is kept after the last one"


def test_those_that_differ_in_form_bias_or_parts_stay_apart() -> None:
    siblings = (("a", "b", "c"),)
    plain = OurProducts(lambda *_: PARTS, PARTS, Linear, siblings=siblings)
    without_bias = Layers(all_three)
    without_bias.b = nn.Linear(8, 32, bias=False)
    assert joined(plain, without_bias) == ["a", "c"]
    by_size = OurProducts(lambda size, _: PARTS if size[0] == 16 else replace(PARTS), PARTS, Linear, siblings=siblings)
    assert joined(by_size, Layers(all_three)) == ["a", "c"]
    assert joined(OurProducts(lambda *_: PLAIN_PARTS, PARTS, Linear, siblings=siblings), Layers(all_three)) == []
    narrow = Layers(all_three)
    narrow.a, narrow.b, narrow.c = (nn.Linear(32, size) for size in (16, 32, 16))
    kept = as_int4(narrow.b.weight.data.bfloat16())
    widening = replace(PARTS, linear=lambda weight, bias=None: OtherLinear(weight.dequantized().float(), bias))
    ours = OurProducts(lambda *_: PARTS, widening, Linear, siblings=siblings)
    assert joined(ours, narrow, {"b": kept}) == ["a", "c"]


def test_those_of_two_forms_in_8_or_4_bits_stay_apart() -> None:
    """One part takes both."""
    layers = Layers(all_three)
    layers.a, layers.b, layers.c = (nn.Linear(32, size) for size in (16, 32, 16))
    stored = {
        name: quantise(getattr(layers, name).weight.data.bfloat16())
        for name, quantise in (("a", as_int4), ("b", as_int8), ("c", as_int4))
    }
    widening = replace(PARTS, linear=lambda weight, bias=None: OtherLinear(weight.dequantized().float(), bias))
    ours = OurProducts(lambda *_: PARTS, widening, Linear, siblings=(("a", "b", "c"),))
    assert joined(ours, layers, stored) == ["a", "c"]


def test_those_in_another_dtype_than_the_models_or_of_an_odd_size_stay_as_they_are() -> None:
    ours = OurProducts(lambda *_: PARTS, PARTS, Linear, siblings=(("a", "b", "c"),))
    layers = Layers(all_three)
    layers.a.double()
    layers.c.double()
    assert joined(ours, layers) == []
    assert isinstance(layers.a, nn.Linear)
    odd = Layers(all_three)
    odd.a, odd.b, odd.c = (nn.Linear(7, size) for size in (16, 32, 16))
    assert joined(ours, odd) == []


def test_one_that_adapters_may_change_and_one_that_they_may_not_stay_apart() -> None:
    class NoAdapters:
        def adapt(self, linear: Linear, outputs: dict[str, int], _inputs: int) -> Linear:
            assert "b" not in outputs
            return linear

        def check_all_taken(self) -> None:
            pass

    adapters: Any = NoAdapters()
    ours = OurProducts(lambda *_: PARTS, PARTS, Linear, adapters, frozenset({"a", "c"}), siblings=(("a", "b", "c"),))
    assert joined(ours, Layers(all_three)) == ["a", "c"]


def test_those_whose_inputs_ranks_share_stay_apart() -> None:
    """What each rank computes of them has to be added up."""

    class HalfOfTheInputs:
        def is_cut(self, name: str) -> bool:
            return name in "ac"

        def is_gathered(self, _name: str) -> bool:
            return False

        def own_size(self, name: str, size: tuple[int, int]) -> tuple[int, int]:
            return (size[0], size[1] // 2) if self.is_cut(name) else size

        def weight(self, name: str, weight: torch.Tensor, _size: tuple[int, int]) -> torch.Tensor:
            return weight[:, :4].contiguous() if self.is_cut(name) else weight

        def bias(self, _name: str, bias: torch.Tensor | None) -> torch.Tensor | None:
            return bias

        def joined(self, name: str, linear: Linear, _size: tuple[int, int]) -> Linear:
            summed.append(name)
            return linear

    summed: list[str] = []
    share: Any = HalfOfTheInputs()
    ours = OurProducts(lambda *_: PARTS, PARTS, Linear, siblings=(("a", "b", "c"),), share=share)
    assert joined(ours, Layers(all_three)) == []
    assert {"a", "c"} <= set(summed)


@pytest.mark.parametrize("name", ["gemma3", "olmo2", "gpt-oss", "qwen2-moe", "gpt2"])
def test_a_model_computes_the_same(name: str) -> None:
    torch.manual_seed(1)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.architectures = [type(model).__name__]
    shape = shape_of(json.loads(config.to_json_string()))
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        replace_products(model, OurProducts(lambda *_: PARTS, PARTS, Linear, siblings=shape.siblings), {}, "cpu")
        found = model(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    num_joined = sum(isinstance(module, Sibling) for module in model.modules())
    assert (num_joined > 0) == (name != "gpt2")
