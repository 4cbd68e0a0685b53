"""Converts a GGUF file to a Hugging Face folder: config.json, safetensors, tokenizer, chat template. Weights become
bfloat16, or, for a file that the user names, stay in 4 bits if they are (gguf_int4.py).

This is done once per file. transformers reads the file (tensors, their order, tokenizer). Only the conversion imports
it, which takes seconds that a start from a converted folder saves.
"""

from __future__ import annotations

import functools
import gc
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from engine.cache_dir import build_once, report
from engine.models.stored_weights import OWN

FORM = "v3"
"""Version of converted folders: increased when their content changes."""
_TOKENIZER_FIELDS_OF_THIS_MACHINE = ("is_local", "local_files_only")


def convert_gguf_file(gguf_file: Path, download_dir: Path) -> Path:
    """Return the converted folder of `gguf_file`, which is named after the file and its content; converts if
    missing."""
    digest = xxhash.xxh3_64()
    with gguf_file.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    name = f"{gguf_file.stem}-{digest.hexdigest()}-{FORM}"
    try:
        return build_once(download_dir, name, lambda folder: convert_gguf(gguf_file, folder, keeps_int4=True))
    except OSError as error:
        raise ValueError(f"{gguf_file} cannot be converted: {download_dir} cannot be written: {error}") from error


def convert_gguf(gguf_file: Path, folder: Path, *, keeps_int4: bool = False) -> None:
    """Write the model of `gguf_file` into the existing `folder`. `keeps_int4`: layers' products in 4 bits stay so, in
    models that our own decoder computes.

    Raises `ValueError` if transformers cannot read the file.
    """
    report(f"converting {gguf_file.name} to safetensors (once; takes about a quarter of a minute)")
    import torch
    import transformers

    place = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        with _read_once(), _collector_at_rest():
            # Without `dequantize` the weights stay in GGUF's blocks, which cannot be saved.
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                **place, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
            )  # fmt: skip
            _check_whole(loading["missing_keys"])
            tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
            tensors = model.state_dict()
            rope = _check_ours(gguf_file, model, tensors)
            in_4_bits = _keep_int4(gguf_file, model, tensors) if keeps_int4 else {}
    except (ValueError, KeyError, NotImplementedError, RuntimeError, OSError, struct.error) as error:
        raise ValueError(f"{gguf_file} cannot be converted: {error}") from error
    report("writing model.safetensors and tokenizer.json")
    try:
        model.save_pretrained(folder, state_dict=tensors)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{gguf_file} cannot be converted: {folder} cannot be written: {error}") from error
    _edit_json(folder / "config.json", drop=("quantization_config", "_name_or_path", "_model_name_or_path"))
    if rope:
        _edit_json(folder / "config.json", add={"rope_parameters": model.config.rope_parameters | rope})
    if in_4_bits:
        _edit_json(folder / "config.json", add={"quantization_config": in_4_bits})
    _edit_json(folder / "tokenizer_config.json", drop=_TOKENIZER_FIELDS_OF_THIS_MACHINE)
    eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text()) if generation.is_file() else {}
    if settings.get("eos_token_id") is None and eos is not None:
        generation.write_text(json.dumps(settings | {"eos_token_id": eos}, indent=2) + "\n")


def _check_whole(missing: Iterable[str]) -> None:
    """Raise `ValueError` if weights are missing, which transformers would make up."""
    names = sorted(missing)
    if names:
        raise ValueError(
            f"it lacks {len(names)} tensors of the model, such as {', '.join(names[:3])}; merge a file that was split "
            "(llama-gguf-split --merge), or give a Hugging Face folder"
        )


def _check_ours(gguf_file: Path, model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json's `rope_parameters` lack, for a model that our own decoder computes. Raises `ValueError`
    if transformers has left something else out."""
    import gguf

    from engine.model_loader.gguf_left_out import check_biases_taken, rope_scaling

    if not _is_ours(model):
        return {}
    reader = gguf.GGUFReader(str(gguf_file))
    check_biases_taken(reader, tensors, model.config.num_hidden_layers)
    return rope_scaling(reader, model.config.rope_parameters["rope_theta"])


def _is_ours(model: Any) -> bool:
    from engine.models import ARCHITECTURES

    return type(model).__name__ in ARCHITECTURES


def _keep_int4(gguf_file: Path, model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Replace `tensors` by weights in 4 bits where possible, and return the `quantization_config` for config.json.
    Empty if there are none, as always in a model that transformers' code computes, which has no product for them."""
    import gguf

    from engine.model_loader.gguf_int4 import GROUP_SIZE, keep_int4

    if not _is_ours(model):
        return {}
    num_kept = keep_int4(gguf.GGUFReader(str(gguf_file)), tensors, model.config.num_hidden_layers)
    if not num_kept:
        return {}
    report(f"{num_kept} weights stay in 4 bits, as they are in the file")
    return {"quant_method": OWN, "group_size": GROUP_SIZE}


@contextmanager
def _read_once() -> Iterator[None]:
    """Cache GGUF readers within this context. transformers opens the file for the config, the weights and the
    tokenizer, and each time reads its vocabulary word by word, which takes a quarter of the conversion."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Stop garbage collection: a vocabulary is millions of live objects, and traversing them takes another quarter."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _edit_json(path: Path, *, drop: tuple[str, ...] = (), add: dict[str, Any] | None = None) -> None:
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | (add or {}), indent=2) + "\n")
