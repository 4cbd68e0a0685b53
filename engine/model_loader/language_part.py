"""The language model of a checkpoint for text and images, which is served as if it were the whole checkpoint.

    config.json ──read_config──> config.json of the language model alone
    tensors' names ──LanguageTensors──> their names in a checkpoint of the language model alone; others are left out

Without an image, such a checkpoint computes what its language model computes. Tests show that for each of `WHOLES`, so
no others are served: some attend to a whole prompt at once (PaliGemma), or have layers for images alone (Mllama).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from engine.model_loader.folder import names_in, read_json, safetensors_files

WHOLES = frozenset({
    "gemma3", "gemma4", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "smolvlm",
})  # fmt: skip
"""`model_type` of checkpoints for text and images of which the text is served."""
SAME_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Language models that transformers has for images only, and the one that computes the same for text. They rotate by a
token's time, height and width, which for text are its position."""
ROTATIONS_BY_PLACE = frozenset({"mrope_section", "mrope_interleaved"})
BODY, HEAD = "embed_tokens.weight", "lm_head."
OF_THE_WHOLE = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id")
"""Fields of config.json that hold for the language model, whatever its part says."""


class Tensors(Protocol):
    """An open safetensors file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Any: ...


def read_config(folder: Path, load_format: str) -> dict[str, Any]:
    """Read config.json; for a checkpoint of `WHOLES`, what it would say of the language model alone. Raises
    `ValueError` if it is no JSON object, if transformers refuses it, or for another checkpoint of more than text.
    `load_format`: with "dummy", the folder need not hold the weights."""
    config = read_json(folder / "config.json")
    if not is_whole(config):
        _check_is_language_model(config)
        return config
    part = _language_config(config)
    try:  # families disagree about the default of this field
        part["tie_word_embeddings"] = not any(HEAD in name for name in names_in(safetensors_files(folder)))
    except ValueError:
        if load_format != "dummy":
            raise
    return part


def _check_is_language_model(config: dict[str, Any]) -> None:
    if isinstance(config.get("text_config"), dict):
        raise ValueError(
            f"config.json: model_type {config.get('model_type')!r} is more than a language model. Of such models only "
            f"the text is served, and only of {', '.join(sorted(WHOLES))}"
        )


def is_whole(config: dict[str, Any]) -> bool:
    """Whether config.json is that of one of `WHOLES`."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in WHOLES


def _language_config(config: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        # Each family has its own defaults for what config.json leaves out, and its own older spellings.
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        part = json.loads(whole.get_text_config(decoder=True).to_json_string(use_diff=False))
    except Exception as error:  # whatever its checks raise
        raise ValueError(f"config.json: transformers refuses it: {error}") from error
    part["model_type"] = SAME_AS.get(part["model_type"], part["model_type"])
    part["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(part["model_type"])]
    part["tie_word_embeddings"] = whole.tie_word_embeddings
    rope = part.get("rope_parameters") or {}
    part["rope_parameters"] = {name: value for name, value in rope.items() if name not in ROTATIONS_BY_PLACE}
    if config.get("dtype") or config.get("torch_dtype"):
        part.pop("dtype", None)  # of the field's two names, the part may have one and the whole the other
        part.pop("torch_dtype", None)
    of_the_whole = {name: config[name] for name in OF_THE_WHOLE if config.get(name) is not None}
    language: dict[str, Any] = part | of_the_whole
    return language


class LanguageTensors:
    """The tensors of an open file that belong to the language model, by the names that they would have in a checkpoint
    of the language model alone."""

    def __init__(self, file: Tensors, body: str) -> None:
        """`body`: what `body_in` found in all files together."""
        self._file = file
        self._stored = {own: name for name in file.keys() if (own := _own_name(name, body))}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self._stored.keys()

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._stored[name])


def body_in(names: Iterable[str], folder: Path) -> str:
    """Return what the names of the language model's layers begin with, in place of "model.". `names`: those of all
    tensors of the checkpoint. Raises `ValueError` if that is not clear."""
    found = sorted(name for name in names if name.endswith(BODY))
    if len(found) != 1:
        raise ValueError(
            f"the weights in {folder} must hold one tensor that is named …{BODY}, by which the language model is "
            f"found; they hold {', '.join(found[:4]) or 'none'}"
        )
    return found[0].removesuffix(BODY)


def _own_name(name: str, body: str) -> str:
    """The tensor's name in a checkpoint of the language model alone; empty: it does not belong to it."""
    if name.startswith(body):
        return f"model.{name.removeprefix(body)}"
    _, head, rest = name.rpartition(HEAD)
    return head + rest if head else ""
