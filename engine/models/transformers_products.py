"""Our products in place of transformers' linear layers: faster ones, or with weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers import Linear, MakeLinear
from engine.models.share import AnyWeight, Share
from engine.narrow_weight import NarrowWeight

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters


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

    linear_of: Callable[[tuple[int, int], tuple[int, int]], MakeLinear]
    """By (outputs, inputs) of a product, and of this rank's part of it."""
    lm_head: MakeLinear
    """The logits."""
    narrow: MakeLinear
    """Takes weights that a checkpoint stores in 8 or 4 bits."""
    adapters: Adapters | None = None
    adaptable: frozenset[str] = frozenset()
    """Names of the products that adapters may change."""
    share: Share | None = None
    """None: one rank has the whole model."""


def replace_products(causal_lm: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> None:
    """Replace linear layers, one after the other, and move the model to the device. What would be plain torch without
    adapters, or does not fit our parts, or is in another dtype than the model's, stays. Raises `ValueError` if an
    adapter does not fit.

    `stored`: weights in 8 or 4 bits, by the names of the modules whose weights they are; they are taken from it."""
    head, dtype = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings().weight.dtype
    # Only names: a list of modules would keep all replaced weights until the end.
    for path in [path for path, _ in causal_lm.named_modules()]:
        parent = causal_lm.get_submodule(path)
        for name, module in list(parent.named_children()):
            if not is_product(module):
                continue
            full_name = f"{path}.{name}".removeprefix(".")
            narrow = stored.pop(full_name, None)
            if module.weight.dtype != dtype:  # experts are chosen in float32 in some models, whatever their dtype
                if narrow is not None:
                    module.weight.data = narrow.dequantized().to(module.weight.dtype)
                continue
            if module is head:
                assert narrow is None, "weights of the logits are widened"
                linear = _head(module, ours, device)
            else:
                linear = _linear(full_name, module, narrow, ours, device)
            if linear is not None:
                setattr(parent, name, _Product(linear))
    assert not stored
    if ours.adapters is not None:
        ours.adapters.check_all_taken()
    causal_lm.to(device)


def _head(module: Any, ours: OurProducts, device: str) -> Linear | None:
    """The logits' product, which has no bias. None: transformers' stays."""
    if ours.lm_head is Linear or size_of(module)[1] % 2 or module.bias is not None:
        return None
    return ours.lm_head(_weight_of(module).to(device))


def _linear(name: str, module: Any, narrow: NarrowWeight | None, ours: OurProducts, device: str) -> Linear | None:
    """A layer's product, with what adapters add, from the parts of all ranks. None: transformers' stays."""
    size = own_size = size_of(module)
    weight: AnyWeight = _weight_of(module) if narrow is None else narrow
    bias = None if module.bias is None else module.bias.data
    share = ours.share
    is_cut = share is not None and share.is_cut(name)
    if share is not None:
        own_size = share.own_size(name, size)
        weight, bias = share.weight(name, weight, size), share.bias(name, bias)
    outputs, inputs = own_size
    is_odd = inputs % 2 == 1
    make = ours.narrow
    if narrow is None:
        make = Linear if is_odd else ours.linear_of(size, own_size)
    may_stay = make is Linear and not is_cut
    can_adapt = ours.adapters is not None and name in ours.adaptable and not is_odd
    if may_stay and not can_adapt:
        return None
    linear = make(weight.to(device), *(() if bias is None else (bias.to(device),)))
    if can_adapt:
        assert ours.adapters is not None
        adapted = ours.adapters.adapt(linear, {name: outputs}, inputs)
        if may_stay and adapted is linear:
            return None
        linear = adapted
    return linear if share is None else share.joined(name, linear, size)


def _weight_of(product: Any) -> torch.Tensor:
    """[outputs, inputs]. Conv1D is GPT-2's linear layer, with a transposed weight."""
    weight: torch.Tensor = product.weight.data
    return weight.T.contiguous() if type(product) is Conv1D else weight


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
