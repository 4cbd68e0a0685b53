"""Products of the CPU kernels with 4-bit weights. Without a matrix unit, they are sums of integers, scaled group by
group, which round no weight; with one, they are those of the weights rounded to bfloat16."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from byte_inputs import as_multiplied
from torch.nn.functional import linear, silu

from engine.int4_weight import Int4Weight
from engine.kernels.cpu import QUANTIZED_KERNEL_PARTS
from engine.kernels.cpu_adapters import AdaptedPanelLinear, PanelAdapters
from engine.kernels.cpu_experts import PanelExperts
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear, in_panels
from engine.lora.adapters import AddedPart
from engine.weight import as_int4

BFLOAT16 = torch.bfloat16
NUM_ROWS = [1, 2, 3, 4, 7, 12, 13, 33, 193]
SIZES = [(32, 1, 32), (64, 31, 32), (128, 130, 64), (576, 960, 32), (576, 40, 576), (384, 500, 128)]
"""(inputs, outputs, inputs of a group): panels that are not full, groups of several steps, a single group."""

pytestmark = pytest.mark.usefixtures("cpu_threads")


def case(num_rows: int, num_inputs: int, num_outputs: int, group_size: int) -> tuple[torch.Tensor, Int4Weight, Any]:
    """x, a weight with any integers, scales of either sign and offsets, and a bias."""
    generator = torch.Generator().manual_seed(num_rows + num_inputs + num_outputs)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(BFLOAT16)
    integers = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    shape = (num_outputs, num_inputs // group_size)
    scale, offset = (torch.randn(shape, generator=generator) / 30 for _ in range(2))
    bias = torch.randn(num_outputs, generator=generator).to(BFLOAT16)
    # Scales of 20 bits: then a machine without a fused multiply-add also rounds a product and a sum only once.
    scale = (scale.view(torch.int32) & ~15).view(torch.float32)
    return x, Int4Weight.of_integers(integers, scale, offset, BFLOAT16), bias


def meant(weight: Int4Weight) -> torch.Tensor:
    """The weight that the kernels multiply with, in float64."""
    if torch.ops.tandem_cpu.arithmetic().startswith("tiles"):
        return weight.dequantized().double()
    size = weight.group_size
    scale, offset = (each.double().repeat_interleave(size, dim=1) for each in (weight.scale, weight.offset))
    return weight.integers().double() * scale + offset


def kept_in(weight: Int4Weight, dtype: torch.dtype) -> Int4Weight:
    """With scales and offsets that are numbers of `dtype`."""
    return replace(weight, scale=weight.scale.to(dtype).float(), offset=weight.offset.to(dtype).float())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, torch.float16])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "group_size"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_sums_in_float32(num_rows: int, num_inputs: int, num_outputs: int, group_size: int, dtype: torch.dtype) -> None:
    x, weight, _ = case(num_rows, num_inputs, num_outputs, group_size)
    weight = kept_in(weight, dtype)
    panels, _ = in_panels(weight)
    assert panels.dtype == dtype, "the narrowest that keeps them as they are"
    group_bytes = 64 * dtype.itemsize + group_size * 16
    assert panels[0].nbytes == num_inputs // group_size * group_bytes
    y = torch.ops.tandem_cpu.linear_float(x, panels, None, num_outputs)
    exact = meant(weight)
    inputs = as_multiplied(x)
    assert ((y.double() - inputs @ exact.T).abs() <= 3e-6 * (inputs.abs() @ exact.abs().T)).all()


@pytest.mark.parametrize(("scale", "offset"), [*itertools.permutations((torch.float32, BFLOAT16, torch.float16), 2)])
def test_sums_with_scales_in_another_form_than_offsets(scale: torch.dtype, offset: torch.dtype) -> None:
    """Neither is rounded. Numbers of this size with a bfloat16's bits are also numbers of float16."""
    x, weight, _ = case(7, 128, 40, 32)
    weight = replace(weight, scale=kept_in(weight, scale).scale, offset=kept_in(weight, offset).offset)
    panels, _ = in_panels(weight)
    assert panels.dtype == (torch.float32 if torch.float32 in (scale, offset) else torch.float16)
    y, exact = torch.ops.tandem_cpu.linear_float(x, panels, None, 40), meant(weight)
    inputs = as_multiplied(x)
    assert ((y.double() - inputs @ exact.T).abs() <= 3e-6 * (inputs.abs() @ exact.abs().T)).all()


@pytest.mark.parametrize("x", [1.0, -1.0, 1e33])
@pytest.mark.parametrize("group_size", [32, 192])
def test_sums_of_the_largest_numbers(group_size: int, x: float) -> None:
    """None overflows."""
    scale = torch.full((40, 192 // group_size), 0.5)
    weight = Int4Weight.of_integers(torch.full((40, 192), 15), scale, torch.zeros_like(scale), BFLOAT16)
    panels, _ = in_panels(weight)
    inputs = torch.full((5, 192), x).to(BFLOAT16)
    y = torch.ops.tandem_cpu.linear_float(inputs, panels, None, 40)
    torch.testing.assert_close(y.double(), inputs.double() @ torch.full((192, 40), 7.5).double(), rtol=1e-5, atol=0)


def test_sums_of_what_is_no_number() -> None:
    """It spoils its own row, and no other."""
    x, weight, _ = case(7, 128, 40, 32)
    product = PanelLinear(weight)
    expected = product(x)
    x[1, 70] = float("nan")
    found = product(x)
    assert found[1].isnan().all()
    found[1] = expected[1]
    assert torch.equal(found, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs", "group_size"), SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products(num_rows: int, num_inputs: int, num_outputs: int, group_size: int, has_bias: bool) -> None:
    x, weight, bias = case(num_rows, num_inputs, num_outputs, group_size)
    bias = bias if has_bias else None
    expected = linear(as_multiplied(x), meant(weight), None if bias is None else bias.double())
    torch.testing.assert_close(PanelLinear(weight, bias)(x).double(), expected, rtol=2**-8, atol=1e-5 * num_inputs**0.5)


@pytest.mark.parametrize(("num_inputs", "num_outputs", "group_size"), [(64, 15, 32), (128, 33, 128), (576, 1536, 32)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gated_products(num_rows: int, num_inputs: int, num_outputs: int, group_size: int) -> None:
    x, gate, gate_bias = case(num_rows, num_inputs, num_outputs, group_size)
    _, up, up_bias = case(num_rows + 1, num_inputs, num_outputs, group_size)
    gates, ups = PanelLinear(gate, gate_bias)(x).double(), PanelLinear(up, up_bias)(x).double()
    found = PanelGatedLinear(gate, up, gate_bias, up_bias)(x)
    torch.testing.assert_close(found.double(), silu(gates).to(BFLOAT16).double() * ups, rtol=2**-6, atol=2**-9)


def test_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight, _ = case(400, 576, 96, 32)
    product = PanelLinear(weight)
    whole = product(x)
    for num_rows in NUM_ROWS:
        for part, expected in zip(x.split(num_rows), whole.split(num_rows), strict=True):
            assert torch.equal(product(part.contiguous()), expected)


@pytest.mark.parametrize("group_size", [32, 160])
def test_inputs_that_no_cache_holds_are_added_up_as_those_of_one_row(group_size: int) -> None:
    """The matrix unit adds them up in parts, which begin within a group: 520 rows of 4,960 inputs are 5 MB."""
    x, weight, bias = case(520, 4960, 300, group_size)
    product = PanelLinear(weight, bias)
    whole = product(x)
    for row in (0, 31, 32, 259, 260, 300, 519):
        assert torch.equal(product(x[row : row + 1].contiguous()), whole[row : row + 1])
    expected = linear(as_multiplied(x), meant(weight), bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=1e-3)


def test_no_rows_are_no_products() -> None:
    _, weight, _ = case(1, 64, 40, 32)
    assert PanelLinear(weight)(torch.empty(0, 64, dtype=BFLOAT16)).shape == (0, 40)


@pytest.mark.parametrize("num_rows", [1, 33])
def test_what_adapters_add_to_products(num_rows: int) -> None:
    x, weight, bias = case(num_rows, 64, 40, 32)
    generator = torch.Generator().manual_seed(1)
    down, up = (torch.randn(*shape, generator=generator).to(BFLOAT16) / 8 for shape in ((4, 64), (40, 4)))
    adapters, product = PanelAdapters(()), PanelLinear(weight, bias)
    adapters.assign(np.ones(num_rows, dtype=np.int64))
    adapted = AdaptedPanelLinear(product, 64, adapters)
    adapted.put(1, adapted.prepare([AddedPart(start=0, down=down, up=up)]))
    added = linear(linear(x.double(), down.double()).to(BFLOAT16).double(), up.double())
    expected = linear(as_multiplied(x), meant(weight), bias.double()) + added
    torch.testing.assert_close(adapted(x).double(), expected, rtol=2**-7, atol=2**-7)
    assert not torch.equal(adapted(x), product(x))


def test_weights_are_quantised_where_they_are_not() -> None:
    x, _, bias = case(5, 64, 40, 32)
    plain = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)).to(BFLOAT16)
    weight = as_int4(plain)
    parts = QUANTIZED_KERNEL_PARTS["int4"]
    assert torch.equal(parts.linear(plain, bias)(x), PanelLinear(weight, bias)(x))
    assert torch.equal(parts.linear(weight, bias)(x), PanelLinear(weight, bias)(x))
    gated = parts.gated_linear(plain, plain, None, None)(x)
    assert torch.equal(gated, PanelGatedLinear(weight, weight, None, None)(x))


@pytest.mark.parametrize("other", ["plain", "coarse"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gate_in_another_form_than_what_it_is_for(which: int, other: str) -> None:
    """Checkpoints may have this. Both are then widened."""
    x, narrow, _ = case(5, 64, 40, 32)
    _, coarse, _ = case(6, 64, 40, 64)
    weights: list[Any] = [narrow, narrow]
    weights[which] = coarse if other == "coarse" else narrow.dequantized()
    wide = [each if isinstance(each, torch.Tensor) else each.dequantized() for each in weights]
    assert torch.equal(PanelGatedLinear(*weights, None, None)(x), PanelGatedLinear(*wide, None, None)(x))


def test_experts_are_kept_in_4_bits() -> None:
    x, *_ = case(9, 64, 1, 32)
    sizes = [(64, 96), (64, 96), (96, 64)]
    narrow = [[case(e, num_in, num_out, 32)[1] for num_in, num_out in sizes] for e in range(3)]
    wide = [[each.dequantized() for each in expert] for expert in narrow]
    experts = PanelExperts((gate, up, down) for gate, up, down in narrow)
    numbers, groups = 3 * 3 * 64 * 96, 3 * 3 * 64 * 96 // 32
    assert experts.experts.num_bytes() == numbers // 2 + 8 * groups  # a scale and an offset for each group
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    expected = PanelExperts((gate, up, down) for gate, up, down in wide)(x, ends)
    assert (experts(x, ends) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("size", [31, 32])
def test_experts_of_any_size(size: int) -> None:
    """Also of an odd size, though products take inputs in pairs."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(7, 64, generator=generator).to(BFLOAT16)
    shapes = [(size, 64), (size, 64), (64, size)]
    experts = [[(torch.randn(shape, generator=generator) / 8).to(BFLOAT16) for shape in shapes] for _ in range(2)]
    y = PanelExperts((gate, up, down) for gate, up, down in experts)(x, torch.tensor([3, 7], dtype=torch.int32))
    for rows, (gate, up, down) in ((slice(0, 3), experts[0]), (slice(3, 7), experts[1])):
        own = x[rows].double()
        expected = linear(silu(linear(own, gate.double())) * linear(own, up.double()), down.double())
        torch.testing.assert_close(y[rows].double(), expected, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: (w.packed.int(), w.scale, w.offset), r"packed \[N, K / 2\], bytes"),
        (lambda w: (w.packed, w.scale.double(), w.offset), r"scale and offset \[N, groups\], float32"),
        (lambda w: (w.packed, w.scale, w.offset[:, :1].contiguous()), r"scale and offset \[N, groups\], float32"),
        (lambda w: (w.packed, w.scale[:39].contiguous(), w.offset), r"scale and offset \[N, groups\], float32"),
        (lambda w: (w.packed[:, :16].contiguous(), w.scale, w.offset), "groups of a multiple of 32 inputs"),
    ],
)
def test_what_does_not_fit_is_not_packed(change: Any, why: str) -> None:
    _, weight, _ = case(2, 64, 40, 32)
    with pytest.raises(RuntimeError, match=why):
        torch.ops.tandem_cpu.pack_int4(*change(weight))


def test_a_product_takes_inputs_of_its_weight_alone() -> None:
    x, weight, _ = case(2, 64, 40, 32)
    product = PanelLinear(weight)
    with pytest.raises(RuntimeError, match="weight in panels, of K inputs"):
        product(x[:, :32].contiguous())
    with pytest.raises(RuntimeError, match="scale: for a weight of int8, and for no other"):
        torch.ops.tandem_cpu.linear(x, product.panels, torch.ones(64), None, 40)
