"""Attention backends, and which one an engine gets."""

from __future__ import annotations

from typing import Any

from engine.attention.base import AttentionBackend, StepLayout
from engine.config import EngineConfig

__all__ = ["AttentionBackend", "StepLayout", "create_attention_backend"]


def create_attention_backend(config: EngineConfig) -> AttentionBackend[Any]:
    """The backend that `config.device.attention_backend` names; "auto": the fastest one for the device.

    Raises `ValueError` for a name that is not known.
    """
    name = config.device.attention_backend
    if name in ("auto", "torch"):
        from engine.attention.torch_backend import TorchAttention

        return TorchAttention(
            num_heads=config.model.num_heads,
            num_kv_heads=config.model.num_kv_heads,
            head_dim=config.model.head_dim,
            block_size=config.cache.block_size,
            device=config.device.device,
        )
    raise ValueError(f"attention_backend must be auto or torch, is {name!r}")
