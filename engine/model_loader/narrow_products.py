"""A checkpoint in 8 or 4 bits, for transformers' code, which takes plain tensors.

    files ──Weights──> weights in 8 or 4 bits ──> kept, for products of ours, if the code has a linear layer of that
                  │                          │    name and size; it is given a tensor without memory in their place
                  │                          └──> widened, if not: experts, which the code stacks, or the logits
                  └──> all other tensors, as they are

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from engine.cache_dir import report
from engine.int4_weight import Int4Weight
from engine.model_loader.weights import SafetensorsWeights, Weights
from engine.models.transformers_products import is_product, size_of
from engine.narrow_weight import NarrowWeight
from engine.quantization_choice import FLOAT8_GRAIN, INT8_GRAIN
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight


class Checkpoint(NamedTuple):
    tensors: dict[str, torch.Tensor]
    """For transformers' code."""
    kept: dict[str, NarrowWeight]
    """Weights in 8 or 4 bits, by the names of their linear layers."""


def split_checkpoint(weights: SafetensorsWeights, causal_lm: Any) -> Checkpoint:
    """Take all tensors of `weights`. `causal_lm`: the model without weights. Raises `ValueError` if a tensor in 8 or 4
    bits lacks its scales, or they do not fit."""
    products = _products_of(causal_lm)
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[str, NarrowWeight] = {}
    num_widened = 0
    for name, shape in weights.narrow_products().items():
        module = name.removesuffix(".weight")
        weight = weights.take_product(name, shape)
        if isinstance(weight, torch.Tensor):
            tensors[name] = weight
        elif module in products and size_of(products[module]) == shape and _fits(weight):
            kept[module] = weight
            tensors[name] = weight_without_memory(shape, weight.dtype)
        else:
            tensors[name] = weight.dequantized()
            num_widened += 1
    if num_widened:
        report(
            f"{num_widened} weights in 8 or 4 bits are widened: transformers' code has no linear layers of their names "
            "and sizes (it stacks experts), or they are the logits'"
        )
    rest = weights.take_rest()
    for name in [name for name in rest if name.endswith(".bias") and name.removesuffix(".bias") in products]:
        # Old versions of AutoGPTQ have written biases of zeros for every weight.
        if products[name.removesuffix(".bias")].bias is None and not rest[name].any():
            del rest[name]
    weights.check_all_taken()
    return Checkpoint(tensors | rest, kept)


def made_up_products(weights: Weights, causal_lm: Any) -> dict[str, NarrowWeight]:
    """The weights that a checkpoint would have in 8 or 4 bits, made up."""
    made = {
        name: weights.take_product(f"{name}.weight", size_of(module))
        for name, module in _products_of(causal_lm).items()
    }
    return {name: weight for name, weight in made.items() if not isinstance(weight, torch.Tensor) and _fits(weight)}


def weight_without_memory(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


def _products_of(causal_lm: Any) -> dict[str, nn.Linear]:
    """The linear layers that may keep weights in 8 or 4 bits: not the logits'."""
    head = causal_lm.get_output_embeddings()
    return {
        name: module
        for name, module in causal_lm.named_modules()
        if is_product(module) and isinstance(module, nn.Linear) and module is not head
    }


def _fits(weight: Weight) -> bool:
    """Whether our products take a weight of these sizes."""
    if isinstance(weight, Int4Weight):
        return True
    assert isinstance(weight, ScaledWeight)
    is_float8 = weight.weight.dtype == torch.float8_e4m3fn
    num_outputs, num_inputs = weight.weight.shape
    if weight.has_groups or not is_float8:
        return num_inputs % INT8_GRAIN == 0
    return num_outputs % FLOAT8_GRAIN == 0 and num_inputs % FLOAT8_GRAIN == 0
