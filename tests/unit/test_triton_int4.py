"""The Triton kernels of products with 4-bit weights, compared with float64, plain torch and products of the same
numbers in the model's dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from expert_cases import UNIT, int4_weight_of, randn
from gpu_kinds import GPU_KINDS
from triton_device import DEVICE, ROUNDS_AS_A_GPU  # must come before the kernels

from engine.int4_weight import Int4Weight, quantize_int4
from engine.kernels.gpu import eight_bits, invariant_parts, parts
from engine.kernels.gpu.eight_bits import MAX_ROWS, scaled_product
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.int4 import ScaledInt4, int4_config, int4_product, widen_int4
from engine.kernels.gpu.invariant_parts import INVARIANT_QUANTIZED_LINEARS, InvariantInt4Linear
from engine.kernels.gpu.parts import TRITON_QUANTIZED_LINEARS, TritonInt4Linear
from engine.kernels.gpu.product import scaled_row_config

BFLOAT16 = torch.bfloat16
KIND = gpu_kind(DEVICE)
NUMBERS = pytest.mark.parametrize("scale_dtype", [BFLOAT16, torch.float32])
"""The dtype that scales and offsets are rounded to. With the first, kernels get a scale and its offset in one word."""


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=dtype, seed=seed, device=DEVICE)


def weight_of(
    num_outputs: int, num_inputs: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype = torch.float32
) -> Int4Weight:
    return int4_weight_of(num_outputs, num_inputs, group_size, dtype, scale_dtype, DEVICE)


def product(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return int4_product(x, ScaledInt4.of(weight), bias, int4_config(KIND, len(x), x.itemsize))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "group_size"),
    [
        (1, 96, 512, 32),
        (2, 9, 2112, 64),
        (16, 33, 608, 32),
        (17, 64, 288, 96),
        (33, 100, 512, 256),
        (65, 130, 200, 200),
        (MAX_ROWS, 16, 64, 64),
        (300, 40, 96, 32),
    ],
)
def test_products_against_float64(
    num_rows: int, num_outputs: int, num_inputs: int, group_size: int, dtype: torch.dtype
) -> None:
    """Every configuration; sizes that tiles divide evenly, and others; tiles of several groups, of one, of a part of
    one, and of the ends of two; inputs in pieces."""
    weight = weight_of(num_outputs, num_inputs, group_size, dtype)
    x, bias = numbers(num_rows, num_inputs, dtype=dtype, seed=1), numbers(num_outputs, dtype=dtype, seed=2)
    wide = weight.dequantized().double()
    expected = x.double() @ wide.T + bias.double()
    size = x.double().abs() @ wide.abs().T + bias.double().abs()
    y = TritonInt4Linear(weight, bias)(x[None])
    assert (y.dtype, y.shape) == (dtype, (1, num_rows, num_outputs))
    assert ((y[0].double() - expected).abs() <= UNIT[dtype] * size).all()


@pytest.mark.one_in(3)
@pytest.mark.skipif(ROUNDS_AS_A_GPU, reason="there tiles may take their inputs in another order")
@NUMBERS
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "group_size"), [(3, 1088, 32), (20, 640, 128), (40, 416, 416), (70, 192, 96)]
)
def test_products_have_the_bits_of_those_of_what_is_widened(
    num_rows: int, num_inputs: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    """The expected bits are those of the 8-bit kernel, which accepts other numbers as well."""
    weight = weight_of(33, num_inputs, group_size, dtype, scale_dtype)
    x, bias = numbers(num_rows, num_inputs, dtype=dtype, seed=1), numbers(33, dtype=dtype, seed=2)
    one = torch.ones(33, device=DEVICE)
    expected = scaled_product(x, weight.dequantized(), one, bias, config=int4_config(KIND, num_rows, x.itemsize))
    assert torch.equal(product(x, weight, bias), expected)


@NUMBERS
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("group_size", [32, 96])
def test_each_weight_is_what_it_is_widened_to(group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Rows of 0 with a single 1 pick out one weight each."""
    weight = weight_of(50, 96, group_size, dtype, scale_dtype)
    assert (ScaledInt4.of(weight).offset is None) == (scale_dtype == BFLOAT16)
    y = product(torch.eye(96, dtype=dtype, device=DEVICE), weight)
    assert torch.equal(y, weight.dequantized().T)


@NUMBERS
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("num_inputs", "group_size"), [(256, 128), (4160, 32), (480, 96), (90, 90)])
def test_a_weight_is_widened_as_by_plain_torch(
    num_inputs: int, group_size: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    weight = weight_of(9, num_inputs, group_size, dtype, scale_dtype)
    assert torch.equal(widen_int4(ScaledInt4.of(weight)), weight.dequantized())


def test_scales_take_half_of_their_bytes_where_no_bit_is_lost() -> None:
    plain = numbers(8, 64, dtype=BFLOAT16)
    halved = ScaledInt4.of(quantize_int4(plain))
    assert (halved.scale.dtype, halved.offset, halved.group_size) == (torch.int32, None, 32)
    kept = ScaledInt4.of(quantize_int4(plain.float()))
    assert kept.scale.dtype == torch.float32
    assert kept.offset is not None
    one_bit_more = weight_of(8, 64, 32, BFLOAT16, BFLOAT16)
    one_bit_more.offset[3, 1] = 1 + 2**-8
    assert ScaledInt4.of(one_bit_more).offset is one_bit_more.offset


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_inputs", "group_size"), [(3, 2112, 64), (40, 1600, 32), (16, 4096, 128)])
def test_pieces_of_inputs_are_added_up(
    num_rows: int, num_inputs: int, group_size: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece may have fewer inputs."""
    weight = ScaledInt4.of(weight_of(70, num_inputs, group_size, BFLOAT16))
    x, bias = numbers(num_rows, num_inputs, dtype=BFLOAT16), numbers(70, dtype=BFLOAT16, seed=1) if has_bias else None
    config = int4_config(KIND, num_rows, 2)
    whole = int4_product(x, weight, bias, replace(config, num_programs=0)).double()
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(eight_bits, "_sum_pieces_kernel", Noting(eight_bits._sum_pieces_kernel, launched))
    y = int4_product(x, weight, bias, config).double()
    assert launched == [(num_rows, 1)]
    assert ((y - whole).abs() <= 2**-7 * whole.abs() + 1e-3 * whole.abs().max()).all()


class Noting:
    """A kernel that notes the grids with which it is launched."""

    def __init__(self, kernel: Any, launched: list[tuple[int, ...]]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.append(grid)
        return self._kernel[grid]


def test_many_rows_go_with_a_widened_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(32, 64, 32, BFLOAT16), numbers(MAX_ROWS + 1, 64, dtype=BFLOAT16, seed=1)
    expected = F.linear(x, weight.dequantized())
    monkeypatch.setattr(parts, "int4_product", None)
    monkeypatch.setattr(Int4Weight, "dequantized", None)  # it would take a dozen passes over the weight
    assert torch.equal(TritonInt4Linear(weight)(x), expected)


@pytest.mark.parametrize("linear", [TritonInt4Linear, InvariantInt4Linear])
def test_no_rows_are_none(linear: type[TritonInt4Linear]) -> None:
    weight = numbers(48, 64, dtype=BFLOAT16)
    assert linear(weight)(weight[:0]).shape == (0, 48)


def test_where_shared_memory_is_small_fewer_tiles_are_on_their_way() -> None:
    """How much a program then takes is checked where the kernels are compiled."""
    stages = {kind: int4_config(kind, 64, 2).num_stages for kind in GPU_KINDS.values()}
    assert {kind.shared_bytes >= 128 << 10: num_stages for kind, num_stages in stages.items()} == {True: 4, False: 3}
    for num_rows in (1, 16, 32, 65, MAX_ROWS):
        assert len({int4_config(kind, num_rows, 2) for kind in stages}) == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_configurations_grow_with_the_rows(itemsize: int) -> None:
    for num_rows in (1, 16, 17, 32, 33, 64, 65, MAX_ROWS):
        ours, of_8_bits = int4_config(KIND, num_rows, itemsize), eight_bits.ProductConfig.of(num_rows, itemsize)
        assert (ours.block_t, ours.num_programs) == (of_8_bits.block_t, of_8_bits.num_programs)
        # When instructions bound a product, tiles of fewer outputs take more instructions for each number.
        assert ours.block_n >= (64 if itemsize == 2 else 32)


def test_layers_are_made_of_what_is_in_4_bits_and_of_what_is_not() -> None:
    assert TRITON_QUANTIZED_LINEARS.of("int4") is TritonInt4Linear
    assert INVARIANT_QUANTIZED_LINEARS.of("int4") is InvariantInt4Linear
    plain, x = numbers(40, 64, dtype=BFLOAT16), numbers(5, 64, dtype=BFLOAT16, seed=1)
    stored = TRITON_QUANTIZED_LINEARS.as_stored(quantize_int4(plain))
    assert isinstance(stored, TritonInt4Linear)
    assert torch.equal(stored(x), TritonInt4Linear(plain)(x))


def test_any_number_of_rows_is_multiplied_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `batch_invariant`. The bits are compared in test_triton_product.py."""
    used: list[Any] = []

    def noted(x: torch.Tensor, weight: ScaledInt4, bias: None, config: eight_bits.ProductConfig) -> torch.Tensor:
        used.append(config)
        return x

    monkeypatch.setattr(invariant_parts, "int4_product", noted)
    linear, nums_rows = InvariantInt4Linear(weight_of(32, 64, 32, BFLOAT16)), (1, 40, MAX_ROWS + 1, 2000)
    for num_rows in nums_rows:
        linear(numbers(num_rows, 64, dtype=BFLOAT16))
    assert used == [scaled_row_config(KIND, num_rows, 2) for num_rows in nums_rows]
    assert {config.num_programs for config in used} == {0}
