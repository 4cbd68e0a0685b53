"""Our products in place of transformers' linear layers: faster ones, or with weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers import Linear, MakeLinear
from engine.narrow_weight import NarrowWeight


class _Product(nn.Module):
    """One of our parts in place of torch's linear layer."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._linear(x.reshape(-1, x.shape[-1]).contiguous())
        return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True, slots=True)
class OurProducts:
    """Which of our parts compute products."""

    linear_of: Callable[[int, int], MakeLinear]
    """By a product's outputs and inputs."""
    lm_head: MakeLinear
    """The logits."""
    narrow: MakeLinear
    """Takes weights that a checkpoint stores in 8 or 4 bits."""


def replace_products(causal_lm: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> None:
    """Replace linear layers, one after the other, and move the model to the device. What would be plain torch, or does
    not fit our parts, or is in another dtype than the model's, stays.

    `stored`: weights in 8 or 4 bits, by the names of the modules whose weights they are; they are taken from it."""
    head, dtype = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings().weight.dtype
    # Only names: a list of modules would keep all replaced weights until the end.
    for path in [path for path, _ in causal_lm.named_modules()]:
        parent = causal_lm.get_submodule(path)
        for name, module in list(parent.named_children()):
            if not is_product(module):
                continue
            bias = () if module.bias is None else (module.bias.data.to(device),)
            narrow = stored.pop(f"{path}.{name}".removeprefix("."), None)
            if module.weight.dtype != dtype:  # experts are chosen in float32 in some models, whatever their dtype
                if narrow is not None:
                    module.weight.data = narrow.dequantized().to(module.weight.dtype)
                continue
            if narrow is not None:
                setattr(parent, name, _Product(ours.narrow(narrow.to(device), *bias)))
                continue
            make = ours.lm_head if module is head else ours.linear_of(*size_of(module))
            if make is Linear or size_of(module)[1] % 2 or (module is head and module.bias is not None):
                continue  # the logits' product has no bias
            # Conv1D is GPT-2's linear layer, with a transposed weight.
            weight = module.weight.data.T.contiguous() if type(module) is Conv1D else module.weight.data
            setattr(parent, name, _Product(make(weight.to(device), *bias)))
    assert not stored
    causal_lm.to(device)


def sizes_of_products(causal_lm: Any) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of the products that layers have, without repetitions."""
    head = causal_lm.get_output_embeddings()
    products = (module for module in causal_lm.modules() if is_product(module) and module is not head)
    return tuple(sorted({size_of(module) for module in products}))


def is_product(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D)


def size_of(product: Any) -> tuple[int, int]:
    """(outputs, inputs)"""
    sizes: tuple[int, int] = tuple(product.weight.shape)
    return sizes[::-1] if type(product) is Conv1D else sizes
