"""Checks an EAGLE-3 head's folder against the model that it is for. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint_methods import without_method
from engine.grains import FLOAT8_GRAIN, INT4_GROUP_SIZE, INT8_GRAIN
from engine.model_loader.folder import SINGLE_FILE, read_json, safetensors_files
from engine.models import ModelShape
from engine.models.eagle_config import ARCHITECTURES, EagleConfig, as_llama


def read_eagle_config(
    folder: Path, model: ModelShape, *, load_format: str, quantization: str
) -> tuple[EagleConfig, dict[str, Any]]:
    """Read the config of the head in `folder`: what it means for `model`, and its fields as those of a Llama. Raises
    `ValueError` if the head cannot guess for the model. `load_format`: the model's. `quantization`: the head's."""
    hf_config = as_llama(read_json(folder / "config.json"))
    without_method(quantization, hf_config)
    config = EagleConfig.from_hf(hf_config, num_layers=model.num_decoder_layers, feature_size=model.hidden_size)
    layer = config.layer
    if layer.vocab_size != model.vocab_size:
        raise ValueError(f"its vocab_size must be the model's, {model.vocab_size}, is {layer.vocab_size}")
    own, models = (layer.num_kv_heads, layer.head_dim), (model.num_kv_heads, model.head_dim)
    if model.mla is not None or model.head_shapes or own != models:
        kept = f"{models[0]} key heads of size {models[1]}"
        if model.mla is not None or model.head_shapes:
            kept = "latents" if model.mla is not None else "heads of several sizes"
        raise ValueError(
            f"its keys and values are one more layer of the model's pool, which has {kept}, and it has {own[0]} key "
            f"heads of size {own[1]}"
        )
    check_head_files(folder, load_format)
    _check_features_fit(quantization, config)
    return config, hf_config


def _check_features_fit(quantization: str, eagle: EagleConfig) -> None:
    """Raise `ValueError` if the product that makes features cannot be quantised. The layer's are checked like a
    model's; only this one has inputs that depend on the model's size."""
    num_inputs = len(eagle.feature_layers) * eagle.feature_size
    grain = {"int4": INT4_GROUP_SIZE, "int8": INT8_GRAIN, "fp8": FLOAT8_GRAIN}.get(quantization, 1)
    if num_inputs % grain:
        raise ValueError(
            f"quantization {quantization} cannot work here: what features are made from, {len(eagle.feature_layers)} "
            f"hidden states of the model, must have a size that is a multiple of {grain}, is {num_inputs}; give "
            f"{'int8 or none' if quantization == 'int4' else 'none'}"
        )


def check_head_files(folder: Path, load_format: str) -> None:
    """Raise `ValueError` if the head's weights are missing, or pickled, as the authors' are. With transformers' code,
    which converts models, a head would lose what a Llama lacks. `load_format`: the model's."""
    if load_format == "dummy":
        return
    try:
        safetensors_files(folder)
    except ValueError:
        pickled = folder / "pytorch_model.bin"
        if not pickled.is_file():
            raise
        raise ValueError(
            f"{folder} has pickled weights ({pickled.name}), which are not read; convert them to safetensors: "
            'python -c "from safetensors.torch import save_file; from torch import load; '
            f"save_file({{k: v.clone() for k, v in load({str(pickled)!r}, weights_only=True).items()}}, "
            f'{str(folder / SINGLE_FILE)!r})"'
        ) from None


def check_is_no_head(hf_config: dict[str, Any]) -> None:
    """Raise `ValueError` if config.json is that of an EAGLE-3 head, which cannot be a draft model."""
    names = hf_config.get("architectures")
    if isinstance(names, list) and any(name in ARCHITECTURES for name in names):
        raise ValueError("it is an EAGLE-3 head: give the method 'eagle3'")
