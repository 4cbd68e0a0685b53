"""Weights in 4 bits: how checkpoints store them, what is read, and what engines compute with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_steps import arguments, logits_of_steps
from int4_checkpoints import INT4_FORMS, WIDENED, in_int4
from quantized_checkpoints import save_checkpoint
from safetensors.torch import load_file

from engine import int4_weight
from engine.int4_weight import Int4Weight, quantize_int4
from engine.model_loader import create_engine_config, int4_weights
from engine.model_loader.int4_weights import DummyInt4Weights, Int4Weights
from engine.model_loader.settings import check_settings
from engine.model_loader.weights import DummyWeights, SafetensorsWeights
from engine.models.stored_weights import StoredWeights
from engine.weight import part_of, stacked

NAME = "layer.proj.weight"
SHAPE = (40, 128)
SMALL = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = SMALL | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "experts": lambda: transformers.Qwen3MoeConfig(**EXPERTS),
}


def one_tensor(folder: Path, form_name: str, **changes: torch.Tensor | None) -> torch.Tensor:
    """Save a checkpoint of one weight, and return what the weight stands for. `changes`: by the ends of tensors' names;
    None removes a tensor."""
    form = INT4_FORMS[form_name]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 0, 40)[:, None]
    stored, plain = in_int4({NAME: weight}, form)
    for ending, tensor in changes.items():
        stored.pop(NAME.removesuffix("weight") + ending, None)
        if tensor is not None:
            stored[NAME.removesuffix("weight") + ending] = tensor
    save_checkpoint(folder, {"quantization_config": form.quantization_config}, stored)
    return plain[NAME]


def weights_of(folder: Path, dtype: str = "float32", quantization: str = "none") -> Int4Weights:
    stored = StoredWeights.from_hf(json.loads((folder / "config.json").read_text()))
    return Int4Weights(folder, dtype, "cpu", stored, quantization)


# -- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_numbers", [1 << 20, 128 * 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", INT4_FORMS)
def test_widened_weights_are_what_was_stored_to_the_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
    dtype: torch.dtype,
    max_numbers: int,
) -> None:
    """Whole, and in pieces."""
    for module in (int4_weight, int4_weights):
        monkeypatch.setattr(module, "MAX_NUMBERS", max_numbers)
    expected = one_tensor(tmp_path, form).to(dtype)
    weights = weights_of(tmp_path, str(dtype).removeprefix("torch."))
    assert weights.has(NAME)
    assert torch.equal(weights.take(NAME, SHAPE), expected)
    product = weights.take_product(NAME, SHAPE)
    assert isinstance(product, torch.Tensor)
    assert torch.equal(product, expected)
    weights.check_all_taken()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quantization", ["stored", "int4"])
@pytest.mark.parametrize("form", INT4_FORMS)
def test_weights_stay_in_4_bits_where_their_groups_are_of_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, quantization: str
) -> None:
    """The engine reports how many are widened instead."""
    expected = one_tensor(tmp_path, form)
    weights = weights_of(tmp_path, quantization=quantization)
    kept = weights.take_product(NAME, SHAPE)
    weights.check_all_taken()
    assert ("tandem: 1 weights in 4 bits are widened: inputs that" in capsys.readouterr().err) == (form in WIDENED)
    if form in WIDENED:
        assert isinstance(kept, torch.Tensor)
        assert torch.equal(kept, expected)
        return
    assert isinstance(kept, Int4Weight)
    size = INT4_FORMS[form].group_size
    assert kept.group_size == (128 if size == -1 else size)
    assert (len(kept), kept.num_inputs, kept.dtype) == (*SHAPE, torch.float32)
    assert torch.equal(kept.dequantized(), expected)
    whole = kept.scale.double().repeat_interleave(kept.group_size, 1)
    offset = kept.offset.double().repeat_interleave(kept.group_size, 1)
    assert torch.equal((kept.integers().double() * whole + offset).float(), expected)


@pytest.mark.parametrize("quantization", ["none", "stored"])
def test_it_is_said_what_of_4_bits_is_widened_though_it_could_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: str
) -> None:
    """Each weight is reported once, however often it is taken."""
    expected = one_tensor(tmp_path, "gptq")
    weights = weights_of(tmp_path, quantization=quantization)
    for _ in range(2):
        assert torch.equal(weights.take(NAME, SHAPE), expected)
    weights.check_all_taken()
    said = "tandem: 1 weights in 4 bits are widened: .* or of experts that are not all alike"
    assert bool(re.search(said, capsys.readouterr().err)) == (quantization == "stored")


def test_plain_weights_among_them_are_read_as_they_are(tmp_path: Path) -> None:
    plain = torch.randn(SHAPE)
    one_tensor(tmp_path, "gptq", qweight=None, qzeros=None, scales=None, g_idx=None, weight=plain)
    weights = weights_of(tmp_path, quantization="stored")
    product = weights.take_product(NAME, SHAPE)
    assert isinstance(product, torch.Tensor)
    assert torch.equal(product, plain)
    weights.check_all_taken()


@pytest.mark.parametrize("form", ["gptq", "packed, zero points"])
def test_tensors_that_need_not_be_taken(tmp_path: Path, form: str) -> None:
    one_tensor(tmp_path, form)
    weights = weights_of(tmp_path)
    with pytest.raises(ValueError, match=r"does not use: layer.proj."):
        weights.check_all_taken()
    weights.ignore("proj.weight")
    weights.check_all_taken()


@pytest.mark.parametrize("ending", ["k_scale", "input_scale", "bias"])
@pytest.mark.parametrize("form", ["gptq", "awq", "packed"])
def test_tensors_that_change_no_number_need_not_be_taken(tmp_path: Path, form: str, ending: str) -> None:
    """Such as scales of keys and of activations, and the zeros that AutoGPTQ has written as the bias of every
    product."""
    one_tensor(tmp_path, form, **{ending: torch.zeros(40)})
    weights = weights_of(tmp_path)
    weights.take(NAME, SHAPE)
    weights.check_all_taken()


def test_an_order_that_was_never_made_is_none(tmp_path: Path) -> None:
    expected = one_tensor(tmp_path, "packed", weight_g_idx=torch.full((128,), -1).int())
    weights = weights_of(tmp_path)
    assert torch.equal(weights.take(NAME, SHAPE), expected)
    weights.check_all_taken()


def test_a_bias_that_adds_something_is_not_left_out(tmp_path: Path) -> None:
    one_tensor(tmp_path, "gptq", bias=torch.eye(40)[7])
    weights = weights_of(tmp_path)
    weights.take(NAME, SHAPE)
    with pytest.raises(ValueError, match=r"does not use: layer\.proj\.bias"):
        weights.check_all_taken()


def test_zero_points_of_zero_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """GPTQModel subtracts one from each zero point by subtracting from the whole word."""
    form = INT4_FORMS["gptq, v2"]
    stored, plain = in_int4({NAME: torch.rand(SHAPE) - torch.arange(2).repeat(20)[:, None] / 2}, form)
    zero = NAME.replace("weight", "qzeros")
    assert bool((stored[zero] & 15 == 0).all())
    stored[zero] = stored[zero] - 0x11111111
    config = form.quantization_config | {"checkpoint_format": "gptq"}
    save_checkpoint(tmp_path, {"quantization_config": config}, stored)
    assert torch.equal(weights_of(tmp_path).take(NAME, SHAPE), plain[NAME])


@pytest.mark.parametrize("form", ["gptq", "gptq, no groups", "packed"])
def test_made_up_weights_are_in_the_same_form(form: str) -> None:
    stored = StoredWeights.from_hf({"quantization_config": INT4_FORMS[form].quantization_config})
    plain = DummyWeights(5, "float32", "cpu").take(NAME, SHAPE)
    weight = DummyInt4Weights(5, "bfloat16", "cpu", stored).take_product(NAME, SHAPE)
    assert isinstance(weight, Int4Weight)
    assert weight.group_size == (128 if INT4_FORMS[form].group_size == -1 else 32)
    assert (weight.dequantized().double() - plain.double()).norm() < 0.12 * plain.double().norm()


# -- what they are --------------------------------------------------------------------------------------------------


def a_weight(num_outputs: int = 6, num_inputs: int = 128, group_size: int = 32, seed: int = 0) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    return quantize_int4(torch.randn(num_outputs, num_inputs, generator=generator).bfloat16(), group_size)


def test_quantised_weights_are_as_near_as_16_levels_can_be() -> None:
    plain = torch.randn(48, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain[3] = 0.25
    plain[4] = 0
    weight = quantize_int4(plain, 32)
    off = (weight.dequantized().float() - plain.float()).abs().view(48, 8, 32)
    groups = plain.float().view(48, 8, 32)
    step = (groups.amax(2) - groups.amin(2)) / 15
    # Half a step, and the rounding of offset, scale and number in bfloat16.
    assert bool((off <= 0.5 * step[:, :, None] + 2**-7 * groups.abs().amax(2, keepdim=True)).all())
    assert torch.equal(weight.dequantized()[3:5], plain[3:5])
    assert weight.integers().max() == 15
    assert weight.integers().min() == 0
    assert torch.equal(quantize_int4(weight.dequantized(), 32).dequantized()[3:5], plain[3:5])


def test_weights_are_quantised_in_pieces_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.randn(48, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = quantize_int4(plain, 64)
    monkeypatch.setattr(int4_weight, "MAX_NUMBERS", 256 * 7)
    pieces = quantize_int4(plain, 64)
    assert pieces.group_size == 64
    for name in ("packed", "scale", "offset"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    plain = torch.randn(4, 64)
    plain[1, 40] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize_int4(plain, 32)


def test_weights_of_one_form_are_joined_and_others_widened() -> None:
    one, other, coarse = a_weight(6), a_weight(4, seed=1), a_weight(4, group_size=64)
    whole = stacked([one, other])
    assert isinstance(whole, Int4Weight)
    assert torch.equal(whole.dequantized(), torch.cat([one.dequantized(), other.dequantized()]))
    for beside in (coarse, other.dequantized()):
        wide = stacked([one, beside])
        expected = beside if isinstance(beside, torch.Tensor) else beside.dequantized()
        assert isinstance(wide, torch.Tensor)
        assert torch.equal(wide, torch.cat([one.dequantized(), expected]))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("axis", "part"), [(0, range(2, 5)), (1, range(32, 96)), (1, range(64, 128))])
def test_parts_are_those_of_what_they_stand_for(axis: int, part: range, group_size: int) -> None:
    """A group that is cut becomes several smaller groups."""
    weight = a_weight(group_size=group_size)
    own = part_of(weight, axis, part)
    assert isinstance(own, Int4Weight)
    assert all(tensor.is_contiguous() for tensor in own.tensors)
    assert not {tensor.data_ptr() for tensor in own.tensors} & {tensor.data_ptr() for tensor in weight.tensors}
    assert torch.equal(own.dequantized(), weight.dequantized().narrow(axis, part.start, len(part)))


@pytest.mark.parametrize(
    ("group_size", "part", "at"), [(64, range(16, 112), 16), (32, range(0, 40), 40), (128, range(0, 40), 40)]
)
def test_a_group_is_not_cut_into_what_no_kernel_takes(group_size: int, part: range, at: int) -> None:
    with pytest.raises(ValueError, match=f"a weight at input {at}, where {group_size} share a scale; give "):
        part_of(a_weight(group_size=group_size), 1, part)


# -- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    models: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}

    def of(family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(7)
            transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
            models[family] = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        return models[family]

    return of


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "gptq"), ("llama", "awq"), ("qwen2", "packed"), ("qwen2", "gptq, zero points"),
        ("llama", "packed, by activations"), ("experts", "awq"),
    ],
)  # fmt: skip
def test_engines_compute_as_with_the_plain_weights(
    saved: Any, tmp_path: Path, family: str, form: str, backend: str
) -> None:
    """Also with the CPU kernels, which keep them in 4 bits, and do not round them to bfloat16 as the others are."""
    hf_config, tensors = saved(family)
    stored, plain = in_int4(tensors, INT4_FORMS[form])
    config = INT4_FORMS[form].quantization_config
    in_4_bits = save_checkpoint(tmp_path / "4", hf_config | {"quantization_config": config}, stored)
    widened = save_checkpoint(tmp_path / "plain", hf_config, plain)
    settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16}
    args = replace(arguments(in_4_bits, backend, "cpu", **settings), load_format="auto", num_threads=1)
    resolved = create_engine_config(args).model.quantization
    assert resolved == ("stored" if backend == "cpu" else "none")
    ours = logits_of_steps(args, records=False)
    for logits, expected in zip(ours, logits_of_steps(replace(args, model=str(widened)), records=False), strict=True):
        if resolved == "none":
            assert torch.equal(logits, expected)
        assert (logits - expected).norm() < 0.1 * expected.norm()


def test_who_keeps_4_bits_is_not_paired_with_who_widens_them(saved: Any, tmp_path: Path) -> None:
    """The CPU kernels do not round weights in 4 bits, so that their numbers are others."""
    hf_config, tensors = saved("llama")
    form = INT4_FORMS["gptq"]
    stored, _ = in_int4(tensors, form)
    folder = save_checkpoint(tmp_path, hf_config | {"quantization_config": form.quantization_config}, stored)
    args = replace(arguments(folder, "cpu", "cpu", dtype="bfloat16", block_size=16), load_format="auto")
    configs = [create_engine_config(replace(args, quantization=each)) for each in ("auto", "none", "int8", "int4")]
    assert [each.model.quantization for each in configs] == ["stored", "none", "int8", "int4"]
    assert len({each.compat_digest for each in configs}) == 4


@pytest.mark.parametrize(
    ("form", "asked", "own"),
    [("gptq", "gptq_marlin", True), ("awq", "awq", True), ("packed", "compressed-tensors", True),
     ("packed", "awq", False), ("gptq", "awq_marlin", False)],
)  # fmt: skip
def test_a_checkpoints_own_method_by_name_means_auto(
    saved: Any, tmp_path: Path, form: str, asked: str, own: bool
) -> None:
    hf_config, tensors = saved("llama")
    config = INT4_FORMS[form].quantization_config
    stored, _ = in_int4(tensors, INT4_FORMS[form])
    folder = save_checkpoint(tmp_path, hf_config | {"quantization_config": config}, stored)
    args = replace(arguments(folder, "cpu", "cpu", dtype="bfloat16", block_size=16), load_format="auto")
    named = replace(args, quantization=asked)
    if own:
        check_settings(named, folder)
        assert create_engine_config(named) == create_engine_config(args)
        return
    for check in (lambda: create_engine_config(named), lambda: check_settings(named, folder)):
        with pytest.raises(ValueError, match=f"quantization {asked} is not .*, whose quant_method is '.*'; give auto"):
            check()


def test_weights_that_are_quantised_when_loaded(saved: Any, tmp_path: Path) -> None:
    """The CPU kernels and plain torch quantise to the same numbers."""
    hf_config, tensors = saved("llama")
    folder = save_checkpoint(tmp_path, hf_config, tensors)
    logits = {}
    for backend, dtype in (("cpu", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")):
        settings: dict[str, Any] = {"dtype": dtype, "block_size": 16, "quantization": "int4"}
        args = replace(arguments(folder, backend, "cpu", **settings), load_format="auto", num_threads=1)
        logits[backend, dtype] = torch.cat(logits_of_steps(args, records=False)).float().flatten()
    truth = logits["torch", "float32"]
    ours, plain = ((logits[backend, "bfloat16"] - truth).norm() for backend in ("cpu", "torch"))
    assert ours < 1.5 * plain


# -- what is refused ------------------------------------------------------------------------------------------------

WORDS = torch.zeros(16, 40, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("gptq", {"qweight": None}, "lack the tensor layer.proj.q?weight"),
        ("gptq", {"qweight": None, "B": WORDS}, r"lack the tensor .*, and have layer\.proj\.B, layer.proj.g_idx, "),
        ("gptq", {"qzeros": None}, "lack the tensor layer.proj.qzeros"),
        ("gptq", {"scales": None}, "lack the tensor layer.proj.scales"),
        ("gptq", {"qweight": WORDS[:15]}, r"qweight is torch.int32 \(15, 40\), expected int32 \(16, 40\)"),
        ("gptq", {"qweight": WORDS.float()}, r"qweight is torch.float32 \(16, 40\), expected int32 \(16, 40\)"),
        ("gptq", {"qzeros": WORDS[:3, :5]}, r"qzeros is torch.int32 \(3, 5\), expected int32 \(4, 5\)"),
        ("gptq", {"scales": torch.ones(4, 39)}, r"scales has shape \(4, 39\), for a weight of \(40, 128\)"),
        ("gptq", {"scales": torch.ones(4, 40).int()}, "scales is in torch.int32; scales must be floats"),
        ("gptq", {"scales": torch.full((4, 40), torch.nan)}, "scales holds scales that are not finite"),
        ("gptq", {"g_idx": torch.zeros(5).int()}, "g_idx must be 128 integers"),
        ("gptq", {"g_idx": torch.full((128,), 4).int()}, "g_idx names groups beyond 4"),
        ("gptq", {"g_idx": torch.full((128,), -1).int()}, "g_idx names groups beyond 4"),
        ("awq", {"scales": torch.ones(3, 40), "qzeros": WORDS[:3, :5]}, "are not 3 groups of one even size"),
        ("packed", {"weight_packed": None}, "lack the tensor layer.proj.weight"),
        ("packed", {"weight_scale": torch.ones(40)}, r"weight_scale has shape \(40,\), for a weight of \(40, 128\)"),
        ("packed", {"weight": torch.ones(SHAPE).char()}, "torch.int8, and .* no quantization_config that says so"),
        ("packed, zero points", {"weight_zero_point": WORDS[:4, :4]}, r"\(4, 4\), expected int32 \(5, 4\)"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_read(
    tmp_path: Path, form: str, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    one_tensor(tmp_path, form, **changes)
    for quantization in ("none", "stored"):
        weights = weights_of(tmp_path, quantization=quantization)
        with pytest.raises(ValueError, match=message):
            weights.take_product(NAME, SHAPE)
        with pytest.raises(ValueError, match=message):
            weights.take(NAME, SHAPE)


def test_4_bits_that_config_json_does_not_name(tmp_path: Path) -> None:
    one_tensor(tmp_path, "awq")
    has = r"layer\.proj\.qweight, layer\.proj\.qzeros, layer\.proj\.scales: does config\.json say how they are stored"
    with pytest.raises(ValueError, match=rf"lack the tensor {NAME}, and have {has}"):
        SafetensorsWeights(tmp_path, "float32", "cpu").take(NAME, SHAPE)
    save_checkpoint(tmp_path, {}, {"a.weight": torch.ones(2), "b.bias": torch.ones(2)})
    for name in ("a.bias", "b.weight"):
        with pytest.raises(ValueError, match=f"lack the tensor {name}$"):
            SafetensorsWeights(tmp_path, "float32", "cpu").take(name, (2,))


@pytest.mark.parametrize(("named", "other"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_of_the_other_form_of_gptq_are_noticed(tmp_path: Path, named: str, other: str) -> None:
    """They are noticed if all are in the middle, as in most checkpoints. Otherwise each number would be too small or
    too large by one scale."""
    form = replace(INT4_FORMS["gptq"], packing=other)
    stored, plain = in_int4({NAME: torch.randn(SHAPE)}, form)
    for which in (other, named):
        config = form.quantization_config | {"checkpoint_format": which}
        save_checkpoint(tmp_path, {"quantization_config": config}, stored)
        if which == other:
            assert torch.equal(weights_of(tmp_path).take(NAME, SHAPE), plain[NAME])
            continue
        with pytest.raises(ValueError, match=rf"qzeros is one off .*: .*checkpoint_format must be {other}$"):
            weights_of(tmp_path).take(NAME, SHAPE)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": torch.ones(39, 4)}, {"offset": torch.ones(40, 2)}, {"packed": torch.zeros(40, 64).int()},
        {"scale": torch.ones(40, 4).double()}, {"packed": torch.zeros(40, 60).byte()},
    ],
)  # fmt: skip
def test_a_converted_file_of_other_sizes_is_refused(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    config = {"quant_method": "tandem-int4", "group_size": 32}
    tensors = {"packed": torch.zeros(40, 64).byte(), "scale": torch.ones(40, 4), "offset": torch.ones(40, 4)}
    for which, is_refused in ((tensors, False), (tensors | change, True)):
        named = {NAME.replace("weight", ending): tensor for ending, tensor in which.items()}
        save_checkpoint(tmp_path, {"quantization_config": config}, named)
        if is_refused:
            with pytest.raises(ValueError, match=r"is in 4 bits of other sizes than \(40, 128\); convert"):
                weights_of(tmp_path).take(NAME, SHAPE)
        else:
            assert torch.equal(weights_of(tmp_path).take(NAME, SHAPE), torch.ones(SHAPE))


def test_sizes_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    one_tensor(tmp_path, "gptq")
    with pytest.raises(ValueError, match=r"is in 4 bits, and its sizes \(40, 124\) are no multiples of 8"):
        weights_of(tmp_path).take(NAME, (40, 124))
