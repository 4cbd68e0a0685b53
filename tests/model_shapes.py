"""The shape of a model, for tests that need nothing else of it."""

from __future__ import annotations

from typing import Any

from engine.models.model_shape import ModelShape

LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    "max_positions": 131_072,
}  # fmt: skip


def shape_of(**change: Any) -> ModelShape:
    """Return Llama-3.1-8B's shape with `change` applied."""
    return ModelShape(**LLAMA_8B | change)
