"""Puts a model together from its folder: weights, our parts for the device, adapters, this rank's share.

Imported where they are used: kernels, since Triton may not be installed; transformers' code and what ranks exchange,
since that takes time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.attention import AttentionBackend, PagedBackend
from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES
from engine.kv_shape import kv_cache_shape, num_state_blocks_of
from engine.lora.adapters import Adapters
from engine.model_loader.eight_bit_weights import DummyEightBitWeights, EightBitWeights
from engine.model_loader.int4_weights import DummyInt4Weights, Int4Weights
from engine.model_loader.weights import DummyWeights, SafetensorsWeights, Weights
from engine.models import DecoderConfig, ModelShape, load_model_shape
from engine.models.decoder import Decoder
from engine.models.model import FeatureSource
from engine.models.parts import PLAIN_PARTS, Parts
from engine.models.recurrent_states import RecurrentStates
from engine.models.stored_weights import AS_STORED, StoredWeights, is_mxfp4
from engine.models.transformers_config import TransformersConfig
from engine.quantization import QUANTISERS, QUANTIZED_LINEARS
from engine.quantization_choice import Size, quantizes
from engine.weight import as_it_is
from engine.weight_cut import CutOf, uncut

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel
    from engine.tensor_parallel.group import RankGroup


def load(config: EngineConfig, backend: PagedBackend[Any], group: RankGroup | None) -> FeatureSource:
    """See `engine.model_loader.load_model`."""
    shape = load_model_shape(config.model.hf_config, config.model.model_impl)
    parts = parts_of(config, config.model.quantization)
    if config.lora_modules or config.lora_room.num:
        parts = _adapted(config, parts, _cuts_of(shape, group))
    if isinstance(shape, DecoderConfig):
        weights = weights_of(config, config.device.device)
        if group is not None:
            from engine.tensor_parallel.sharing import shared_out

            shape, weights, parts = shared_out(shape, weights, parts, group)
        return Decoder(shape, weights, backend, config.model.max_model_len, parts)
    return _load_transformers_model(config, shape, backend, parts, group)


def _cuts_of(shape: ModelShape, group: RankGroup | None) -> CutOf:
    """This rank's part of each product."""
    if group is None:
        return uncut
    from engine.tensor_parallel.sharing import cuts_of
    from engine.tensor_parallel.transformers_share import TransformersShare

    if isinstance(shape, TransformersConfig):
        return TransformersShare(shape.splits, group).cut_of
    assert isinstance(shape, DecoderConfig)
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
    plain = parts_of(config, "none").linear  # adapters' weights are never quantised
    return replace(parts, adapters=Adapters(modules, dtype, device, plain, cut_of, room))


def _load_transformers_model(
    config: EngineConfig, shape: ModelShape, backend: PagedBackend[Any], parts: Parts, group: RankGroup | None
) -> TransformersModel:
    from engine.model_loader.transformers_weights import load_causal_lm
    from engine.models.recurrent_layers import siblings_in
    from engine.models.replaced_experts import replace_experts
    from engine.models.replaced_norms import replace_norms
    from engine.models.transformers_model import TransformersModel
    from engine.models.transformers_products import OurProducts, replace_products

    assert isinstance(shape, TransformersConfig)
    assert isinstance(backend, AttentionBackend)
    hf_config = config.model.hf_config
    is_narrow = not is_mxfp4(hf_config) and StoredWeights.from_hf(hf_config).quantizations
    narrow = weights_of(config, "cpu") if is_narrow else None
    causal_lm, kept = load_causal_lm(config, narrow, keeps_four_bits=parts.four_bit_experts is not None)
    lm_head, share = parts.lm_head, None
    if group is not None:
        from engine.tensor_parallel.sharing import part_of_transformers

        shape, lm_head, share = part_of_transformers(shape, parts, group)
        share.cut_experts(causal_lm, kept.experts)
    products = OurProducts(
        _parts_of_product(config, parts),
        narrow=parts,
        lm_head=lm_head,
        adapters=parts.adapters,
        adaptable=frozenset(shape.adaptable),
        siblings=(*shape.siblings, *(names for layer in shape.recurrent_layers for names in siblings_in(layer))),
        share=share,
    )
    replace_experts(causal_lm, parts, config.model.quantization, kept.experts, config.device.device)
    replace_products(causal_lm, products, kept.products, config.device.device)
    replace_norms(causal_lm, parts.rms_norm, TORCH_DTYPES[config.model.dtype])
    if share is not None:
        share.sum_experts(causal_lm)
    return TransformersModel(shape, causal_lm, backend, parts, _states_of(config, shape), share)


def _parts_of_product(config: EngineConfig, parts: Parts) -> Callable[[Size, Size], Parts]:
    """See `OurProducts.parts_of`."""
    quantization = config.model.quantization
    plain = parts_of(config, "none")
    return lambda whole, own: parts if quantizes(quantization, whole, own) else plain


def _states_of(config: EngineConfig, shape: TransformersConfig) -> RecurrentStates | None:
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
        num_copies=config.scheduler.max_kept_states,
    )


def weights_of(config: EngineConfig, device: str) -> Weights:
    """The tensors of the model's checkpoint, as it stores them, or made-up ones."""
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


def parts_of(config: EngineConfig, quantization: str) -> Parts:
    """The decoder's parts for the device. `quantization`: of layers' products, resolved."""
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
    if quantization == "none":
        return parts
    quantised = parts.with_products(linears.of(quantization))
    return replace(quantised, quantise_expert=QUANTISERS.get(quantization, as_it_is))
