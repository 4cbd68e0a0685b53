"""Products of one row with a 16-bit weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_device import DEVICE  # must come before the kernels

from benchmarks.gpu_parts.products import ONE_ROW_VARIANTS
from engine.kernels.gpu import parts
from engine.kernels.gpu.one_row import OneRowConfig, one_row_product
from engine.kernels.gpu.parts import TRITON_PARTS, TritonLinear

SHAPES = [(7, 1024), (64, 2100), (5, 96), (130, 4096)]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def expected_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_product_is_rounded_once(num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = numbers(1, num_inputs, dtype=dtype), numbers(num_outputs, num_inputs, dtype=dtype)
    bias = numbers(num_outputs, dtype=dtype) if has_bias else None
    ours, exact = one_row_product(x, weight, bias), expected_of(x, weight, bias)
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("changes", ONE_ROW_VARIANTS, ids=str)
def test_sizes_of_launches(changes: dict[str, int]) -> None:
    x, weight = numbers(1, 2100), numbers(13, 2100)
    ours = one_row_product(x, weight, None, None, OneRowConfig(**changes))
    torch.testing.assert_close(ours.double(), expected_of(x, weight, None), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_product_with_a_weight_of_8_bits(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, form: torch.dtype
) -> None:
    x, bias = numbers(1, num_inputs, dtype=dtype), numbers(num_outputs, dtype=dtype)
    weight = (numbers(num_outputs, num_inputs, dtype=torch.float32) * 40).clamp(-127, 127).to(form)
    scale = torch.rand(num_outputs).to(DEVICE) * 0.01
    ours = one_row_product(x, weight, bias, scale)
    exact = x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that the kernel has multiplied."""
    made: list[tuple[int, ...]] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append(tuple(weight.shape))
        return one_row_product(x, weight, *rest)

    monkeypatch.setattr(parts, "one_row_product", noted)
    return made


@pytest.mark.parametrize("shape", [(1, 96), (96,), (1, 1, 96)])
def test_a_layer_has_the_kernel_multiply_one_row(shape: tuple[int, ...], calls: list[tuple[int, ...]]) -> None:
    weight, bias, x = numbers(24, 96), numbers(24), numbers(*shape)
    y = TritonLinear(weight, bias)(x)
    assert y.shape == (*shape[:-1], 24)
    torch.testing.assert_close(y.double(), expected_of(x, weight, bias), rtol=0.01, atol=1e-3)
    assert calls == [(24, 96)]


def test_other_rows_and_numbers_are_the_librarys(calls: list[tuple[int, ...]]) -> None:
    weight = numbers(24, 96)
    for x, of in ((numbers(2, 96), weight), (numbers(1, 96).float(), weight.float()), (numbers(0, 96), weight)):
        assert TritonLinear(of)(x).shape == (len(x), 24)
    for x in (numbers(1, 96, dtype=torch.float16), numbers(2, 48)):  # torch refuses them, too
        with pytest.raises(RuntimeError):
            TritonLinear(weight)(x)
    assert calls == []


def test_what_a_step_of_one_sequence_multiplies(calls: list[tuple[int, ...]]) -> None:
    gate, up, x = numbers(40, 96), numbers(40, 96), numbers(1, 96)
    TRITON_PARTS.gated_linear(gate, up, None, None)(x)
    TRITON_PARTS.linear(gate)(x)
    TRITON_PARTS.lm_head(up)(x)
    assert calls == [(80, 96), (40, 96), (40, 96)]
