"""Finds, describes and loads a model.

    name, folder, .gguf file or hub id ──resolve_model──> folder
    EngineArgs ──create_engine_config──> EngineConfig ──load_model──> Model

A folder has Hugging Face's layout: config.json, safetensors (one file or sharded), tokenizer.json. Finding a model does
not import torch, which takes a second, and only a conversion imports transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cache_dir import default_download_dir, report
from engine.config import EngineConfig
from engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from engine.attention import PagedBackend
    from engine.layers import MakeLinear
    from engine.model_loader.weights import Weights
    from engine.models import DecoderConfig, ModelShape
    from engine.models.model import Model
    from engine.models.parts import Parts
    from engine.models.recurrent_states import RecurrentStates
    from engine.models.transformers_config import TransformersConfig
    from engine.models.transformers_model import TransformersModel
    from engine.tensor_parallel.group import RankGroup
    from engine.weight_cut import CutOf

__all__ = ["create_engine_config", "load_model", "resolve_model"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.jinja")
"""Besides weights."""


def create_engine_config(args: EngineArgs) -> EngineConfig:
    """Resolve all defaults of `args`. May download and convert the model, with progress on stderr.

    Raises `ValueError` that names the field and its bound, or says what the model lacks.
    """
    from engine.model_loader.draft_config import with_draft_model
    from engine.model_loader.model_config import make_engine_config
    from engine.model_loader.settings import draft_model_of

    config = make_engine_config(args, resolve_model(args.model))
    draft_model = draft_model_of(args)
    return with_draft_model(config, args, resolve_model(draft_model)) if draft_model else config


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


def load_model(config: EngineConfig, backend: PagedBackend[Any], group: RankGroup | None = None) -> Model:
    """Load the model's weights onto the device; `backend` does its attention. `group`: load this rank's share only.

    Raises `ValueError` if weights and config.json do not fit.
    """
    from engine.models import DecoderConfig, load_model_shape
    from engine.models.decoder import Decoder

    shape = load_model_shape(config.model.hf_config, config.model.model_impl)
    parts = _parts_of(config, config.model.quantization)
    if isinstance(shape, DecoderConfig):
        weights = _weights_of(config, config.device.device)
        if config.lora_modules or config.lora_room.num:
            parts = _adapted(config, parts, _cuts_of(shape, group))
        if group is not None:
            from engine.tensor_parallel.sharing import shared_out

            shape, weights, parts = shared_out(shape, weights, parts, group)
        return Decoder(shape, weights, backend, config.model.max_model_len, parts)
    return _load_transformers_model(config, shape, backend, parts)


def _cuts_of(shape: DecoderConfig, group: RankGroup | None) -> CutOf:
    """This rank's part of each product."""
    from engine.weight_cut import uncut

    if group is None:
        return uncut
    from engine.tensor_parallel.sharing import cuts_of

    return cuts_of(shape, group)


def _adapted(config: EngineConfig, parts: Parts, cut_of: CutOf) -> Parts:
    """Add the engine's adapters to `parts`. `cut_of`: this rank's part of each product, and so of each adapter."""
    modules, room = config.lora_modules, config.lora_room
    dtype, device = config.model.dtype, config.device.device
    if config.device.attention_backend == "cpu":
        from engine.kernels.cpu_adapters import with_adapters

        return with_adapters(parts, modules, cut_of, room)
    if config.device.uses_triton:
        from engine.kernels.gpu.adapters import TritonAdapters

        return replace(parts, adapters=TritonAdapters(modules, dtype, device, cut_of, room))
    from engine.lora.adapters import Adapters

    plain = _parts_of(config, "none").linear  # adapters' weights are never quantised
    return replace(parts, adapters=Adapters(modules, dtype, device, plain, cut_of, room))


def _load_transformers_model(
    config: EngineConfig, shape: ModelShape, backend: PagedBackend[Any], parts: Parts
) -> TransformersModel:
    from engine.attention import AttentionBackend
    from engine.model_loader.transformers_weights import load_causal_lm
    from engine.models.replaced_experts import replace_experts
    from engine.models.stored_weights import StoredWeights, is_mxfp4
    from engine.models.transformers_config import TransformersConfig
    from engine.models.transformers_model import TransformersModel
    from engine.models.transformers_products import OurProducts, replace_products

    assert isinstance(shape, TransformersConfig)
    assert isinstance(backend, AttentionBackend)
    hf_config = config.model.hf_config
    is_narrow = not is_mxfp4(hf_config) and StoredWeights.from_hf(hf_config).quantizations
    narrow = _weights_of(config, "cpu") if is_narrow else None
    causal_lm, kept = load_causal_lm(config, narrow, keeps_four_bits=parts.four_bit_experts is not None)
    products = OurProducts(_linear_of(config, parts), parts.lm_head, narrow=parts.linear)
    replace_experts(causal_lm, parts, config.model.quantization, kept.experts, config.device.device)
    replace_products(causal_lm, products, kept.products, config.device.device)
    return TransformersModel(shape, causal_lm, backend, parts, _states_of(config, shape))


def _linear_of(config: EngineConfig, parts: Parts) -> Callable[[int, int], MakeLinear]:
    """Which part computes a product of these outputs and inputs."""
    from engine.quantization_choice import quantizes

    quantization = config.model.quantization
    plain = _parts_of(config, "none").linear
    return lambda outputs, inputs: parts.linear if quantizes(quantization, outputs, inputs) else plain


def _states_of(config: EngineConfig, shape: TransformersConfig) -> RecurrentStates | None:
    from engine.kv_cache import TORCH_DTYPES
    from engine.kv_shape import kv_cache_shape, num_state_blocks_of
    from engine.models.recurrent_states import RecurrentStates

    if not shape.recurrent_layers:
        return None
    cache = config.cache
    block = kv_cache_shape(config.model, num_blocks=1, block_size=cache.block_size, kv_dtype=cache.kv_dtype)
    return RecurrentStates(
        shape.recurrent_layers,
        config.scheduler.max_num_seqs,
        num_state_blocks_of(config.model.recurrent_bytes, block.pool_bytes) * block.pool_bytes,
        TORCH_DTYPES[config.model.dtype],
        config.device.device,
    )


def _weights_of(config: EngineConfig, device: str) -> Weights:
    from engine.model_loader.eight_bit_weights import DummyEightBitWeights, EightBitWeights
    from engine.model_loader.int4_weights import DummyInt4Weights, Int4Weights
    from engine.model_loader.weights import DummyWeights, SafetensorsWeights
    from engine.models.stored_weights import AS_STORED, StoredWeights

    model = config.model
    stored = StoredWeights.from_hf(model.hf_config)
    if config.load.load_format == "dummy":
        if model.quantization == AS_STORED:
            made_up = DummyInt4Weights if stored.packing else DummyEightBitWeights
            return made_up(config.load.seed, model.dtype, device, stored)
        return DummyWeights(config.load.seed, model.dtype, device)
    if not stored.quantizations:
        return SafetensorsWeights(model.path, model.dtype, device)
    kept = Int4Weights if stored.packing else EightBitWeights
    return kept(model.path, model.dtype, device, stored, model.quantization)


def _parts_of(config: EngineConfig, quantization: str) -> Parts:
    """The decoder's parts for the device. `quantization`: of layers' products, resolved."""
    from engine.models.parts import PLAIN_PARTS
    from engine.quantization import QUANTIZED_LINEARS

    if config.device.attention_backend == "cpu":
        from engine.kernels.cpu import KERNEL_PARTS, QUANTIZED_KERNEL_PARTS

        return QUANTIZED_KERNEL_PARTS.get(quantization, KERNEL_PARTS)
    parts, linears = PLAIN_PARTS, QUANTIZED_LINEARS
    if config.device.uses_triton:
        from engine.kernels.gpu.parts import TRITON_PARTS, TRITON_QUANTIZED_LINEARS

        parts, linears = TRITON_PARTS, TRITON_QUANTIZED_LINEARS
        if config.device.batch_invariant:
            from engine.kernels.gpu.invariant_parts import INVARIANT_PARTS, INVARIANT_QUANTIZED_LINEARS

            parts, linears = INVARIANT_PARTS, INVARIANT_QUANTIZED_LINEARS
    return parts if quantization == "none" else parts.with_products(linears.of(quantization))
