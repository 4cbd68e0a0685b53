"""Attention backends: the interface (base.py), the choice of one for an engine (choice.py), and creating it (here).

              keys and values of heads                    latents (DeepSeek)                        both
torch         torch_backend.py                            torch_latents.py, torch_unfolded.py       paged_groups.py
cpu           cpu_backend.py                              cpu_latents.py
triton        triton_backend.py, triton_invariant.py      triton_latents.py, triton_unfolded.py     triton_plans.py
flash_attn    flash_backend.py, or triton_flash.py with Triton; flash_calls.py: the libraries

shaped_backend.py    a backend for each shape of heads, where a model's layers differ
latent_forms.py      which sequences unfold their latents to keys and values; unfolded_slices.py: how many at once
step_arrays.py       a step's arrays in one copy to the device
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.attention.base import AttentionBackend, LatentBackend, Needs, PagedBackend, StepLayout
from engine.attention.choice import (
    choose_attention_backend,
    uses_triton_kernels,
    why_no_graphs,
    why_no_kernels,
    why_not_invariant,
)
from engine.attention.cpu_backend import CpuAttention
from engine.attention.cpu_latents import CpuLatentAttention
from engine.attention.flash_backend import FlashAttention
from engine.attention.flash_calls import load_flash_calls
from engine.attention.latent_forms import Unfolding
from engine.attention.shaped_backend import ShapedAttention
from engine.attention.torch_backend import TorchAttention
from engine.attention.torch_latents import TorchLatentAttention
from engine.config import EngineConfig
from engine.kernels.build import load_cpu_kernels
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kv_cache import KV_ORDER, LATENT_KV_ORDER, PAIRED_KV_ORDER, PAIRED_LATENT_KV_ORDER
from engine.models.deepseek_config import LatentConfig
from engine.models.head_shape import HeadShape
from engine.models.model_shape import ModelShape

__all__ = [
    "AttentionBackend",
    "LatentBackend",
    "Needs",
    "PagedBackend",
    "StepLayout",
    "choose_attention_backend",
    "create_attention_backend",
    "kv_order_of",
    "uses_triton_kernels",
    "why_no_graphs",
    "why_no_kernels",
    "why_not_invariant",
]


def kv_order_of(backend: str, model: ModelShape) -> str:
    if model.mla is not None:
        return PAIRED_LATENT_KV_ORDER if backend == "cpu" else LATENT_KV_ORDER
    return PAIRED_KV_ORDER if backend == "cpu" else KV_ORDER


def create_attention_backend(config: EngineConfig) -> PagedBackend[Any]:
    """Create `config.device.attention_backend`. Raises `KernelsUnavailable`, `FlashUnavailable`."""
    if config.model.head_shapes:
        return ShapedAttention(
            {shape: _create_backend(_with_heads(config, shape)) for shape in dict.fromkeys(config.model.head_shapes)},
            config.cache.block_size,
        )
    if config.model.mla is not None:
        return _create_latent_backend(config, config.model.mla)
    return _create_backend(config)


def _with_heads(config: EngineConfig, shape: HeadShape) -> EngineConfig:
    return replace(config, model=replace(config.model, **shape._asdict(), head_shapes=()))


def _create_backend(config: EngineConfig) -> AttentionBackend[Any]:
    if config.device.attention_backend == "cpu":
        load_cpu_kernels()
        return CpuAttention()
    # Triton may not be installed: nothing of it is imported earlier.
    if config.device.attention_backend == "triton":
        from engine.attention.triton_backend import TritonAttention
        from engine.attention.triton_invariant import InvariantTritonAttention

        if config.device.batch_invariant:
            return InvariantTritonAttention(**_triton_arguments(config))
        return TritonAttention(**_triton_arguments(config))
    if config.device.attention_backend == "torch":
        return TorchAttention(**_sizes(config))
    assert config.device.attention_backend == "flash_attn"
    device = config.device.device
    calls = load_flash_calls(
        device=device,
        dtype=config.model.dtype,
        kv_dtype=config.cache.kv_dtype,
        head_dim=config.model.head_dim,
        block_size=config.cache.block_size,
    )
    if config.device.uses_triton:
        from engine.attention.triton_backend import TritonAttention
        from engine.attention.triton_flash import TritonFlashAttention

        return TritonFlashAttention(TritonAttention(**_triton_arguments(config)), calls, device)
    return FlashAttention(TorchAttention(**_sizes(config)), calls, device)


def _sizes(config: EngineConfig) -> dict[str, Any]:
    return {
        "num_heads": config.model.num_heads,
        "num_kv_heads": config.model.num_kv_heads,
        "head_dim": config.model.head_dim,
        "block_size": config.cache.block_size,
        "device": config.device.device,
    }


def _triton_arguments(config: EngineConfig) -> dict[str, Any]:
    kind = gpu_kind(config.device.device)
    return _sizes(config) | {"kind": kind, "dtype": config.model.dtype, "kv_dtype": config.cache.kv_dtype}


def _create_latent_backend(config: EngineConfig, mla: LatentConfig) -> LatentBackend[Any]:
    model = config.model
    if config.device.attention_backend == "cpu":
        load_cpu_kernels()
        return CpuLatentAttention()
    unfolding = Unfolding.of(mla)
    if config.device.attention_backend == "triton":
        from engine.attention.triton_latents import TritonLatentAttention

        return TritonLatentAttention(
            kind=gpu_kind(config.device.device),
            num_heads=model.num_heads,
            kv_lora_rank=mla.kv_lora_rank,
            block_size=config.cache.block_size,
            dtype=model.dtype,
            kv_dtype=config.cache.kv_dtype,
            device=config.device.device,
            batch_invariant=config.device.batch_invariant,
            unfolding=unfolding,
        )
    return TorchLatentAttention(
        kv_lora_rank=mla.kv_lora_rank,
        latent_dim=model.head_dim,
        block_size=config.cache.block_size,
        device=config.device.device,
        unfolding=unfolding,
    )
