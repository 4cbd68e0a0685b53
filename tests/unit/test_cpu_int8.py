"""Products of the CPU kernels with int8 weights equal, to the bit, those of the same numbers in bfloat16, times a
scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from byte_inputs import as_multiplied, rounds_inputs
from torch.nn.functional import linear, silu

from engine.kernels.cpu import QUANTIZED_KERNEL_PARTS
from engine.kernels.cpu_adapters import AdaptedPanelLinear, PanelAdapters
from engine.kernels.cpu_products import PANEL, PanelGatedLinear, PanelLinear
from engine.lora.adapters import AddedPart
from engine.quantization import as_int8, quantize_int8
from engine.scaled_weight import ScaledWeight

BFLOAT16 = torch.bfloat16
NUM_ROWS = [1, 12, 13, 33, 193]
SIZES = [(2, 1), (64, 31), (64, 32), (130, 33), (576, 960), (34, 500)]
"""(inputs, outputs): steps of whole tiles, pairs beside them, panels that are not full."""

pytestmark = pytest.mark.usefixtures("cpu_threads")


def case(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, ScaledWeight, torch.Tensor]:
    """x, a weight with any integers, -128 included, and a bias."""
    generator = torch.Generator().manual_seed(num_rows + num_inputs + num_outputs)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(BFLOAT16)
    integers = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
    scale = torch.rand(num_outputs, 1, generator=generator) / 100
    bias = torch.randn(num_outputs, generator=generator).to(BFLOAT16)
    return x, ScaledWeight(integers, scale, num_inputs, BFLOAT16), bias


def with_scales_of_one(weight: ScaledWeight) -> ScaledWeight:
    return ScaledWeight(weight.weight, torch.ones_like(weight.scale), weight.group_size, weight.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products_against_float64(num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    x, weight, bias = case(num_rows, num_inputs, num_outputs)
    y = PanelLinear(weight, bias if has_bias else None)(x)
    expected = linear(as_multiplied(x), weight.weight.double() * weight.scale, bias.double() if has_bias else None)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4 * num_inputs**0.5)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products_are_those_of_bfloat16_to_the_bit(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    """bfloat16 can hold every 8-bit integer. The kernel widens a panel for one tile of rows or for several."""
    if rounds_inputs():
        pytest.skip("here inputs are rounded to 8 bits")
    x, weight, bias = case(num_rows, num_inputs, num_outputs)
    expected = PanelLinear(weight.weight.to(BFLOAT16), bias)(x)
    assert torch.equal(PanelLinear(with_scales_of_one(weight), bias)(x), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_logits_are_in_int8_and_float32(num_rows: int, quantization: str) -> None:
    """Beside layers in int4, too. The scores of experts, which are few, stay plain."""
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 576, generator=generator).to(BFLOAT16) for n in (num_rows, 307))
    parts = QUANTIZED_KERNEL_PARTS[quantization]
    logits = parts.lm_head(weight)(x)
    assert logits.dtype == torch.float32
    scaled = as_int8(weight)
    exact = scaled.weight.double() * scaled.scale.double()
    torch.testing.assert_close(logits.double(), as_multiplied(x) @ exact.T, rtol=1e-5, atol=1e-4)
    plain = parts.expert_scores(weight)(x)
    torch.testing.assert_close(plain.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 15), (130, 33), (576, 1536)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gated_products(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    x, gate, gate_bias = case(num_rows, num_inputs, num_outputs)
    _, up, up_bias = case(num_rows + 1, num_inputs, num_outputs)
    x /= num_inputs**0.5
    y = PanelGatedLinear(gate, up, gate_bias, up_bias)(x)
    gated, upper = (
        linear(as_multiplied(x), w.weight.double() * w.scale, b.double()) for w, b in ((gate, gate_bias), (up, up_bias))
    )
    torch.testing.assert_close(y.double(), silu(gated) * upper, rtol=2**-5, atol=1e-3)
    narrow = PanelGatedLinear(with_scales_of_one(gate), with_scales_of_one(up), gate_bias, up_bias)
    wide = PanelGatedLinear(gate.weight.to(BFLOAT16), up.weight.to(BFLOAT16), gate_bias, up_bias)
    assert rounds_inputs() or torch.equal(narrow(x), wide(x))


@pytest.mark.parametrize("integer", [-128, -127, 127])
@pytest.mark.parametrize("x", [1.0, -1e33])
def test_products_of_the_largest_numbers(integer: int, x: float) -> None:
    """No sum of integers overflows."""
    weight = ScaledWeight(torch.full((40, 192), integer, dtype=torch.int8), torch.full((40, 1), 1e-4), 192, BFLOAT16)
    y = PanelLinear(weight)(torch.full((5, 192), x).to(BFLOAT16))
    expected = torch.full((5, 192), x).to(BFLOAT16).double() @ torch.full((192, 40), integer * 1e-4).double()
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [3, 33])
def test_products_of_what_is_no_number(num_rows: int, worst: float) -> None:
    """It spoils its own row, and no other."""
    x, weight, bias = case(num_rows, 576, 96)
    product = PanelLinear(weight, bias)
    expected = product(x)
    x[1, 70] = worst
    found = product(x)
    assert not found[1].isfinite().any()
    found[1] = expected[1]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [0.0, 1e-34, 1e-28, 1e-20, 1e12])
def test_products_of_inputs_of_any_size(size: float) -> None:
    """Groups of inputs far larger than others, a whole row of such inputs, zeros, and numbers of almost
    no size. (Smaller ones, which are not normal, are zeros to instructions for bfloat16.)"""
    x, weight, _ = case(7, 576, 96)
    x[:3, 64:200] *= size
    x[3] *= size
    y = PanelLinear(weight)(x).double()
    expected = linear(as_multiplied(x), weight.weight.double() * weight.scale)
    most = expected.abs().amax(dim=1, keepdim=True)
    assert ((y - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * most).all()


def test_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight, _ = case(400, 576, 96)
    product = PanelLinear(weight)
    whole = product(x)
    for num_rows in NUM_ROWS:
        for part, expected in zip(x.split(num_rows), whole.split(num_rows), strict=True):
            assert torch.equal(product(part.contiguous()), expected)


def test_inputs_that_no_cache_holds_are_added_up_as_those_of_one_row() -> None:
    """The matrix unit adds them up in parts: 520 rows of 5,002 inputs are 5 MB."""
    x, weight, bias = case(520, 5002, 300)
    product = PanelLinear(weight, bias)
    whole = product(x)
    for row in (0, 31, 32, 259, 260, 300, 519):
        assert torch.equal(product(x[row : row + 1].contiguous()), whole[row : row + 1])
    wide = PanelLinear(weight.weight.to(BFLOAT16))(x)
    assert rounds_inputs() or torch.equal(PanelLinear(with_scales_of_one(weight))(x), wide)


def test_no_rows_are_no_products() -> None:
    _, weight, _ = case(1, 64, 40)
    assert PanelLinear(weight)(torch.empty(0, 64, dtype=BFLOAT16)).shape == (0, 40)


@pytest.mark.parametrize("num_rows", [1, 33])
def test_what_adapters_add_to_products_is_not_scaled(num_rows: int) -> None:
    x, weight, bias = case(num_rows, 64, 40)
    generator = torch.Generator().manual_seed(1)
    down, up = (torch.randn(*shape, generator=generator).to(BFLOAT16) / 8 for shape in ((4, 64), (40, 4)))
    adapters = PanelAdapters(())
    adapters.assign(np.ones(num_rows, dtype=np.int64))
    product = AdaptedPanelLinear(PanelLinear(weight, bias), 64, adapters)
    product.put(1, product.prepare([AddedPart(start=0, down=down, up=up)]))
    y = product(x)
    plain = linear(as_multiplied(x), weight.weight.double() * weight.scale, bias.double())
    expected = plain + linear(linear(x.double(), down.double()), up.double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-6, atol=0.05)
    nobody = torch.zeros(num_rows, dtype=torch.int32)
    none = product.added.linear(x, product.panels, product.scale, product.bias, 40, nobody)
    assert torch.equal(none, PanelLinear(weight, bias)(x))


def test_weights_are_quantised_where_they_are_not() -> None:
    x, _, bias = case(5, 64, 40)
    plain = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)).to(BFLOAT16)
    int8, scale = quantize_int8(plain)
    weight = ScaledWeight(int8, scale.float()[:, None], 64, BFLOAT16)
    parts = QUANTIZED_KERNEL_PARTS["int8"]
    assert torch.equal(parts.linear(plain, bias)(x), PanelLinear(weight, bias)(x))
    assert torch.equal(parts.linear(weight, bias)(x), PanelLinear(weight, bias)(x))
    gated = parts.gated_linear(plain, plain, None, None)(x)
    assert torch.equal(gated, PanelGatedLinear(weight, weight, None, None)(x))


@pytest.mark.parametrize("which", [0, 1])
def test_a_gate_that_is_not_in_8_bits_beside_one_that_is(which: int) -> None:
    """Checkpoints may have this. Both are then widened."""
    x, narrow, _ = case(5, 64, 40)
    weights: list[Any] = [narrow, narrow]
    weights[which] = narrow.dequantized()
    wide = narrow.dequantized()
    assert torch.equal(PanelGatedLinear(*weights, None, None)(x), PanelGatedLinear(wide, wide, None, None)(x))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda panels, scale: (panels, None), "scale: for a weight of int8, and for no other"),
        (lambda panels, scale: (panels.to(BFLOAT16), scale), "scale: for a weight of int8, and for no other"),
        (lambda panels, scale: (panels, scale[:PANEL]), "scale: one number an output of a panel"),
        (lambda panels, scale: (panels.short(), None), "panels of bfloat16, int8, int4 or MXFP4"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[..., Any], why: str) -> None:
    x, weight, _ = case(2, 64, 40)
    product = PanelLinear(weight)
    with pytest.raises(RuntimeError, match=why):
        torch.ops.tandem_cpu.linear(x, *change(product.panels, product.scale), None, 40)
