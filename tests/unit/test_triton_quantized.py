"""The Triton kernels of 8-bit products, compared with float64 and plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_device import DEVICE, ROUNDS_TWICE

from engine.float8 import why_no_float8
from engine.kernels.gpu import eight_bits, parts
from engine.kernels.gpu.eight_bits import (
    FEW_ROWS,
    MAX_ROWS,
    ProductConfig,
    num_pieces,
    quantize_rows,
    scaled_product,
    widen,
)
from engine.kernels.gpu.parts import (
    TRITON_PARTS,
    TRITON_QUANTIZED_LINEARS,
    TritonFloat8Linear,
    TritonGatedLinear,
    TritonGroupScaledLinear,
    TritonInt8Linear,
)
from engine.quantization import SMALLEST_AMAX, quantize_float8
from engine.scaled_weight import ScaledWeight

BFLOAT16 = torch.bfloat16
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
UNIT = {torch.float32: 2**-20, torch.float16: 2**-10, BFLOAT16: 2**-7}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 96, 512), (16, 33, 576), (17, 64, 48), (33, 100, 256), (65, 130, 200), (MAX_ROWS, 16, 64)],
)
def test_int8_products_against_float64(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """Every configuration, with sizes that tiles divide evenly, and others."""
    weight = randn(num_outputs, num_inputs, dtype=dtype) * 0.1
    x, bias = randn(num_rows, num_inputs, dtype=dtype, seed=1), randn(num_outputs, dtype=dtype, seed=2)
    linear = TritonInt8Linear(weight, bias)
    stored = linear.weight_NK.double() * linear.scale_N.double()[:, None]
    expected = x.double() @ stored.T + bias.double()
    size = x.double().abs() @ stored.abs().T + bias.double().abs()
    y = linear(x)
    assert (y.dtype, y.shape) == (dtype, (num_rows, num_outputs))
    assert ((y.double() - expected).abs() <= UNIT[dtype] * size).all()


def test_more_rows_than_the_kernel_takes_go_with_a_widened_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(32, 64, dtype=BFLOAT16), randn(MAX_ROWS + 1, 64, dtype=BFLOAT16, seed=1)
    linear, size = TritonInt8Linear(weight), x.abs().double() @ weight.abs().double().T
    few = linear(x[None, :20])
    assert few.shape == (1, 20, 32)
    monkeypatch.setattr(parts, "scaled_product", None)
    # A widened weight is rounded to bfloat16; in the kernel it is not.
    assert ((linear(x)[:20] - few[0]).abs() <= 2**-7 * size[:20]).all()


def test_configurations_grow_with_the_rows() -> None:
    tiles = [ProductConfig.of(num_rows, 2).block_t for num_rows in (1, 16, 17, 32, 33, 64, 65, MAX_ROWS)]
    assert tiles == [16, 16, 32, 32, 64, 64, 128, 128]
    few = ProductConfig.of(1, 2)
    assert [few.within(size).block_k for size in (128, 64, 48, 16, 256, 4096)] == [128, 64, 16, 16, 256, 256]
    assert [few.within(size).num_stages for size in (256, 128, 16)] == [few.num_stages, 7, 7]


def test_inputs_are_cut_where_outputs_are_too_few_for_a_device() -> None:
    few, many = ProductConfig.of(64, 2), ProductConfig.of(65, 2)

    def pieces(config: ProductConfig, size_n: int, size_k: int) -> int:
        return num_pieces(config, 64, size_n, size_k, 132)

    assert [pieces(few, *size) for size in ((4096, 4096), (4096, 14336), (28672, 4096), (128, 400))] == [4, 4, 1, 1]
    assert pieces(many, 4096, 14336) == 1


@pytest.mark.parametrize("num_multiprocessors", [108, 132])
@pytest.mark.parametrize(("size_n", "size_k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_other_rows_in_a_tile_are_cut_as_a_full_one(size_n: int, size_k: int, num_multiprocessors: int) -> None:
    """The number of pieces is a constant of a kernel: another number would be compiled while requests wait."""
    for first, last in ((2, 16), (17, 32), (33, 64)):
        config = ProductConfig.of(last, 2)
        found = {num_pieces(config, rows, size_n, size_k, num_multiprocessors) for rows in range(first, last + 1)}
        assert len(found) == 1


@pytest.mark.parametrize("linear", [TritonInt8Linear, TritonFloat8Linear])
def test_no_rows_are_none(linear: type[TritonInt8Linear] | type[TritonFloat8Linear]) -> None:
    weight = randn(48, 64, dtype=BFLOAT16)
    assert linear(weight)(weight[:0]).shape == (0, 48)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_inputs", "group_size"), [(3, 2100, None), (40, 1600, 16), (16, 4096, 128)])
def test_pieces_of_inputs_are_added_up(
    num_rows: int, num_inputs: int, group_size: int | None, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece may have fewer inputs."""
    weight = in_groups(70, num_inputs, group_size or num_inputs, torch.int8, BFLOAT16)
    scale = weight.scale if group_size else weight.scale[:, 0].contiguous()
    x, bias = randn(num_rows, num_inputs, dtype=BFLOAT16), randn(70, dtype=BFLOAT16, seed=1) if has_bias else None
    args = x, weight.weight, scale, bias, group_size
    whole = scaled_product(*args, config=replace(ProductConfig.of(num_rows, 2), num_programs=0)).double()
    launched: list[int] = []
    monkeypatch.setattr(eight_bits, "_sum_pieces_kernel", Noting(eight_bits._sum_pieces_kernel, launched))
    y = scaled_product(*args).double()
    assert launched == [num_rows]
    assert ((y - whole).abs() <= 2**-7 * whole.abs() + 1e-3 * whole.abs().max()).all()


class Noting:
    """A kernel that notes the first number of the grids with which it is launched."""

    def __init__(self, kernel: Any, launched: list[int]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(grid[0])
        return self._kernel[grid]


def in_groups(num_outputs: int, num_inputs: int, size: int, form: torch.dtype, dtype: torch.dtype) -> ScaledWeight:
    """A weight whose groups differ in size by factors of thousands."""
    numbers = randn(num_outputs, num_inputs, dtype=torch.float32) * 30
    stored = numbers.round().clamp(-127, 127).to(form) if form == torch.int8 else numbers.to(form)
    num_groups = -(-num_inputs // size)
    scale = torch.logspace(-4, -1, num_outputs * num_groups, device=DEVICE).view(num_outputs, num_groups)
    return ScaledWeight(stored, scale.flip(0).contiguous(), size, dtype)


@pytest.mark.one_in(3)
@pytest.mark.skipif(CAPABILITY is not None and why_no_float8(CAPABILITY) != "", reason="a GPU without 8-bit floats")
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "size"),
    [
        (1, 96, 512, 128),
        (16, 33, 576, 128),
        (17, 64, 48, 16),
        (33, 100, 200, 48),
        (65, 130, 256, 64),
        (99, 16, 90, 32),
    ],
)
def test_products_with_scales_of_groups_against_float64(
    num_rows: int, num_outputs: int, num_inputs: int, size: int, dtype: torch.dtype, form: torch.dtype
) -> None:
    """Groups that divide the inputs evenly, and others; tiles as large as groups, and smaller ones."""
    weight = in_groups(num_outputs, num_inputs, size, form, dtype)
    stored = weight.weight.double() * weight.scale.double()[:, torch.arange(num_inputs, device=DEVICE) // size]
    x, bias = randn(num_rows, num_inputs, dtype=dtype, seed=1), randn(num_outputs, dtype=dtype, seed=2)
    y = TritonGroupScaledLinear(weight, bias)(x[None])
    assert (y.dtype, y.shape) == (dtype, (1, num_rows, num_outputs))
    bound = UNIT[dtype] * (x.double().abs() @ stored.abs().T + bias.double().abs())
    assert ((y[0].double() - x.double() @ stored.T - bias.double()).abs() <= bound).all()


@pytest.mark.skipif(CAPABILITY is not None and why_no_float8(CAPABILITY) != "", reason="a GPU without 8-bit floats")
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("num_inputs", "size"), [(256, 128), (2500, 128), (90, 32), (17, 16)])
def test_weights_with_scales_of_groups_are_widened_as_by_plain_torch(
    num_inputs: int, size: int, dtype: torch.dtype, form: torch.dtype
) -> None:
    weight = in_groups(9, num_inputs, size, form, dtype)
    assert torch.equal(widen(weight.weight, weight.scale, size, dtype), weight.dequantized())


def test_many_rows_go_with_a_widened_weight_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = in_groups(32, 64, 16, torch.int8, BFLOAT16), randn(MAX_ROWS + 1, 64, dtype=BFLOAT16, seed=1)
    expected = torch.nn.functional.linear(x, weight.dequantized())
    monkeypatch.setattr(parts, "scaled_product", None)
    monkeypatch.setattr(ScaledWeight, "dequantized", None)  # it would take a dozen passes over the weight
    assert torch.equal(TritonGroupScaledLinear(weight)(x), expected)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (9, 576), (3, 1000)])
def test_rows_are_quantised_as_plain_torch_does(num_rows: int, size: int) -> None:
    x = randn(num_rows, size, dtype=BFLOAT16) * torch.logspace(-4, 4, num_rows, device=DEVICE)[:, None].bfloat16()
    x[0, 3], x[-1, -1] = 0.0, -x[-1].abs().max() * 2
    float8, scale = quantize_rows(x, SMALLEST_AMAX)
    expected, expected_scale = quantize_float8(x)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0)
    if ROUNDS_TWICE:
        differs = float8.float() != expected.float()
        assert differs.float().mean() < 0.03
        step = 2 / 15  # at most, with three bits after the first
        torch.testing.assert_close(float8.float()[differs], expected.float()[differs], rtol=step, atol=0)
        return
    torch.testing.assert_close(float8.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.skipif(CAPABILITY is not None and why_no_float8(CAPABILITY) != "", reason="a GPU without 8-bit floats")
@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, False), (9, True), (67, False), (130, True)])
def test_8_bit_float_products_against_float64(num_rows: int, has_bias: bool) -> None:
    """For few rows, Tandem's kernels compute with the rows as they are. For more, torch computes: with a GPU's tensor
    cores, or with their substitute on a CPU."""
    weight, x = randn(48, 64, dtype=BFLOAT16), randn(num_rows, 64, dtype=BFLOAT16, seed=1)
    bias = randn(48, dtype=BFLOAT16, seed=2) if has_bias else None
    linear = TritonFloat8Linear(weight, bias)
    x8, scale = (x, torch.ones(1)) if num_rows <= FEW_ROWS else quantize_float8(x)
    expected = (x8.double() * scale.double().to(DEVICE)) @ (linear.weight_NK.double() * linear.scale_1N.double().T).T
    y = linear(x[None])
    assert (y.dtype, y.shape) == (BFLOAT16, (1, num_rows, 48))
    # Tensor cores keep some 14 bits of a sum of products of 8-bit floats.
    size, tolerance = x.abs().double() @ weight.abs().double().T, 2**-6 if ROUNDS_TWICE else 2**-8
    assert ((y[0].double() - expected - (0 if bias is None else bias.double())).abs() <= tolerance * size).all()


def test_a_row_of_zeros_stays_zeros_and_one_with_nan_does_not_hide_it() -> None:
    x = torch.zeros(2, 48, dtype=BFLOAT16, device=DEVICE)
    x[1, 7] = float("nan")
    float8, scale = quantize_rows(x, SMALLEST_AMAX)
    assert not float8[0].float().any()
    assert scale[0].isfinite().all()
    assert (float8[1].float() * scale[1]).isnan().any()


def test_a_decoder_of_them_keeps_the_other_kernels() -> None:
    gate, up, x = (randn(*shape, dtype=BFLOAT16, seed=seed) for seed, shape in enumerate([(24, 32), (24, 32), (3, 32)]))
    gated = TRITON_PARTS.with_products(TRITON_QUANTIZED_LINEARS.of("int8")).gated_linear(gate, up, None, None)
    assert isinstance(gated, TritonGatedLinear)
    plain = TRITON_PARTS.gated_linear(gate, up, None, None)(x).double()
    assert 0 < (gated(x).double() - plain).norm() < 0.03 * plain.norm()
