"""Checkpoints whose weights are in 8 bits already: what is read, what engines compute with it, what is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_inputs import rounds_inputs
from engine_steps import arguments, logits_of_steps
from quantized_checkpoints import FORMS, quantized, save_checkpoint
from safetensors.torch import load_file

from engine import scaled_weight
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.model_loader.eight_bit_weights import DummyEightBitWeights, EightBitWeights
from engine.model_loader.weights import DummyWeights, SafetensorsWeights
from engine.models.stored_weights import StoredWeights
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scaled_weight import ScaledWeight
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

NAME = "layer.proj.weight"
SHAPE = (50, 36)
SMALL = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "deepseek": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    "heads of 16": lambda: transformers.Qwen2Config(**SMALL | {"hidden_size": 64}),
    "experts": lambda: transformers.Qwen3MoeConfig(
        **SMALL | {"hidden_size": 64}, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=28
    ),
}
Saved = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""config.json and tensors."""


def one_tensor(folder: Path, form_name: str, **changes: torch.Tensor | None) -> torch.Tensor:
    """Save a checkpoint of one weight, and return what the weight stands for. `changes`: by the ends of tensors' names;
    None removes a tensor."""
    form = FORMS[form_name]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 0, 50)[:, None]
    stored, plain = quantized({NAME: weight}, form)
    for ending, tensor in changes.items():
        stored.pop(NAME.removesuffix("weight") + ending, None)
        if tensor is not None:
            stored[NAME.removesuffix("weight") + ending] = tensor
    save_checkpoint(folder, {"quantization_config": form.quantization_config}, stored)
    return plain[NAME]


def weights_of(folder: Path, dtype: str = "float32", quantization: str = "none") -> EightBitWeights:
    stored = StoredWeights.from_hf(json.loads((folder / "config.json").read_text()))
    return EightBitWeights(folder, dtype, "cpu", stored, quantization)


# -- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_floats", [1 << 22, 36 * 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_widened_weights_are_what_was_stored_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, dtype: torch.dtype, max_floats: int
) -> None:
    """Whole, and in pieces that do not end where blocks end."""
    monkeypatch.setattr(scaled_weight, "MAX_FLOATS", max_floats)
    expected = one_tensor(tmp_path, form).to(dtype)
    weights = weights_of(tmp_path, str(dtype).removeprefix("torch."))
    assert torch.equal(weights.take(NAME, SHAPE), expected)
    product = weights.take_product(NAME, SHAPE)
    assert isinstance(product, torch.Tensor)
    assert torch.equal(product, expected)
    weights.check_all_taken()


@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_in_8_bits_for_products_in_the_same(tmp_path: Path, form: str) -> None:
    """But not if their scales are of blocks, nor for products in the other kind of 8 bits."""
    expected = one_tensor(tmp_path, form)
    own, other = ("int8", "fp8") if "int" in form else ("fp8", "int8")
    widened = weights_of(tmp_path, quantization=other).take_product(NAME, SHAPE)
    assert isinstance(widened, torch.Tensor)
    assert torch.equal(widened, expected)
    kept = weights_of(tmp_path, quantization=own).take_product(NAME, SHAPE)
    if "block" in form:
        assert isinstance(kept, torch.Tensor)
        assert torch.equal(kept, expected)
    else:
        assert isinstance(kept, ScaledWeight)
        assert kept.weight.dtype == FORMS[form].dtype
        assert (kept.scale.shape, kept.scale.dtype, kept.dtype) == ((50, 1), torch.float32, torch.float32)
        assert torch.equal((kept.weight.double() * kept.scale.double()).float(), expected)
        assert torch.equal(kept.dequantized(), expected)
    assert torch.equal(weights_of(tmp_path, quantization=own).take(NAME, SHAPE), expected)


@pytest.mark.parametrize("form", FORMS)
def test_weights_as_stored_stay_in_8_bits_whatever_their_scales_are_of(tmp_path: Path, form: str) -> None:
    expected = one_tensor(tmp_path, form)
    kept = weights_of(tmp_path, quantization="stored").take_product(NAME, SHAPE)
    assert isinstance(kept, ScaledWeight)
    size = (FORMS[form].block or SHAPE)[1]
    assert (kept.weight.dtype, kept.group_size) == (FORMS[form].dtype, size)
    assert (kept.scale.shape, kept.scale.dtype) == ((50, -(-36 // size)), torch.float32)
    assert kept.scale.is_contiguous()
    whole = kept.scale.double()[:, torch.arange(36) // size]
    assert torch.equal((kept.weight.double() * whole).float(), expected)
    assert torch.equal(kept.dequantized(), expected)
    plain = weights_of(tmp_path, quantization="stored").take(NAME, SHAPE)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 tensor", "int channel", "float block"])
def test_made_up_weights_are_in_the_same_form(form: str) -> None:
    stored = StoredWeights.from_hf({"quantization_config": FORMS[form].quantization_config})
    shape = (50, 200)
    plain = DummyWeights(5, "float32", "cpu").take(NAME, shape)
    weight = DummyEightBitWeights(5, "bfloat16", "cpu", stored).take_product(NAME, shape)
    assert isinstance(weight, ScaledWeight)
    size = (FORMS[form].block or shape)[1]
    assert (weight.weight.dtype, weight.group_size, weight.dtype) == (FORMS[form].dtype, size, torch.bfloat16)
    assert weight.scale.shape == (50, -(-200 // size))
    assert (weight.dequantized().double() - plain.double()).norm() < 0.04 * plain.double().norm()


def test_plain_weights_among_them_are_read_as_they_are(tmp_path: Path) -> None:
    plain = torch.randn(SHAPE)
    one_tensor(tmp_path, "fp8 tensor", weight=plain, weight_scale=None)
    for quantization in ("none", "fp8", "stored"):
        product = weights_of(tmp_path, quantization=quantization).take_product(NAME, SHAPE)
        assert isinstance(product, torch.Tensor)
        assert torch.equal(product, plain)


def test_scales_of_keys_and_values_and_of_tied_embeddings_need_not_be_taken(tmp_path: Path) -> None:
    one_tensor(tmp_path, "fp8 tensor", k_scale=torch.ones(()), v_scale=torch.ones(1), input_scale=torch.ones(()))
    weights = weights_of(tmp_path)
    with pytest.raises(ValueError, match=r"does not use: layer.proj.weight, layer.proj.weight_scale$"):
        weights.check_all_taken()
    weights.ignore("proj.weight")
    weights.check_all_taken()


# -- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    models: dict[str, Saved] = {}

    def of(family: str) -> Saved:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(std=0.5)
            model.save_pretrained(folder)
            models[family] = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        return models[family]

    return of


def pair_of(folder: Path, saved: Saved, form_name: str) -> tuple[Path, Path]:
    """The folders of a model with 8-bit weights, and of the same model with plain weights."""
    hf_config, tensors = saved
    stored, plain = quantized(tensors, FORMS[form_name])
    in_8_bits = hf_config | {"quantization_config": FORMS[form_name].quantization_config}
    return save_checkpoint(folder / "8", in_8_bits, stored), save_checkpoint(folder / "plain", hf_config, plain)


def logits_of(folder: Path, **settings: Any) -> list[torch.Tensor]:
    args = replace(arguments(folder, "torch", "cpu", **settings), load_format="auto", num_threads=1)
    return logits_of_steps(args, records=False)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "fp8 blocks"), ("llama", "int channel"), ("qwen2", "fp8 tensor"), ("qwen2", "float channel"),
        ("deepseek", "fp8 blocks"), ("deepseek", "float tensor"),
    ],
)  # fmt: skip
def test_engines_compute_as_with_the_plain_weights_to_the_bit(
    saved: Callable[[str], Saved], tmp_path: Path, family: str, form: str
) -> None:
    """q, k, v, gate and up have scales of their own; also biases, latents and experts. In bfloat16, since float32
    products depend on where in its file a weight begins."""
    eight, plain = pair_of(tmp_path, saved(family), form)
    in_8_bits, expected_logits = (logits_of(folder, dtype="bfloat16") for folder in (eight, plain))
    for ours, expected in zip(in_8_bits, expected_logits, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("form", ["fp8 blocks, powers of two", "fp8 tensor, inv"])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_engines_compute_as_transformers_does_with_the_same_checkpoint(
    saved: Callable[[str], Saved], tmp_path: Path, family: str, form: str
) -> None:
    """On a CPU, transformers widens the weights, too, with code of its own."""
    hf_config, tensors = saved(family)
    stored, _ = quantized(tensors, replace(FORMS[form], block=(4, 4) if "blocks" in form else None))
    quantization_config = FORMS[form].quantization_config
    if "blocks" in form:  # transformers needs blocks that divide the sizes
        quantization_config = quantization_config | {"weight_block_size": [4, 4]}
    folder = save_checkpoint(tmp_path, hf_config | {"quantization_config": quantization_config}, stored)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = create_engine_config(EngineArgs(model=str(folder), dtype="float32", num_kv_blocks=40, device="cpu"))
    tokens = [7 * i % 97 + 3 for i in range(23)]
    seq = Sequence(0, "r", tokens, len(tokens), SamplingParams(), block_table=[0, 1])
    runner = Executor(config)._worker.runner
    logits = runner.compute(runner.prepare(SchedulerOutput([ScheduledSequence(seq, 23)], []))).logits
    assert logits is not None
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["int channel", "int tensor"])
def test_int8_products_are_those_of_the_checkpoint(
    saved: Callable[[str], Saved], tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are not rounded again, which would make the error a hundred times as large."""
    eight, plain = pair_of(tmp_path, saved("qwen2"), form)
    with monkeypatch.context() as patch:
        patch.setattr("engine.quantization.quantize_int8", None)  # nothing is quantised again
        kept = logits_of(eight, dtype="float32", quantization="int8")
    for ours, expected in zip(kept, logits_of(plain, dtype="float32"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    again = logits_of(plain, dtype="float32", quantization="int8")
    assert (again[0] - kept[0]).norm() > 1e-3 * kept[0].norm()


@pytest.mark.parametrize(
    ("family", "form"), [("heads of 16", "int channel"), ("heads of 16", "int tensor"), ("experts", "int channel")]
)
def test_the_cpu_kernels_take_int8_as_it_is_stored(
    saved: Callable[[str], Saved], tmp_path: Path, family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widened weights are rounded once more: the error of int8 is about as large as theirs."""
    eight, plain = pair_of(tmp_path, saved(family), form)
    args = replace(arguments(eight, "cpu", "cpu", dtype="bfloat16", block_size=16), load_format="auto", num_threads=1)
    config = create_engine_config(args)
    assert config.model.quantization == "stored"
    with monkeypatch.context() as patch:
        patch.setattr("engine.quantization.quantize_int8", None)  # nothing is quantised again
        patch.setattr(ScaledWeight, "dequantized", None)  # nor widened
        kept = logits_of_steps(args, records=False)
    expected = logits_of_steps(replace(args, model=str(plain)), records=False)
    exact = logits_of(plain, dtype="float32", block_size=16)
    ours, widened, truth = (torch.cat(each).flatten() for each in (kept, expected, exact))
    assert (ours - truth).norm() < (3 if rounds_inputs() else 1.5) * (widened - truth).norm()


def test_a_tensor_is_let_go_before_the_next_is_read(
    saved: Callable[[str], Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading then takes the memory of the model and one tensor, not of the checkpoint and the model."""
    folder, _ = pair_of(tmp_path, saved("llama"), "int channel")
    read, alive, most = EightBitWeights._read_stored, weakref.WeakSet[torch.Tensor](), 0

    def watched(self: EightBitWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name, shape)
        if tensor.dtype == torch.int8:
            alive.add(tensor)
            most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(EightBitWeights, "_read_stored", watched)
    Executor(create_engine_config(EngineArgs(model=str(folder), num_kv_blocks=40, device="cpu")))
    assert most == 1


# -- what is refused ------------------------------------------------------------------------------------------------

NAN = torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("fp8 tensor", {"weight_scale": None}, "is in 8 bits, and the files have neither of layer.proj.weight_"),
        ("fp8 tensor", {"weight_scale_inv": torch.ones(())}, "have both of layer.proj.weight_scale and layer"),
        ("fp8 tensor", {"weight_scale": NAN}, "_scale holds scales that are not finite, or negative"),
        ("fp8 tensor", {"weight_scale": -torch.ones(1)}, "_scale holds scales that are not finite, or negative"),
        ("fp8 tensor", {"weight_scale": torch.ones(1, dtype=torch.uint8)}, "is in torch.uint8; scales must be floats"),
        ("fp8 tensor", {"weight_scale": torch.ones(36)}, r"shape \(36,\), expected 1, \(50,\) or \(50, 1\)$"),
        ("fp8 tensor", {"weight_scale": torch.ones(5, 3)}, r"shape \(5, 3\), expected 1, \(50,\) or \(50, 1\)$"),
        (
            "fp8 blocks", {"weight_scale_inv": torch.ones(3, 5)},
            r"shape \(3, 5\), expected 1, \(50,\) or \(50, 1\) or \(5, 3\), of blocks of 10x12",
        ),
        ("fp8 blocks", {"weight_scale_inv": torch.full((5, 3), torch.inf)}, "inv holds scales that are not"),
        ("fp8 tensor", {"weight": NAN.expand(SHAPE).to(torch.float8_e4m3fn)}, " holds numbers that are not f"),
        ("fp8 tensor", {"weight": torch.ones(SHAPE, dtype=torch.float8_e5m2)}, " is in torch.float8_e5m2 with"),
        ("fp8 tensor", {"weight": torch.ones(SHAPE, dtype=torch.int8)}, "int8 .* are in torch.float8_e4m3fn, with two"),
        ("int channel", {"weight": torch.ones(SHAPE, dtype=torch.uint8)}, " is in torch.uint8 with 2 axes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("quantization", ["none", "fp8", "stored"])
def test_weights_that_cannot_be_read(
    tmp_path: Path, form: str, changes: dict[str, torch.Tensor | None], message: str, quantization: str
) -> None:
    """The error names the file and the tensor."""
    one_tensor(tmp_path, form, **changes)
    weights = weights_of(tmp_path, quantization=quantization)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'model.safetensors'}: {NAME}.*{message}"):
        weights.take_product(NAME, SHAPE)
    with pytest.raises(ValueError, match=message):
        weights.take(NAME, SHAPE)


def test_8_bits_that_config_json_does_not_name_are_no_weights(tmp_path: Path) -> None:
    one_tensor(tmp_path, "int channel")
    with pytest.raises(ValueError, match=r"proj.weight is in torch.int8, and config.json has no quantization_config"):
        SafetensorsWeights(tmp_path, "float32", "cpu").take(NAME, SHAPE)
    one_tensor(tmp_path, "fp8 tensor", weight=torch.randn(SHAPE))
    weights = weights_of(tmp_path)
    weights.take(NAME, SHAPE)
    with pytest.raises(ValueError, match=r"does not use: layer.proj.weight_scale$"):
        weights.check_all_taken()
