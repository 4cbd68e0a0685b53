"""Weights in 8 bits: how they are quantised, the layers that multiply with them, and where they are not possible."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepseek_cases import V3
from torch.utils._python_dispatch import TorchDispatchMode

from engine.float8 import why_no_float8
from engine.layers import GatedLinear, Linear
from engine.models import load_decoder_config
from engine.models.parts import PLAIN_PARTS
from engine.models.stored_weights import StoredWeights
from engine.quantization import (
    MAX_PACKED_ROWS,
    QUANTIZED_LINEARS,
    Float8Linear,
    GroupScaledLinear,
    Int8Linear,
    quantize_float8,
    quantize_int8,
)
from engine.quantization_choice import resolve_quantization
from engine.scaled_weight import ScaledWeight
from engine.weight import stacked

BFLOAT16 = torch.bfloat16
UNIT = {torch.float32: 2**-20, torch.float16: 2**-10, BFLOAT16: 2**-7}
HOPPER = (9, 0)
MODEL = load_decoder_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    }
)  # fmt: skip
DEEPSEEK = load_decoder_config(V3 | {"hidden_size": 64, "v_head_dim": 12})


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uneven_weight(dtype: torch.dtype) -> torch.Tensor:
    """The sizes of its outputs differ by factors of thousands: one scale for all would lose the small ones."""
    return (randn(48, 80) * torch.logspace(-3, 1, 48)[:, None]).to(dtype)


# -- what weights become --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", UNIT)
def test_int8_is_the_nearest_multiple_of_each_outputs_scale(dtype: torch.dtype) -> None:
    weight = uneven_weight(dtype)
    int8, scale = quantize_int8(weight)
    assert (int8.dtype, int8.shape, scale.shape) == (torch.int8, weight.shape, (48,))
    assert scale.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert (int8.abs().amax(dim=1) >= 126).all()
    error = (int8.double() * scale.double()[:, None] - weight.double()).abs()
    # Half a step; the rounding of the scale may put the largest beyond 127 steps.
    assert (error <= scale.double()[:, None] * (0.5 + 127 * UNIT[dtype] / 2)).all()
    assert (error.norm(dim=1) < 0.01 * weight.double().norm(dim=1)).all()  # also for small outputs


class LargestInFloat32(TorchDispatchMode):
    """Notes how many numbers the largest float32 tensor has that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.largest = max(self.largest, made.numel())
        return made


def test_int8_takes_little_room_beside_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary's weight, whole in float32 twice, would take four times its bytes."""
    weight = uneven_weight(BFLOAT16)
    int8, scale = quantize_int8(weight)
    monkeypatch.setattr("engine.quantization.MAX_NUMBERS", 80 * 7)
    with LargestInFloat32() as made:
        in_pieces = quantize_int8(weight)
    assert torch.equal(in_pieces[0], int8)
    assert torch.equal(in_pieces[1], scale)
    assert made.largest == 80 * 7


def test_float8_is_the_nearest_of_each_rows_scale() -> None:
    weight = uneven_weight(BFLOAT16)
    float8, scale = quantize_float8(weight)
    assert (float8.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (48, 1))
    assert (float8.float().abs().amax(dim=1) == 448).all()
    error = (float8.double() * scale.double() - weight.double()).abs()
    assert (error <= weight.double().abs() / 16 + scale.double() * 2**-10).all()


@pytest.mark.parametrize("dtype", UNIT)
def test_rows_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 16, dtype=dtype)
    for quantized, scale in (quantize_int8(zeros), quantize_float8(zeros)):
        assert not quantized.float().any()
        assert scale.isfinite().all()
        assert (scale > 0).all()


@pytest.mark.parametrize("linear", [Int8Linear, Float8Linear])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(linear: type[Linear], wrong: float) -> None:
    weight = randn(16, 16, dtype=BFLOAT16)
    weight[3, 5] = wrong
    with pytest.raises(ValueError, match="weights that are not finite"):
        linear(weight)


# -- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, MAX_PACKED_ROWS + 1])
@pytest.mark.parametrize("dtype", UNIT)
def test_int8_products_against_float64(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    weight, x = uneven_weight(dtype), randn(num_rows, 80, dtype=dtype, seed=1)
    bias = randn(48, dtype=dtype, seed=2) if has_bias else None
    linear = Int8Linear(weight, bias)
    y = linear(x)
    assert (y.dtype, y.shape) == (dtype, (num_rows, 48))
    shift = 0 if bias is None else bias.double()
    stored = linear.weight_NK.double() * linear.scale_N.double()[:, None]
    size = x.double().abs() @ stored.abs().T + (0 if bias is None else bias.double().abs())
    assert ((y.double() - x.double() @ stored.T - shift).abs() <= 2 * UNIT[dtype] * size).all()


@pytest.mark.parametrize("num_inputs", [8, 17, 40])
def test_int8_products_with_a_number_of_inputs_that_torch_would_misread(num_inputs: int) -> None:
    weight, x = randn(24, num_inputs, dtype=BFLOAT16), randn(3, num_inputs, dtype=BFLOAT16, seed=1)
    expected = x.double() @ weight.double().T
    assert (Int8Linear(weight)(x).double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 7])
def test_int8_products_of_columns_of_a_larger_tensor(num_rows: int) -> None:
    """They begin at addresses that torch's product could not read."""
    linear, x = Int8Linear(uneven_weight(BFLOAT16)), randn(num_rows, 200, dtype=BFLOAT16)
    assert torch.equal(linear(x[:, 50:130]), linear(x[:, 50:130].clone()))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_8_bit_float_products_against_float64(num_rows: int, has_bias: bool) -> None:
    """With torch's own product, on a CPU: its operands are accepted, and scales and bias are applied in the right
    places."""
    weight = uneven_weight(BFLOAT16)
    x = (randn(num_rows, 80, seed=1) * torch.logspace(-2, 2, num_rows)[:, None]).to(BFLOAT16)
    bias = randn(48, dtype=BFLOAT16, seed=2) if has_bias else None
    linear = Float8Linear(weight, bias)
    y = linear(x)
    assert (y.dtype, y.shape) == (BFLOAT16, (num_rows, 48))
    shift = 0 if bias is None else bias.double()
    x8, x_scale = quantize_float8(x)
    stored = linear.weight_NK.double() * linear.scale_1N.double().T
    expected = (x8.double() * x_scale.double()) @ stored.T + shift
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-4)
    # Compared with unquantised weights and activations, row by row; small outputs count as much as large ones.
    exact, size_N = x.double() @ weight.double().T, weight.double().norm(dim=1)
    error_T, size_T = (((z / size_N).norm(dim=1)) for z in (expected - shift - exact, exact))
    assert (error_T < 0.06 * size_T).all()


def test_parts_of_quantised_products_leave_logits_and_norms_alone() -> None:
    parts = PLAIN_PARTS.with_products(Int8Linear)
    assert replace(parts, linear=Linear, gated_linear=GatedLinear) == PLAIN_PARTS
    assert parts.linear is Int8Linear
    gate, up, x = (randn(*shape, dtype=BFLOAT16, seed=seed) for seed, shape in enumerate([(24, 32), (24, 32), (3, 32)]))
    gated = parts.gated_linear(gate, up, None, None)
    assert isinstance(gated._gate_up, Int8Linear)
    plain = GatedLinear(gate, up, None, None)(x).double()
    assert 0 < (gated(x).double() - plain).norm() < 0.03 * plain.norm()


# -- weights that a checkpoint has in 8 bits --------------------------------------------------------------------------


def row_scaled(dtype: torch.dtype, form: torch.dtype, scale: torch.Tensor, seed: int = 0) -> ScaledWeight:
    """A weight [outputs, 80]. `scale`: one for each output, or for each output and group of 32 inputs."""
    numbers = randn(len(scale), 80, seed=seed) * 30
    stored = numbers.round().to(form) if form == torch.int8 else numbers.to(form)
    return ScaledWeight(stored, scale.view(len(scale), -1), 80 if scale.ndim == 1 else 32, dtype)


def exactly(weight: ScaledWeight) -> torch.Tensor:
    """What the weight stands for, in float64."""
    inputs = torch.arange(weight.weight.shape[1])
    return weight.weight.double() * weight.scale.double()[:, inputs // weight.group_size]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_int8_products_take_a_checkpoints_weight_as_it_is(dtype: torch.dtype, is_narrow: bool) -> None:
    """The scales, too, are kept: in a narrower dtype only if that loses nothing."""
    scale = torch.logspace(-4, -1, 48)
    weight = row_scaled(dtype, torch.int8, scale.bfloat16().float() if is_narrow else scale)
    linear = Int8Linear(weight)
    assert linear.weight_NK is weight.weight
    assert torch.equal(linear.scale_N.double(), weight.scale.double()[:, 0])
    assert linear.scale_N.dtype == (dtype if is_narrow and dtype != torch.float16 else torch.float32)
    assert torch.equal(linear.dequantized(), weight.dequantized())
    stored = exactly(weight)
    for num_rows in (1, MAX_PACKED_ROWS + 1):
        x = randn(num_rows, 80, dtype=dtype, seed=1)
        error = (linear(x).double() - x.double() @ stored.T).abs()
        assert (error <= 2 * UNIT[dtype] * (x.double().abs() @ stored.abs().T)).all()


@pytest.mark.parametrize("num_rows", [1, 17])
def test_8_bit_float_products_take_a_checkpoints_weight_as_it_is(num_rows: int) -> None:
    weight = row_scaled(BFLOAT16, torch.float8_e4m3fn, torch.logspace(-4, -1, 48))
    bias, x = randn(48, dtype=BFLOAT16, seed=2), randn(num_rows, 80, dtype=BFLOAT16, seed=1)
    linear = Float8Linear(weight, bias)
    assert linear.weight_NK is weight.weight
    x8, x_scale = quantize_float8(x)
    stored = exactly(weight)
    expected = (x8.double() * x_scale.double()) @ stored.T + bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn])
def test_fused_products_keep_the_scales_of_each(form: torch.dtype) -> None:
    parts = [row_scaled(BFLOAT16, form, torch.full((16 * (i + 1),), 10.0**-i), seed=i) for i in range(3)]
    whole = stacked(parts)
    assert isinstance(whole, ScaledWeight)
    assert whole.weight.dtype == form
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    plain = randn(16, 80, dtype=BFLOAT16)
    mixed = stacked([parts[0], plain])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat((parts[0].dequantized(), plain)))


def test_weights_with_scales_of_other_groups_are_fused_widened() -> None:
    rows, groups = (row_scaled(BFLOAT16, torch.int8, torch.rand(shape) + 0.1) for shape in ((16,), (16, 3)))
    whole = stacked([groups, groups])
    assert isinstance(whole, ScaledWeight)
    assert (whole.group_size, whole.scale.shape) == (32, (32, 3))
    for mixed in ([rows, groups], [groups, row_scaled(BFLOAT16, torch.float8_e4m3fn, torch.rand(16, 3) + 0.1)]):
        widened = stacked(mixed)
        assert isinstance(widened, torch.Tensor)
        assert torch.equal(widened, torch.cat([part.dequantized() for part in mixed]))


@pytest.mark.parametrize("form", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", UNIT)
def test_products_with_scales_of_groups_against_float64(dtype: torch.dtype, form: torch.dtype) -> None:
    weight = row_scaled(dtype, form, torch.logspace(-4, -1, 48)[:, None] * torch.tensor([1.0, 30.0, 0.1]))
    bias, x = randn(48, dtype=dtype, seed=2), randn(5, 80, dtype=dtype, seed=1)
    size = x.double().abs() @ exactly(weight).abs().T + bias.double().abs()
    error = (GroupScaledLinear(weight, bias)(x).double() - x.double() @ exactly(weight).T - bias.double()).abs()
    assert (error <= 2 * UNIT[dtype] * size).all()


def test_each_product_is_in_what_its_weight_is_stored_in() -> None:
    """A weight that is plain in the checkpoint stays plain."""
    make = QUANTIZED_LINEARS.of("stored")
    one = torch.ones(48)
    weights = [
        randn(48, 80, dtype=BFLOAT16),
        row_scaled(BFLOAT16, torch.int8, one),
        row_scaled(BFLOAT16, torch.float8_e4m3fn, one),
        row_scaled(BFLOAT16, torch.float8_e4m3fn, torch.ones(48, 3)),
        row_scaled(BFLOAT16, torch.int8, torch.ones(48, 3)),
    ]
    made = [Linear, Int8Linear, Float8Linear, GroupScaledLinear, GroupScaledLinear]
    assert [type(make(weight, None)) for weight in weights] == made
    parts = PLAIN_PARTS.with_products(make)
    gated = parts.gated_linear(weights[1], weights[1], None, None)
    assert type(gated._gate_up) is Int8Linear
    assert type(parts.gated_linear(weights[0], weights[1], None, None)._gate_up) is Linear


# -- which, and where they cannot be --------------------------------------------------------------------------------

PLAIN, INT8, FP8 = (StoredWeights(quantizations=each) for each in ((), ("int8",), ("fp8",)))
BLOCKS = StoredWeights(quantizations=("fp8",), block=(128, 128))
INT4 = StoredWeights(quantizations=("int4",), packing="gptq", group_size=128)


def resolved(asked: str, stored: StoredWeights = PLAIN, **changes: Any) -> str:
    capability = changes.pop("capability", HOPPER)
    device = "cpu" if capability is None else "cuda"
    dtype, has_kernels = changes.pop("dtype", "bfloat16"), changes.pop("has_kernels", device == "cuda")
    model = replace(changes.pop("model", MODEL), **changes)
    return resolve_quantization(
        asked, stored, device=device, capability=capability, dtype=dtype, model=model, has_kernels=has_kernels
    )


@pytest.mark.parametrize("stored", [PLAIN, INT8, FP8, BLOCKS])
@pytest.mark.parametrize("asked", ["none", "int8", "fp8"])
def test_what_is_asked_for_by_name_is_whatever_the_checkpoint_has(asked: str, stored: StoredWeights) -> None:
    assert resolved(asked, stored) == asked


def test_auto_is_what_the_checkpoint_has(capsys: pytest.CaptureFixture[str]) -> None:
    both = StoredWeights(quantizations=("fp8", "int8"), block=(128, 128))
    assert resolved("auto", PLAIN) == "none"
    assert [resolved("auto", stored) for stored in (INT8, FP8, BLOCKS, both)] == ["stored"] * 4
    assert resolved("auto", INT8, capability=(8, 0), dtype="float16", intermediate_size=40) == "stored"
    assert resolved("auto", PLAIN, capability=None) == "none"
    assert resolved("auto", INT8, capability=None, has_kernels=True) == "stored", "the CPU kernels take it"
    assert resolved("auto", FP8, has_kernels=False) == "stored", "torch's own product takes it"
    for stored in (INT8, FP8, BLOCKS, both, INT4):
        assert resolved("auto", stored, model=DEEPSEEK) == "stored"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("stored", "changes", "why"),
    [
        (INT8, {"capability": None}, "weights in int8 are widened to bfloat16: that is faster on a CPU"),
        (INT8, {"capability": None, "dtype": "float16"}, "widened to float16: the CPU kernels .* need dtype bfloat16"),
        (FP8, {"capability": None, "dtype": "float32"}, "weights in fp8 are widened to float32: that is faster"),
        (
            StoredWeights(quantizations=("fp8",), block=(128, 100)), {},
            "in blocks of 128x100 .*: inputs that share a scale must be a multiple of 16, are 100",
        ),
        (BLOCKS, {"capability": (8, 6)}, "8.9 or later, and this one has 8.6$"),
        (BLOCKS, {"has_kernels": False}, "128x128 .*: without Triton kernels they would be widened in each step"),
        (INT8, {"has_kernels": False}, "int8 .*: without Triton kernels they would be widened in each step"),
        (FP8, {"capability": (8, 6)}, "8.9 or later, and this one has 8.6$"),
        (FP8, {"dtype": "float16"}, "it computes bfloat16, and dtype is float16"),
        (FP8, {"intermediate_size": 40}, r"must be multiples of 16, are \(64, 64, 128, 40\)"),
        (BLOCKS, {"capability": None}, "blocks of 128x128 are widened to bfloat16: that is faster on a CPU"),
        (FP8, {"capability": None, "has_kernels": True}, "fp8 are widened to bfloat16: that is faster on a CPU"),
        (
            StoredWeights(quantizations=("int8",), block=(128, 128)), {"capability": None, "has_kernels": True},
            "int8 in blocks of 128x128 are widened to bfloat16: that is faster on a CPU",
        ),
        (
            BLOCKS, {"model": DEEPSEEK, "has_kernels": False},
            "fp8 in blocks of 128x128 are widened .*: without Triton kernels they would be widened in each step",
        ),
        (
            FP8, {"model": DEEPSEEK, "has_kernels": False},
            "fp8 are widened .*: without Triton kernels they would be widened in each step",
        ),
        (
            INT4, {"model": DEEPSEEK, "has_kernels": False},
            "int4 are widened .*: without Triton kernels they would be widened in each step",
        ),
        (BLOCKS, {"model": DEEPSEEK, "capability": None}, "blocks of 128x128 are widened .*: that is faster on a CPU"),
        (BLOCKS, {"model": DEEPSEEK, "capability": (8, 0)}, "8.9 or later, and this one has 8.0$"),
        (FP8, {"model": DEEPSEEK, "capability": (8, 6)}, "8.9 or later, and this one has 8.6$"),
        (BLOCKS, {"model": DEEPSEEK, "dtype": "float16"}, "blocks of 128x128 .*: it computes bfloat16, and dtype is f"),
        (StoredWeights(quantizations=("fp8", "int8")), {"dtype": "float16"}, "fp8 and int8 are .*: it computes bfloat"),
    ],
)  # fmt: skip
def test_auto_widens_what_cannot_stay_as_it_is_and_says_why(
    capsys: pytest.CaptureFixture[str], stored: StoredWeights, changes: dict[str, Any], why: str
) -> None:
    assert resolved("auto", stored, **changes) == "none"
    assert re.search(why, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"v_head_dim": 10}, r"\(64, 40, 48, 16\)"),
        ({"moe_intermediate_size": 24}, r"\(64, 48, 48, 24\)"),
        ({"intermediate_size": 50}, r"\(64, 48, 50, 16\)"),
        ({"n_routed_experts": None, "first_k_dense_replace": 3, "hidden_size": 72}, r"\(72, 48, 48\)"),
    ],
)
def test_8_bit_floats_beside_latent_attention_are_widened_where_a_product_would_not_take_them(
    changes: dict[str, Any], sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the layer's own products count, not those of latents and of routed experts."""
    model = load_decoder_config(V3 | {"hidden_size": 64, "v_head_dim": 12} | changes)
    assert resolved("auto", FP8, model=model) == "none"
    assert re.search(f"must be multiples of 16, are {sizes}", capsys.readouterr().err)
    assert resolved("auto", INT8, model=model) == "stored"


@pytest.mark.parametrize("stored", [PLAIN, BLOCKS])
@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4"])
def test_weights_beside_latent_attention_are_quantised_by_name(quantization: str, stored: StoredWeights) -> None:
    model = load_decoder_config(V3 | {"hidden_size": 64, "v_head_dim": 16, "q_lora_rank": 32, "intermediate_size": 64})
    model = replace(model, moe=replace(model.moe, intermediate_size=32)) if model.moe is not None else model
    assert resolved(quantization, stored, model=model) == quantization


@pytest.mark.parametrize("stored", [PLAIN, BLOCKS])
def test_8_bit_floats_of_latents_need_sizes_that_fit(stored: StoredWeights) -> None:
    with pytest.raises(
        ValueError, match=r"fp8 .* multiples of 16, are \(64, 48, 20, 52, 80, 48, 16\) .*; give int8 or none"
    ):
        resolved("fp8", stored, model=DEEPSEEK)


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_int8_works_anywhere(quantization: str, capability: tuple[int, int] | None) -> None:
    assert resolved(quantization, capability=capability, dtype="float16", hidden_size=17) == quantization


@pytest.mark.parametrize("capability", [(8, 9), HOPPER, (10, 0), (12, 0)])
def test_8_bit_floats_work_where_the_device_has_them(capability: tuple[int, int]) -> None:
    assert resolved("fp8", capability=capability) == "fp8"
    assert why_no_float8(capability) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"capability": None}, "it needs a GPU of compute capability 8.9 or later; give int8 or none"),
        ({"capability": (8, 6)}, "8.9 or later, and this one has 8.6; give int8 or none"),
        ({"dtype": "float16"}, "it computes bfloat16, and dtype is float16"),
        ({"intermediate_size": 40}, r"must be multiples of 16, are \(64, 64, 128, 40\)"),
        ({"head_dim": 10}, r"must be multiples of 16, are \(64, 40, 80, 96\)"),
    ],
)
def test_8_bit_floats_are_refused_elsewhere(changes: dict[str, Any], why: str) -> None:
    for stored in (PLAIN, FP8):
        with pytest.raises(ValueError, match="quantization fp8 cannot work here: .*" + why):
            resolved("fp8", stored, **changes)
