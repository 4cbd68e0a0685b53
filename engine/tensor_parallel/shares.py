"""What one rank computes of a model: some of the heads, some of the feed-forward. Integers only, no torch."""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder_config import DecoderConfig
from engine.models.model_shape import ModelShape


def share_of(shape: ModelShape, num_ranks: int) -> ModelShape:
    """The shape of what each of so many ranks computes. Raises `ValueError` where the model cannot be shared out so."""
    if num_ranks == 1:
        return shape
    if not isinstance(shape, DecoderConfig):
        raise ValueError("tensor_parallel_size must be 1 for models that transformers' code computes")
    if shape.mla is not None:
        raise ValueError("tensor_parallel_size must be 1 for models with latent attention")
    sizes = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
    }
    for name, size in sizes.items():
        if size % num_ranks:
            raise ValueError(f"tensor_parallel_size must divide the model's {name}={size}, is {num_ranks}")
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=shape.num_kv_heads // num_ranks,
        intermediate_size=shape.intermediate_size // num_ranks,
    )
