"""The part of a model that one rank computes: some heads, and a part of the feed-forward. Integers only, no torch.

Ranks that share a key head's query heads each have that key head. Latents serve all heads: every rank has them in its
own pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.decoder_config import DecoderConfig
from engine.models.head_shape import HeadShape, pool_shape, why_not_together
from engine.models.model_shape import ModelShape
from engine.models.split import EXPERTS, own_heads, why_not_split
from engine.models.transformers_config import TransformersConfig

MOST_NAMED = 16
"""Errors list working numbers of ranks up to this."""


def share_of(shape: ModelShape, num_ranks: int) -> ModelShape:
    """The shape of the part that each of `num_ranks` ranks computes. Raises `ValueError` if the model cannot be split
    so."""
    if num_ranks == 1:
        return shape
    if isinstance(shape, TransformersConfig):
        return _share_of_transformers(shape, num_ranks)
    assert isinstance(shape, DecoderConfig)
    _check_divides(lambda size: _why_not(shape, size), num_ranks)
    moe = shape.moe
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=shape.num_kv_heads // num_key_parts(shape, num_ranks),
        intermediate_size=shape.intermediate_size // num_ranks,
        moe=None if moe is None else replace(moe, intermediate_size=moe.intermediate_size // num_ranks),
    )


def _share_of_transformers(shape: TransformersConfig, num_ranks: int) -> TransformersConfig:
    if not shape.splits:
        why = (
            "transformers' code computes it, and such a model is only split if tests compare its ranks with the whole "
            "model; docs/tensor-parallel.md lists them"
        )
        if shape.recurrent_layers:
            why = "layers that keep a state are not split"
        raise ValueError(f"tensor_parallel_size must be 1 for this model, is {num_ranks}: {why}")
    whole = HeadShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    all_heads = shape.head_shapes or (whole,)
    _check_divides(lambda size: why_not_split(shape.splits, all_heads, size), num_ranks)
    own = tuple(own_heads(heads, num_ranks) for heads in all_heads)
    if why_not := why_not_together(own):
        raise ValueError(f"tensor_parallel_size {num_ranks} does not work for this model: {why_not}")
    num_heads, num_kv_heads, head_dim = pool_shape(own)
    num_parts = num_ranks if any(split.how == EXPERTS for split in shape.splits) else 1
    return replace(
        shape,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_shapes=own if shape.head_shapes else (),
        expert_sizes=tuple((hidden, intermediate // num_parts) for hidden, intermediate in shape.expert_sizes),
    )


def _check_divides(why_not: Callable[[int], str], num_ranks: int) -> None:
    """Raise `ValueError` if `why_not` says, for so many ranks, which condition they do not meet."""
    if condition := why_not(num_ranks):
        sizes = [str(size) for size in range(1, MOST_NAMED + 1) if not why_not(size)]
        raise ValueError(
            f"tensor_parallel_size must {condition}, is {num_ranks}; up to {MOST_NAMED} these work: {', '.join(sizes)}"
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
