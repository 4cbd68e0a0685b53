"""The modules that stand in transformers' code in place of its linear layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.kernels.build import load_cpu_kernels
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear
from engine.layers import GatedLinear, Linear
from engine.models.product_modules import GatedProducts, JointProduct, Product, Sibling
from engine.models.product_probe import WatchedProducts

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHT = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
HALVES = WEIGHT.chunk(2)


@pytest.mark.parametrize(
    ("kernel", "plain"),
    [
        (lambda: Product(PanelLinear(WEIGHT)), lambda: Product(Linear(WEIGHT))),
        (lambda: Sibling(JointProduct(PanelLinear(WEIGHT), [8, 24]), 1), lambda: Product(Linear(WEIGHT[8:]))),
        (
            lambda: GatedProducts(PanelGatedLinear(*HALVES, None, None), nn.Identity()),
            lambda: GatedProducts(GatedLinear(*HALVES, None, None), nn.Identity()),
        ),
    ],
    ids=["one", "of one input", "gated"],
)
@torch.inference_mode()
def test_rows_may_lie_apart(kernel: Callable[[], nn.Module], plain: Callable[[], nn.Module]) -> None:
    """Transformers' code gives parts of tensors, too. The kernels take what is contiguous."""
    load_cpu_kernels()
    wide = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for x in (wide[..., 3:19], wide[:, :, :16].transpose(0, 1), wide[0, :, ::4]):
        found, expected = kernel()(x), plain()(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


@torch.inference_mode()
def test_products_of_one_input_are_computed_once() -> None:
    calls = []

    class Counted(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return super().__call__(x)

    joint = JointProduct(Counted(WEIGHT.float()), [8, 24])
    first, second = Sibling(joint, 0), Sibling(joint, 1)
    for num_steps in (1, 2):
        x = torch.randn(1, 3, 16)
        found = torch.cat((first(x), second(x)), dim=-1)
        assert len(calls) == num_steps
        torch.testing.assert_close(found, nn.functional.linear(x, WEIGHT.float()))
    x.add_(1.0)  # the next step's input may be in the same place
    torch.testing.assert_close(torch.cat((first(x), second(x)), dim=-1), nn.functional.linear(x, WEIGHT.float()))


def test_an_input_that_is_given_by_its_name_is_seen() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(16, 8), "b": nn.Linear(16, 8)})
    watched, x = WatchedProducts(layers, "m"), torch.randn(1, 3, 16)
    layers["a"](input=x)
    layers["b"](x)
    assert watched.siblings() == (("m.a", "m.b"),)
    assert watched.adaptable((), 3) == ("m.a", "m.b")
