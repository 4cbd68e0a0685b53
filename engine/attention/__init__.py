"""Attention backends, and which one an engine gets."""

from __future__ import annotations

from typing import Any

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.cpu_backend import CpuAttention
from engine.attention.flash_backend import FlashAttention
from engine.attention.flash_calls import FlashUnavailable, load_flash_calls
from engine.attention.torch_backend import TorchAttention
from engine.cache_dir import report
from engine.config import EngineConfig, ModelConfig
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels
from engine.kernels.gpu import why_no_triton
from engine.kv_cache import KV_ORDER, PAIRED_KV_ORDER
from engine.models.decoder_config import DecoderConfig

__all__ = [
    "AttentionBackend",
    "StepLayout",
    "choose_attention_backend",
    "create_attention_backend",
    "kv_order_of",
    "uses_triton_kernels",
    "why_no_graphs",
]


def choose_attention_backend(name: str, *, device: str, dtype: str, block_size: int, model: DecoderConfig) -> str:
    """The backend behind `name`; "auto" is the fastest one that works here, and says so where it is not the usual one.

    May compile the CPU kernels. Raises `ValueError` where the backend that was asked for cannot work.
    """
    if name == "torch":
        return name
    if name in ("triton", "flash_attn") or (name == "auto" and device != "cpu"):
        return _for_a_gpu(name, device=device, dtype=dtype, block_size=block_size, model=model)
    why_not = CpuAttention.why_not(
        device=device,
        dtype=dtype,
        block_size=block_size,
        head_dim=model.head_dim,
        num_groups=model.num_heads // model.num_kv_heads,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
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
        return "torch"
    raise ValueError(f"attention_backend cpu cannot work here: {why_not}; give auto or torch")


def _for_a_gpu(name: str, *, device: str, dtype: str, block_size: int, model: DecoderConfig) -> str:
    """Triton's kernels before FlashAttention: they take any block size, and with them goes all else that is ours."""
    why_not: dict[str, str] = {}
    if name != "flash_attn":
        why_not["triton"] = why_no_triton_kernels(device, model)
        if not why_not["triton"]:
            return "triton"
    if name != "triton":
        try:
            calls = load_flash_calls(device=device, dtype=dtype, head_dim=model.head_dim, block_size=block_size)
            if name == "auto":
                report(
                    f"no Triton kernels, so that {calls.name} does attention, and plain torch all else: "
                    f"{why_not['triton']}"
                )
            return "flash_attn"
        except FlashUnavailable as error:
            why_not["flash_attn"] = str(error)
    if name == "auto":
        report(
            f"no Triton kernels, so that plain torch computes, several times slower: {why_not['triton']}; and no "
            f"FlashAttention: {why_not['flash_attn']}"
        )
        return "torch"
    raise ValueError(f"attention_backend {name} cannot work here: {why_not[name]}; give auto or torch")


def why_no_triton_kernels(device: str, model: DecoderConfig | ModelConfig) -> str:
    """What keeps our kernels for GPUs from running `model` on `device`, as a clause; empty if nothing does."""
    why_not = why_no_triton(device)
    if why_not:
        return why_not
    # Not before it is known that Triton is there.
    from engine.attention.triton_backend import TritonAttention

    return TritonAttention.why_not(
        head_dim=model.head_dim,
        num_groups=model.num_heads // model.num_kv_heads,
        hidden_size=model.hidden_size,
    )


def uses_triton_kernels(backend: str, device: str, model: DecoderConfig | ModelConfig) -> bool:
    """Whether what surrounds attention is done by our kernels for GPUs, under a resolved `backend`."""
    return backend == "triton" or (backend == "flash_attn" and not why_no_triton_kernels(device, model))


def why_no_graphs(backend: str, *, device: str, dtype: str, block_size: int, model: DecoderConfig) -> str:
    """Why decoding steps cannot be recorded as CUDA graphs under a resolved `backend`, as a clause; empty if they
    can."""
    if device != "cuda" or not uses_triton_kernels(backend, device, model):
        return "without Triton kernels a step cannot leave rows of a graph unwritten"
    if backend == "flash_attn":
        calls = load_flash_calls(device=device, dtype=dtype, head_dim=model.head_dim, block_size=block_size)
        if not calls.is_capturable:
            return f"this version of {calls.name} waits for the device in every call"
    return ""


def kv_order_of(backend: str) -> str:
    return PAIRED_KV_ORDER if backend == "cpu" else KV_ORDER


def create_attention_backend(config: EngineConfig) -> AttentionBackend[Any]:
    """The backend that `config.device.attention_backend` names. Raises `KernelsUnavailable`, `FlashUnavailable`."""
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
            device=config.device.device,
        )
    if config.device.attention_backend == "flash_attn":
        model, device, block_size = config.model, config.device.device, config.cache.block_size
        return FlashAttention(
            calls=load_flash_calls(device=device, dtype=model.dtype, head_dim=model.head_dim, block_size=block_size),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            device=device,
            has_triton=uses_triton_kernels("flash_attn", device, model),
        )
    return TorchAttention(
        num_heads=config.model.num_heads,
        num_kv_heads=config.model.num_kv_heads,
        head_dim=config.model.head_dim,
        block_size=config.cache.block_size,
        device=config.device.device,
    )
