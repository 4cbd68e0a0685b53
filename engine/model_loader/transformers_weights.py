"""Loads transformers' causal language model with its weights: from safetensors files, or made up from a seed.

We read the files ourselves, exactly those that the weights' digest covers: transformers would choose files itself, and
would read pickled ones that an index names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES
from engine.model_loader.folder import opening
from engine.model_loader.mxfp4 import check_all, widen_all
from engine.model_loader.narrow_products import Kept, made_up, split_checkpoint
from engine.model_loader.weights import SafetensorsWeights, Weights, open_checkpoint
from engine.models.stored_weights import AS_STORED, is_mxfp4
from engine.models.transformers_attention import PAGED
from engine.models.transformers_experts import FourBitExperts, WithFourBitExperts, with_four_bit_experts
from engine.models.transformers_probe import MAKING, causal_lm_config, model_without_weights


class Loaded(NamedTuple):
    causal_lm: Any
    kept: Kept
    """Weights of modules that hold nothing yet."""


def load_causal_lm(config: EngineConfig, narrow: Weights | None, *, keeps_four_bits: bool) -> Loaded:
    """Load the model in the engine's dtype, with our attention: onto the device, or into host memory if products have 8
    or 4 bits, or if ranks will each keep a part. Raises `ValueError` if files and config.json do not fit; transformers
    itself would make up missing weights.

    `narrow`: the weights, in host memory, if the checkpoint has them in 8 or 4 bits. `keeps_four_bits`: experts in
    MXFP4 stay so, in our own modules (engine/models/transformers_experts.py); otherwise they are dequantised."""
    model, device = config.model, config.device.device
    hf_config = causal_lm_config(model.hf_config)
    arguments = {"attn_implementation": PAGED, "dtype": TORCH_DTYPES[model.dtype]}
    keeps_four_bits = keeps_four_bits and is_mxfp4(model.hf_config)
    kept = Kept({}, {})
    if config.load.load_format != "dummy":
        if isinstance(narrow, SafetensorsWeights):
            tensors, kept = split_checkpoint(narrow, model_without_weights(hf_config))
        else:
            tensors = _tensors_of(model.path)
    with MAKING, _progress_where_it_is_seen(), _errors_as_values(str(model.path)):
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
        if keeps_four_bits:
            model_class = with_four_bit_experts(model_class)
        if config.load.load_format == "dummy":
            with torch.random.fork_rng(_devices_of(device)), torch.device(device), _told_of_errors_alone():
                torch.manual_seed(config.load.seed)
                causal_lm = _made_up(model_class, hf_config, arguments, device)
            if narrow is not None and model.quantization == AS_STORED:
                kept = made_up(narrow, causal_lm)
        else:
            if is_mxfp4(model.hf_config):
                check_all(tensors)
                if not keeps_four_bits:
                    tensors = widen_all(tensors, dtype=TORCH_DTYPES[model.dtype], device=device)
            is_whole = model.quantization == "none" and config.parallel.tensor_parallel_size == 1
            goes_to = device if is_whole else "cpu"
            causal_lm, loaded = _loaded(model_class, hf_config, tensors, arguments, goes_to)
            _check_all_fits(str(model.path), loaded)
    return Loaded(causal_lm.eval().requires_grad_(False), kept)


def _devices_of(device: str) -> list[int]:
    """The GPU, whose random numbers are drawn; empty: none."""
    return [] if device == "cpu" else [torch.cuda.current_device()]


def _made_up(model_class: Any, hf_config: Any, arguments: dict[str, Any], device: str) -> Any:
    """A model with weights that transformers makes up; weights in 4 bits are made up here."""
    if not issubclass(model_class, WithFourBitExperts):
        return model_class._from_config(hf_config, **arguments)
    # Create it without weights first: the plain experts that 4-bit ones replace would take four times the memory.
    causal_lm, _ = _loaded(model_class, hf_config, {}, arguments, device)
    for module in causal_lm.modules():
        if isinstance(module, FourBitExperts):
            module.make_up_weights()
    return causal_lm


def _loaded(
    model_class: Any, hf_config: Any, tensors: dict[str, torch.Tensor], arguments: dict[str, Any], device: str
) -> tuple[Any, dict[str, Any]]:
    """Load a model. Returns it with transformers' loading info."""
    causal_lm, loaded = model_class.from_pretrained(
        None,
        config=hf_config,
        state_dict=tensors,
        output_loading_info=True,
        device_map=device,  # requires accelerate
        ignore_mismatched_sizes=True,  # `_check_all_fits` reports them in our words
        trust_remote_code=False,
        **arguments,
    )
    return causal_lm, loaded


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the files, which are memory-mapped."""
    tensors: dict[str, torch.Tensor] = {}
    for path, file in open_checkpoint(folder, "cpu").items():
        with opening(path):
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def _check_all_fits(folder: str, loaded: dict[str, Any]) -> None:
    """`loaded`: transformers' loading info."""
    for key, says in (
        ("missing_keys", "lack tensors"),
        ("unexpected_keys", "hold tensors that the architecture does not use"),
        ("mismatched_keys", "do not fit config.json in the shapes of"),
        ("conversion_errors", "could not be brought into the architecture's form"),
        ("error_msgs", "could not be read"),
    ):
        found = loaded.get(key)
        if found:
            some = ", ".join(sorted(str(each[0] if isinstance(each, tuple) else each) for each in found)[:5])
            raise ValueError(f"the weights in {folder} {says}: {some}")


@contextmanager
def _progress_where_it_is_seen() -> Iterator[None]:
    """Show progress bars only on a terminal. transformers' switch affects the whole process."""
    is_on = transformers.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_on:
            transformers.logging.enable_progress_bar()


@contextmanager
def _told_of_errors_alone() -> Iterator[None]:
    """Silence transformers' warnings of missing weights, which all are if they are made up. This switch, too, affects
    the whole process."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@contextmanager
def _errors_as_values(folder: str) -> Iterator[None]:
    """Turn whatever transformers' code raises into `ValueError`, except `torch.OutOfMemoryError`."""
    try:
        yield
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{folder}: transformers' code cannot make this model: {type(error).__name__}: {line}"
        ) from error
