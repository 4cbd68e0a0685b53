"""The part of a model that one rank computes: some heads, and a part of the feed-forward. Integers only, no torch.

Ranks that share a key head's query heads each have that key head. Latents serve all heads: every rank has them in its
own pool.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.decoder_config import DecoderConfig
from engine.models.model_shape import ModelShape

ONE_RANK = "tensor_parallel_size must be 1 for models that transformers' code computes"
MOST_NAMED = 16
"""Errors list working numbers of ranks up to this."""


def share_of(shape: ModelShape, num_ranks: int) -> ModelShape:
    """The shape of the part that each of `num_ranks` ranks computes. Raises `ValueError` if the model cannot be split
    so."""
    if num_ranks == 1:
        return shape
    if not isinstance(shape, DecoderConfig):
        raise ValueError(ONE_RANK)
    if why_not := _why_not(shape, num_ranks):
        sizes = [str(size) for size in range(1, MOST_NAMED + 1) if not _why_not(shape, size)]
        raise ValueError(
            f"tensor_parallel_size must {why_not}, is {num_ranks}; up to {MOST_NAMED} these work: {', '.join(sizes)}"
        )
    moe = shape.moe
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=shape.num_kv_heads // num_key_parts(shape, num_ranks),
        intermediate_size=shape.intermediate_size // num_ranks,
        moe=None if moe is None else replace(moe, intermediate_size=moe.intermediate_size // num_ranks),
    )


def _why_not(shape: DecoderConfig, num_ranks: int) -> str:
    """The condition that `num_ranks` does not meet, as a clause; empty if the model can be split so."""
    moe = shape.moe
    sizes = {"num_attention_heads": shape.num_heads}
    if moe is None or moe.first_layer > 0:
        sizes["intermediate_size"] = shape.intermediate_size
    if moe is not None:
        sizes["moe_intermediate_size"] = moe.intermediate_size
    for name, size in sizes.items():
        if size % num_ranks:
            return f"divide the model's {name}={size}"
    num_heads = shape.num_kv_heads
    if shape.mla is None and num_heads % num_ranks and num_ranks % num_heads:
        return f"divide the model's num_key_value_heads={num_heads}, or be a multiple of it"
    return ""


def num_key_parts(shape: DecoderConfig, num_ranks: int) -> int:
    """How many parts the key heads are cut into; equally many ranks have each part. The model must be divisible among
    `num_ranks`."""
    return 1 if shape.mla is not None else min(shape.num_kv_heads, num_ranks)
