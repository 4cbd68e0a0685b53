"""Checkpoints for text and images, of which the language model is served: its logits are those of transformers' whole
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import SMALL, Bench, assert_close, engine_config, random_tokens, randomise, reference
from recurrent_cases import DELTA, EXPERTS
from safetensors.torch import load_file, save_file

from engine.model_loader.language_part import WHOLES
from router.model_info import ModelInfo

pytestmark = pytest.mark.usefixtures("one_thread")

SIGHT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SIGHT_OF_QWEN = {"depth": 1, "num_heads": 2, "patch_size": 8, "out_hidden_size": 48, "hidden_size": 16}
CLIP, SIGLIP, PIXTRAL = (
    {"model_type": name} | SIGHT for name in ("clip_vision_model", "siglip_vision_model", "pixtral")
)


def text(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type} | SMALL | more


def rotated(sections: list[int], **more: Any) -> dict[str, Any]:
    """Rotary parameters: of each half of a head, so many pairs are rotated by time, height and width."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections} | more


PARTLY = {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (text("gemma3_text", head_dim=16, sliding_window=8, query_pre_attn_scalar=24), SIGHT),
    "gemma4": (
        text(
            "gemma4_text", head_dim=16, global_head_dim=32, sliding_window=8, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=SMALL["vocab_size"], num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        SIGHT | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "idefics3": (text("llama"), SIGHT),
    "internvl": (text("qwen2"), SIGHT | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "llava": (text("llama"), CLIP),
    "llava_next": (text("mistral"), CLIP),
    "llava_onevision": (text("qwen2"), SIGLIP),
    "mistral3": (text("mistral", head_dim=16), SIGHT | {"model_type": "pixtral", "head_dim": 8}),
    "qwen2_vl": (
        text("qwen2_vl_text", rope_parameters=rotated([2, 1, 1])),
        SIGHT_OF_QWEN | {"hidden_size": 48, "embed_dim": 16},
    ),
    "qwen2_5_vl": (
        text("qwen2_5_vl_text", rope_parameters=rotated([2, 1, 1])),
        SIGHT_OF_QWEN | {"intermediate_size": 24},
    ),
    "qwen3_5": (
        text("qwen3_5_text", head_dim=16, num_hidden_layers=4, rope_parameters=rotated([2, 1, 1], **PARTLY), **DELTA),
        SIGHT_OF_QWEN | {"intermediate_size": 24},
    ),
    "qwen3_5_moe": (
        text(
            "qwen3_5_moe_text", head_dim=16, num_hidden_layers=4, rope_parameters=rotated([2, 1, 1], **PARTLY),
            **DELTA, **EXPERTS,
        ),
        SIGHT_OF_QWEN | {"intermediate_size": 24},
    ),
    "qwen3_vl": (
        text("qwen3_vl_text", head_dim=16, rope_parameters=rotated([4, 2, 2], mrope_interleaved=True)),
        SIGHT_OF_QWEN | {"intermediate_size": 24, "deepstack_visual_indexes": [0]},
    ),
    "smolvlm": (text("llama"), SIGHT),
}  # fmt: skip
"""The language model's part of config.json, and that for images."""


def save_whole(name: str, folder: Path, **more: Any) -> Any:
    """Save a model for text and images, of random weights, as transformers does. Returns it."""
    config = transformers.AutoConfig.for_model(name, text_config=PARTS[name][0], vision_config=PARTS[name][1], **more)
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def check_logits(model: Any, folder: Path) -> None:
    bench = Bench(engine_config(folder))
    seq = bench.sequence(random_tokens(29, seed=5))
    for num_tokens in (17, 12):
        logits = bench.logits((seq, num_tokens))
    assert_close(logits, reference(model, seq.token_ids)[None])


def test_each_is_tried() -> None:
    assert set(PARTS) == WHOLES


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", sorted(PARTS))
def test_logits_are_those_of_the_whole(name: str, is_tied: bool, tmp_path: Path) -> None:
    check_logits(save_whole(name, tmp_path, tie_word_embeddings=is_tied), tmp_path)


@pytest.mark.parametrize(
    ("body", "head", "sight"),
    [
        ("language_model.model.", "language_model.lm_head.", "vision_tower."),
        ("model.language_model.", "lm_head.", "model.visual."),
        ("model.", "lm_head.", "visual."),
    ],
)
def test_tensors_are_found_by_whatever_names_they_are_stored(body: str, head: str, sight: str, tmp_path: Path) -> None:
    """Checkpoints of earlier versions of transformers have other names, and large ones several files."""
    model = save_whole("mistral3", tmp_path, tie_word_embeddings=False)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    at = next(name for name in stored if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    files: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for number, (name, tensor) in enumerate(stored.items()):
        other = head + "weight" if name.endswith("lm_head.weight") else sight + name
        files[number % 3][body + name.removeprefix(at) if name.startswith(at) else other] = tensor
    for number, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, tensors in enumerate(files) for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_logits(model, tmp_path)


def test_missing_and_doubled_embeddings_are_told(tmp_path: Path) -> None:
    save_whole("mistral3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if name.endswith("embed_tokens.weight"))
    save_file(stored | {"other.embed_tokens.weight": stored[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"must hold one tensor .* they hold {name}, other.embed_tokens.weight"):
        Bench(engine_config(tmp_path))
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"must hold one tensor .* they hold none"):
        Bench(engine_config(tmp_path))


def test_made_up_weights_need_no_files_that_an_index_names(tmp_path: Path) -> None:
    """As where all but the weights has been downloaded."""
    save_whole("gemma3", tmp_path, tie_word_embeddings=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert engine_config(tmp_path, load_format="dummy").model.hf_config["tie_word_embeddings"]
    with pytest.raises(ValueError, match="names missing"):
        engine_config(tmp_path)


def test_made_up_weights_have_a_head_of_their_own_if_the_files_do(tmp_path: Path) -> None:
    save_whole("mistral3", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not engine_config(tmp_path, load_format="dummy").model.hf_config["tie_word_embeddings"]


@pytest.mark.parametrize("model_type", [["gemma3"], {}, 3], ids=str)
def test_a_model_type_that_is_no_name_is_refused(model_type: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["Nothing"]}))
    with pytest.raises(ValueError, match=r"Nothing with model_type .* is not supported"):
        engine_config(tmp_path)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_fields_of_the_whole_hold_for_the_text(field: str, tmp_path: Path) -> None:
    """As large checkpoints have them: the quantization and the end tokens are not the text part's."""
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", field: "bfloat16",
        "eos_token_id": 5, "quantization_config": {"quant_method": "fp8"},
        "text_config": {
            "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "eos_token_id": None,
            "dtype": "float16", "rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
        "vision_config": {"model_type": "pixtral", "hidden_size": 16, "num_attention_heads": 2},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = engine_config(tmp_path, load_format="dummy", dtype="auto", num_kv_blocks=40, max_model_len=128)
    assert (made.model.dtype, made.model.eos_token_ids, made.model.model_impl) == ("bfloat16", frozenset({5}), "tandem")
    assert made.model.quantization in ("none", "stored")  # "none": widened, where there are no products in 8 bits
    assert made.model.hf_config["quantization_config"] == {"quant_method": "fp8"}


def test_a_text_part_that_leaves_out_most(tmp_path: Path) -> None:
    """Gemma 3's config.json tells only what differs from its family's defaults."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = engine_config(tmp_path, load_format="dummy", num_kv_blocks=100, max_model_len=128).model
    assert (made.num_layers, made.num_heads, made.num_kv_heads, made.head_dim) == (34, 8, 4, 256)
    assert made.eos_token_ids == {1, 106}
    assert ModelInfo.from_folder(tmp_path).vocab_size == made.vocab_size == 262208


@pytest.mark.parametrize("name", ["paligemma", "mllama", "aya_vision"])
def test_others_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "text_config": {"vocab_size": 9}}))
    with pytest.raises(
        ValueError, match=f"model_type '{name}' is more than a language model.*only of gemma3, gemma4, idefics3"
    ):
        engine_config(tmp_path)
