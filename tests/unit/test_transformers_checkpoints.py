"""Checkpoints in 8 and 4 bits of models that transformers' own code computes: the results are those of transformers
with what the weights stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers
from int4_checkpoints import INT4_FORMS, WIDENED, in_int4
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, reference, save_model
from quantized_checkpoints import FORMS, quantized
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers_cases import QWEN3_5

from engine.config import EngineConfig
from engine.model_loader import narrow_products
from engine.model_loader.eight_bit_weights import DummyEightBitWeights
from engine.model_loader.narrow_products import Checkpoint, Kept, made_up
from engine.models.stored_weights import StoredWeights
from engine.quantization import AS_STORED

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = SMALL | {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 64}
CONFIGS: dict[str, Callable[[], Any]] = {
    "olmo2": lambda: transformers.Olmo2Config(**WIDE),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**QWEN3_5 | {"vocab_size": 307, "intermediate_size": 64}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32
    ),
}
ALL_FORMS = FORMS | INT4_FORMS


def save_quantized(name: str, form_name: str, folder: Path) -> Any:
    """Save a checkpoint in 8 or 4 bits. Returns transformers' model of what its weights stand for."""
    config, form = CONFIGS[name](), ALL_FORMS[form_name]
    model = save_model(config, folder)
    make: Any = quantized if form_name in FORMS else in_int4
    stored, plain = make(load_file(folder / "model.safetensors"), form)
    save_file(plain, folder / "model.safetensors")
    model = type(model).from_pretrained(folder, attn_implementation="eager")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": form.quantization_config}))
    return model


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return engine_config(folder, model_impl="transformers", **settings)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    """Collects what checkpoints are split into."""
    found: list[Checkpoint] = []
    original = narrow_products.split_checkpoint

    def collecting(*args: Any) -> Checkpoint:
        checkpoint = original(*args)
        kept = Kept(dict(checkpoint.kept.products), dict(checkpoint.kept.experts))
        found.append(Checkpoint(dict(checkpoint.tensors), kept))
        return checkpoint

    monkeypatch.setattr("engine.model_loader.transformers_weights.split_checkpoint", collecting)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_what_the_weights_stand_for(name: str, form: str, tmp_path: Path) -> None:
    """Without our kernels, all are widened."""
    model = save_quantized(name, form, tmp_path)
    config = config_of(tmp_path)
    assert config.model.quantization == "none"
    tokens, bench = random_tokens(21, seed=1), Bench(config)
    logits = bench.logits((bench.sequence(tokens), 21))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", ["int channel", *INT4_FORMS])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_cpu_kernels_multiply_with_weights_as_they_are_stored(
    name: str, form: str, split: list[Checkpoint], tmp_path: Path
) -> None:
    """All but those of which inputs that share a scale are not neighbours, or too few."""
    model = save_quantized(name, form, tmp_path)
    config = config_of(tmp_path, dtype="bfloat16", block_size=16, num_kv_blocks=320)
    bench = Bench(config)
    [checkpoint] = split
    assert bool(checkpoint.kept.products) == (form not in WIDENED)
    assert bool(checkpoint.kept.experts) == (form not in WIDENED and name == "qwen3-moe")
    parts = {name for module in checkpoint.kept.experts for name in (f"{module}.gate_up_proj", f"{module}.down_proj")}
    for kept_name in {f"{module}.weight" for module in checkpoint.kept.products} | parts:
        assert checkpoint.tensors[kept_name].untyped_storage().nbytes() <= 4, "it takes no memory twice"
    assert not parts or not any(re.search(r"experts\.\d", each) for each in checkpoint.tensors)
    model, errors = model.bfloat16(), []
    for seed in range(5):
        tokens = random_tokens(21, seed=seed)
        logits = bench.logits((bench.sequence(tokens), 21))
        assert logits is not None
        expected = reference(model, tokens).float()
        errors.append(float((logits[0] - expected).norm() / expected.norm()))
    assert median(errors) < 0.08, errors  # rounding may choose another expert: some are larger


@pytest.mark.parametrize("form", ["int channel", "gptq"])
def test_made_up_weights_have_the_form_that_config_json_names(form: str, tmp_path: Path) -> None:
    save_quantized("qwen3.5", form, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = config_of(tmp_path, dtype="bfloat16", block_size=16, num_kv_blocks=64, load_format="dummy")
    assert config.model.quantization == AS_STORED
    bench = Bench(config)
    logits = bench.logits((bench.sequence(random_tokens(21, seed=1)), 21))
    assert logits is not None
    assert logits.isfinite().all()


def test_zeros_that_stand_for_no_bias_are_left_out(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ wrote them for every weight."""
    model = save_quantized("olmo2", "gptq", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.zeros(192)}, tmp_path / "model.safetensors")
    bench, tokens = Bench(config_of(tmp_path)), random_tokens(9, seed=1)
    logits = bench.logits((bench.sequence(tokens), 9))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))
    save_file(tensors | {name: torch.ones(192)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"hold tensors that the architecture does not use: {name}"):
        Bench(config_of(tmp_path))


def test_zeros_that_stand_for_no_bias_are_left_out_beside_experts(tmp_path: Path) -> None:
    """As in Qwen1.5-MoE in 4 bits. transformers' code has no parts of the experts' names."""
    model = save_quantized("qwen3-moe", "gptq", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = [name.removesuffix("scales") for name in tensors if name.endswith(".scales")]
    zeros = {f"{name}bias": torch.zeros(tensors[f"{name}scales"].shape[1]) for name in weights}
    assert any("experts" in name for name in zeros)
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    bench, tokens = Bench(config_of(tmp_path)), random_tokens(9, seed=1)
    logits = bench.logits((bench.sequence(tokens), 9))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))


@pytest.mark.parametrize("form_name", ["gptq", "gptq, by activations"])
def test_gpt2s_weights_are_packed_like_those_of_linear_layers(form_name: str, tmp_path: Path) -> None:
    """Its code has them transposed."""
    config = transformers.GPT2Config(
        vocab_size=307, n_embd=96, n_layer=2, n_head=6, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    model, form = save_model(config, tmp_path), INT4_FORMS[form_name]
    tensors = load_file(tmp_path / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            stored, exact = form.quantize(tensors.pop(f"{name}.weight").T)
            tensors |= {f"{name}.{ending}": tensor.contiguous() for ending, tensor in stored.items()}
            module.weight.data = exact.float().T
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": form.quantization_config}))
    bench, tokens = Bench(config_of(tmp_path)), random_tokens(9, seed=1)
    logits = bench.logits((bench.sequence(tokens), 9))
    assert logits is not None
    assert_close(logits[0], reference(model, tokens))


def test_a_layer_that_stands_in_two_places_is_widened() -> None:
    """It would be replaced in one of them, and have no numbers in the other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
            self.second = nn.ModuleDict({"up": self.first["up"]})

        def get_output_embeddings(self) -> None:
            return None

    stored = StoredWeights.from_hf({"quantization_config": FORMS["int channel"].quantization_config})
    kept = made_up(DummyEightBitWeights(1, "float32", "cpu", stored), Model())
    assert list(kept.products) == ["first.down"]


@pytest.mark.parametrize(
    ("form", "left_out", "why"),
    [
        (
            "int channel",
            "model.layers.0.mlp.up_proj.weight_scale",
            "the files have neither of .*up_proj.weight_scale and",
        ),
        ("gptq", "model.layers.0.mlp.up_proj.scales", "lack the tensor model.layers.0.mlp.up_proj.scales"),
        ("gptq", "model.layers.0.mlp.up_proj.qweight", "lack tensors: model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_weights_that_lack_a_part_are_refused(form: str, left_out: str, why: str, tmp_path: Path) -> None:
    save_quantized("olmo2", form, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[left_out]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=why):
        Bench(config_of(tmp_path))
