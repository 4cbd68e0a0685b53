"""Attention backends, and which one an engine gets."""

from __future__ import annotations

from typing import Any

from engine.attention.base import AttentionBackend, LatentBackend, PagedBackend, StepLayout
from engine.attention.cpu_backend import CpuAttention
from engine.attention.torch_backend import TorchAttention
from engine.attention.torch_latents import TorchLatentAttention
from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels
from engine.kernels.gpu import why_no_triton
from engine.kv_cache import KV_ORDER, LATENT_KV_ORDER, PAIRED_KV_ORDER
from engine.models.decoder_config import DecoderConfig

__all__ = [
    "AttentionBackend",
    "LatentBackend",
    "PagedBackend",
    "StepLayout",
    "choose_attention_backend",
    "create_attention_backend",
    "kv_order_of",
]


def choose_attention_backend(
    name: str,
    *,
    device: str,
    dtype: str,
    block_size: int,
    model: DecoderConfig,
    quantization: str = "none",
    kv_dtype: str = "",
    capability: tuple[int, int] | None = None,
) -> str:
    """The backend behind `name`; "auto" is the fastest one that works here, and says so where it is not the usual one.

    `kv_dtype`: of the pool, where it is not `dtype`. `capability`: the GPU's, None without one. May compile the CPU
    kernels. Raises `ValueError` where the backend that was asked for cannot work.
    """
    if name == "torch":
        return name
    kv_dtype = kv_dtype or dtype
    if name == "triton" or (name == "auto" and device != "cpu"):
        return _triton_or_torch(name, device, model, kv_dtype, capability)
    why_not = CpuAttention.why_not(
        device=device,
        dtype=dtype,
        block_size=block_size,
        head_dim=model.head_dim,
        num_groups=model.num_heads // model.num_kv_heads,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        quantization=quantization,
        kv_dtype=kv_dtype,
        has_latents=model.mla is not None,
    )
    if not why_not:
        try:
            load_cpu_kernels()
            return "cpu"
        except KernelsUnavailable as error:
            why_not = str(error)
            if name == "auto":
                report(
                    "no CPU kernels, so that plain torch computes, several times slower, and where two tokens are "
                    f"nearly as likely an answer may depend on the batch: {error}"
                )
    if name == "auto":
        if quantization != "none" or kv_dtype != dtype:
            report(f"plain torch computes, several times slower than the CPU kernels: {why_not}")
        return "torch"
    raise ValueError(f"attention_backend cpu cannot work here: {why_not}; give auto or torch")


def _triton_or_torch(
    name: str, device: str, model: DecoderConfig, kv_dtype: str, capability: tuple[int, int] | None
) -> str:
    why_not = why_no_triton(device)
    if not why_not and model.mla is not None:
        # Not before it is known that Triton is there.
        from engine.attention.triton_latents import TritonLatentAttention

        why_not = TritonLatentAttention.why_not(
            kv_lora_rank=model.mla.kv_lora_rank,
            rotated_dim=model.mla.qk_rope_head_dim,
            hidden_size=model.hidden_size,
            kv_dtype=kv_dtype,
            capability=capability,
        )
    elif not why_not:
        from engine.attention.triton_backend import TritonAttention

        why_not = TritonAttention.why_not(
            head_dim=model.head_dim,
            num_groups=model.num_heads // model.num_kv_heads,
            hidden_size=model.hidden_size,
            kv_dtype=kv_dtype,
            capability=capability,
        )
    if not why_not:
        return "triton"
    if name == "auto":
        report(f"no Triton kernels, so that plain torch computes, several times slower: {why_not}")
        return "torch"
    raise ValueError(f"attention_backend triton cannot work here: {why_not}; give auto or torch")


def kv_order_of(backend: str, model: DecoderConfig) -> str:
    if model.mla is not None:
        return LATENT_KV_ORDER
    return PAIRED_KV_ORDER if backend == "cpu" else KV_ORDER


def create_attention_backend(config: EngineConfig) -> PagedBackend[Any]:
    """The backend that `config.device.attention_backend` names. Raises `KernelsUnavailable`."""
    if config.model.kv_lora_rank:
        return _create_latent_backend(config)
    if config.device.attention_backend == "cpu":
        load_cpu_kernels()
        return CpuAttention(head_dim=config.model.head_dim)
    if config.device.attention_backend == "triton":
        from engine.attention.triton_backend import TritonAttention

        return TritonAttention(
            num_heads=config.model.num_heads,
            num_kv_heads=config.model.num_kv_heads,
            head_dim=config.model.head_dim,
            block_size=config.cache.block_size,
            dtype=config.model.dtype,
            kv_dtype=config.cache.kv_dtype,
            device=config.device.device,
        )
    return TorchAttention(
        num_heads=config.model.num_heads,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        block_size=config.cache.block_size,
        device=config.device.device,
    )


def _create_latent_backend(config: EngineConfig) -> LatentBackend[Any]:
    if config.device.attention_backend == "triton":
        from engine.attention.triton_latents import TritonLatentAttention

        return TritonLatentAttention(
            num_heads=config.model.num_heads,
            kv_lora_rank=config.model.kv_lora_rank,
            block_size=config.cache.block_size,
            dtype=config.model.dtype,
            kv_dtype=config.cache.kv_dtype,
            device=config.device.device,
        )
    return TorchLatentAttention(
        kv_lora_rank=config.model.kv_lora_rank,
        latent_dim=config.model.head_dim,
        block_size=config.cache.block_size,
        device=config.device.device,
    )
