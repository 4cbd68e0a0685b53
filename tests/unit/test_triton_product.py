"""The Triton kernels of products whose rows do not depend on the batch: compared with float64, and that this is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import UNIT, ends_of, randn
from gpu_kinds import GPU_KINDS
from triton_device import DEVICE  # must come before the kernels

from engine.float8 import why_no_float8
from engine.kernels.gpu import product
from engine.kernels.gpu.experts import tiles_of
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.invariant_parts import (
    INVARIANT_PARTS,
    INVARIANT_QUANTIZED_LINEARS,
    InvariantExperts,
    InvariantFloatLinear,
    InvariantHeadProducts,
    InvariantLinear,
)
from engine.kernels.gpu.product import BLOCK_K, check_rows_agree, expert_row_product, row_config, scaled_row_config
from engine.layers import HeadProducts
from engine.models.expert_products import PlainExperts
from engine.scaled_weight import ScaledWeight

BFLOAT16 = torch.bfloat16
DTYPES = [pytest.param(x, marks=pytest.mark.slow if x == torch.float16 else ()) for x in UNIT]
KIND = gpu_kind(DEVICE)
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
HAS_FLOAT8 = CAPABILITY is None or not why_no_float8(CAPABILITY)
ROWS = (1, 16, 17, 40, 64, 65, 600)
"""Tiles of every size, full ones and others."""


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return randn(*shape, dtype=dtype, seed=seed, device=DEVICE)


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, unit: float) -> None:
    """Compare `y` with the product in float64: the error may be `unit` times the sum of the sizes of its terms."""
    expected, size = x.double() @ weight.double().mT, x.double().abs() @ weight.double().abs().mT
    assert ((y.double() - expected).abs() <= unit * size).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 96, 512), (16, 33, 576), (17, 64, 48), (33, 100, 256), (65, 130, 200), (513, 16, 64), (2200, 140, 32)],
)
def test_against_float64(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    """Every size of tiles, sizes that they divide evenly and others, and more tiles of rows than a group has."""
    weight, x = numbers(num_outputs, num_inputs, dtype=dtype), numbers(num_rows, num_inputs, dtype=dtype, seed=1)
    y = InvariantLinear(weight)(x)
    assert (y.dtype, y.shape) == (dtype, (num_rows, num_outputs))
    assert_close(y, x, weight, UNIT[dtype])


def test_a_bias_is_added_before_rounding_and_shapes_stay() -> None:
    weight, x = numbers(48, 64, dtype=BFLOAT16), numbers(2, 3, 64, dtype=BFLOAT16, seed=1)
    bias = numbers(48, dtype=BFLOAT16, seed=2) * 100
    y, exact = InvariantLinear(weight, bias)(x), x.double() @ weight.double().T + bias.double()
    assert y.shape == (2, 3, 48)
    torch.testing.assert_close(y, exact.to(BFLOAT16), rtol=2**-8, atol=0)


def test_logits_and_scores_are_not_rounded() -> None:
    weight, x = numbers(70, 256, dtype=BFLOAT16), numbers(5, 256, dtype=BFLOAT16, seed=1)
    y = InvariantFloatLinear(weight)(x)
    assert y.dtype == torch.float32
    assert_close(y, x, weight, UNIT[torch.float32])


def test_heads_in_parts_of_wider_rows() -> None:
    weight, wide = numbers(3, 20, 40, dtype=BFLOAT16), numbers(50, 3, 28, dtype=BFLOAT16, seed=1)
    out = torch.full((50, 3, 44), float("nan"), dtype=BFLOAT16, device=DEVICE)
    InvariantHeadProducts(weight)(wide[:, :, :20], out[:, :, :40])
    expected = torch.empty_like(out)
    HeadProducts(weight)(wide[:, :, :20], expected[:, :, :40])
    torch.testing.assert_close(out[:, :, :40], expected[:, :, :40], rtol=2**-7, atol=1e-2)
    assert out[:, :, 40:].isnan().all()


@pytest.mark.parametrize("counts", [[0, 0, 1, 0], [21, 0, 14, 1], [150, 0, 3, 5]])
def test_experts_against_plain_torch(counts: list[int]) -> None:
    gate_up, down = numbers(4, 96, 40, dtype=BFLOAT16) * 0.2, numbers(4, 40, 48, dtype=BFLOAT16, seed=1)
    x, ends = numbers(sum(counts), 40, dtype=BFLOAT16, seed=2), ends_of(counts, DEVICE)
    y, expected = InvariantExperts(gate_up, down)(x, ends), PlainExperts(gate_up, down)(x, ends)
    assert (y - expected).norm() <= 2**-6 * expected.norm()


def test_a_decoder_has_no_products_of_torch_left() -> None:
    """A part that is not named here is no product, or its rows do not meet."""
    made = {
        INVARIANT_PARTS.linear,
        INVARIANT_PARTS.lm_head,
        INVARIANT_PARTS.expert_scores,
        INVARIANT_PARTS.plain_experts,
    }
    assert {each.__module__ for each in made} == {InvariantLinear.__module__}  # type: ignore[union-attr]
    assert INVARIANT_PARTS.head_products is InvariantHeadProducts
    gate = numbers(32, 16, dtype=BFLOAT16)
    assert isinstance(INVARIANT_PARTS.gated_linear(gate, gate, None, None)._gate_up, InvariantLinear)


# -- the same bits ----------------------------------------------------------------------------------------------------


def assert_rows_alike(multiply: object, x_TK: torch.Tensor) -> None:
    assert callable(multiply)
    expected = multiply(x_TK[:1])
    for num_rows in ROWS:
        assert torch.equal(multiply(x_TK[:num_rows])[:1], expected), num_rows
    last = multiply(x_TK[-1:])
    assert torch.equal(multiply(x_TK)[-1:], last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    weight, x = numbers(70, 300, dtype=dtype), numbers(ROWS[-1], 300, dtype=dtype, seed=1)
    assert_rows_alike(InvariantFloatLinear(weight), x)


@pytest.mark.parametrize("form", ["int8", "fp8", "groups", "int4"])
def test_with_weights_in_fewer_bits(form: str) -> None:
    if form in ("fp8", "groups") and not HAS_FLOAT8:
        pytest.skip("a GPU without 8-bit floats")
    weight, x = numbers(64, 160, dtype=BFLOAT16), numbers(ROWS[-1], 160, dtype=BFLOAT16, seed=1)
    stored = weight.to(torch.float8_e4m3fn)
    groups = ScaledWeight(stored, torch.full((64, 5), 0.5, device=DEVICE), 32, BFLOAT16)
    linears = INVARIANT_QUANTIZED_LINEARS
    makers = {"int8": linears.int8, "fp8": linears.fp8, "groups": linears.groups, "int4": linears.int4}
    linear = makers[form](groups if form == "groups" else weight)
    assert_rows_alike(linear, x)
    expected = x.double() @ (stored.double() * 0.5 if form == "groups" else weight.double()).T
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < {"int8": 0.02, "fp8": 0.05, "groups": 0.01, "int4": 0.1}[form]


def test_a_row_of_an_expert_has_the_same_bits_beside_any_others() -> None:
    weight, x = numbers(2, 70, 300, dtype=BFLOAT16), numbers(200, 300, dtype=BFLOAT16, seed=1)

    def product_of(first: int, counts: list[int], num_rows: int) -> torch.Tensor:
        config = row_config(KIND, num_rows, x.itemsize)
        rows = x[first : first + sum(counts)]
        tiles = tiles_of(ends_of(counts, DEVICE), len(rows), config.block_t)
        return expert_row_product(rows.contiguous(), weight, tiles, config)

    expected = product_of(0, [1, 0], 1)
    for num_rows in (16, 32, 64, 128, 1024):
        assert torch.equal(product_of(0, [90, 110], num_rows)[:1], expected)


def test_sums_have_one_order_in_tiles_of_all_sizes() -> None:
    for kind in GPU_KINDS.values():
        for make in (row_config, scaled_row_config):
            configs = [make(kind, num_rows, 2) for num_rows in (1, 17, 33, 65, 513, 100_000)]
            assert {config.block_k for config in configs} == {BLOCK_K}
            assert len({config.block_t for config in configs}) >= 4
            # With fewer, Hopper's and Blackwell's tensor cores get another instruction.
            assert min(config.block_n for config in configs) >= 64
            assert len({make(kind, num_rows, 4) for num_rows in (1, 100_000)}) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is asked what it does")
@pytest.mark.parametrize(("name", "num_rows"), [("row_product", 512), ("scaled_product", 1024)])
def test_a_device_is_asked_whether_it_adds_up_so(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here is one that adds up differently for the last row of its larger tiles."""
    monkeypatch.setattr(product, "CHECKED_INPUTS", 64)
    monkeypatch.setattr(product, "CHECKED_OUTPUTS", 16)
    check_rows_agree(DEVICE, BFLOAT16)
    multiply = getattr(product, name)

    def otherwise(*args: Any, **more: Any) -> torch.Tensor:
        y: torch.Tensor = multiply(*args, **more)
        config = more.get("config", args[3])
        if config.block_t == 128:
            y[-1, -1] += y[-1, -1].abs() * 2**-7
        return y

    monkeypatch.setattr(product, name, otherwise)
    message = rf"batch_invariant cannot be kept on this GPU: .* products of {num_rows} rows"
    with pytest.raises(ValueError, match=message):
        check_rows_agree(DEVICE, BFLOAT16)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is none")
@pytest.mark.parametrize("dtype", DTYPES)
def test_this_gpu_adds_up_so(dtype: torch.dtype) -> None:
    check_rows_agree(DEVICE, dtype)
