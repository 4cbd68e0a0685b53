"""Our products in place of transformers' linear layers: faster ones, or with weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers import GatedLinear, Linear, MakeLinear
from engine.models.gated_modules import DOWN, GATE, UP, activation_of
from engine.models.parts import Parts
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


class _GatedProducts(nn.Module):
    """In place of a module of gate, up and down; has its `down`."""

    def __init__(self, gated: GatedLinear, down: nn.Module) -> None:
        super().__init__()
        self.down_proj = down
        self._gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._gated(x.reshape(-1, x.shape[-1]).contiguous())
        y: torch.Tensor = self.down_proj(h.view(*x.shape[:-1], h.shape[-1]))
        return y


Size = tuple[int, int]
"""(outputs, inputs)"""


@dataclass(frozen=True, slots=True)
class OurProducts:
    """Which of our parts compute products."""

    parts_of: Callable[[Size, Size], Parts]
    """By the size of a product, and of this rank's part of it."""
    narrow: Parts
    """Take weights that a checkpoint stores in 8 or 4 bits."""
    lm_head: MakeLinear
    """The logits."""
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
    _replace_gates(causal_lm, ours, stored, device)
    # Only names: a list of modules would keep all replaced weights until the end.
    for path in [path for path, _ in causal_lm.named_modules()]:
        parent = causal_lm.get_submodule(path)
        for name, module in list(parent.named_children()):
            if not is_product(module):
                continue
            full_name = f"{path}.{name}".removeprefix(".")
            if module.weight.dtype != dtype:  # experts are chosen in float32 in some models, whatever their dtype
                narrow = stored.pop(full_name, None)
                if narrow is not None:
                    module.weight.data = narrow.dequantized().to(module.weight.dtype)
                continue
            is_head = module is head
            linear = _head(module, ours, device) if is_head else _linear(full_name, module, ours, stored, device)
            if linear is not None:
                setattr(parent, name, _Product(linear))
    assert not stored
    if ours.adapters is not None:
        ours.adapters.check_all_taken()
    causal_lm.to(device)


def _replace_gates(causal_lm: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> None:
    """Replace gate and `up` by one product, unless that would be plain torch."""
    dtype = causal_lm.get_input_embeddings().weight.dtype
    for path in [path for path, module in causal_lm.named_modules() if hasattr(module, GATE) and hasattr(module, UP)]:
        module = causal_lm.get_submodule(path)
        activation = activation_of(module)
        if activation is None or any(getattr(module, name).weight.dtype != dtype for name in (GATE, UP)):
            continue
        gate, up = (_Layer.of(f"{path}.{name}", getattr(module, name), ours, stored) for name in (GATE, UP))
        parts = gate.parts(ours)
        if parts.gated_linear is GatedLinear or gate.is_odd or not gate.can_join(up, ours):
            continue
        for layer in (gate, up):
            stored.pop(layer.name, None)
        weights = (layer.weight.to(device) for layer in (gate, up))
        biases = (None if layer.bias is None else layer.bias.to(device) for layer in (gate, up))
        make = partial(parts.gated_linear, *weights, *biases, activation)
        if ours.adapters is None or not {gate.name, up.name} <= ours.adaptable:
            gated = make()
        else:
            outputs, inputs = gate.own_size
            gated = ours.adapters.adapt_gated(make, parts.linear, {gate.name: outputs, up.name: outputs}, inputs)
        causal_lm.set_submodule(path, _GatedProducts(gated, getattr(module, DOWN)))


def _head(module: Any, ours: OurProducts, device: str) -> Linear | None:
    """The logits' product, which has no bias. None: transformers' stays."""
    if ours.lm_head is Linear or size_of(module)[1] % 2 or module.bias is not None:
        return None
    return ours.lm_head(_weight_of(module).to(device))


def _linear(name: str, module: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> Linear | None:
    """A layer's product, with what adapters add, from the parts of all ranks. None: transformers' stays."""
    layer = _Layer.of(name, module, ours, stored)
    stored.pop(name, None)
    make: MakeLinear = Linear if layer.is_odd else layer.parts(ours).linear
    may_stay = make is Linear and not layer.is_cut
    can_adapt = ours.adapters is not None and name in ours.adaptable and not layer.is_odd
    if may_stay and not can_adapt:
        return None
    linear = make(layer.weight.to(device), *(() if layer.bias is None else (layer.bias.to(device),)))
    if can_adapt:
        assert ours.adapters is not None
        outputs, inputs = layer.own_size
        adapted = ours.adapters.adapt(linear, {name: outputs}, inputs)
        if may_stay and adapted is linear:
            return None
        linear = adapted
    return linear if ours.share is None else ours.share.joined(name, linear, layer.size)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer of transformers', as this rank has it."""

    name: str
    size: Size
    """The whole's."""
    own_size: Size
    weight: AnyWeight
    bias: torch.Tensor | None
    is_cut: bool

    @staticmethod
    def of(name: str, module: Any, ours: OurProducts, stored: dict[str, NarrowWeight]) -> _Layer:
        size = own_size = size_of(module)
        weight: AnyWeight = stored[name] if name in stored else _weight_of(module)
        bias = None if module.bias is None else module.bias.data
        share = ours.share
        if share is not None:
            own_size = share.own_size(name, size)
            weight, bias = share.weight(name, weight, size), share.bias(name, bias)
        return _Layer(name, size, own_size, weight, bias, is_cut=share is not None and share.is_cut(name))

    @property
    def is_odd(self) -> bool:
        """Our products read inputs in pairs."""
        return self.own_size[1] % 2 == 1

    @property
    def is_narrow(self) -> bool:
        return not isinstance(self.weight, torch.Tensor)

    def can_join(self, other: _Layer, ours: OurProducts) -> bool:
        """Whether both may be computed as one product."""
        is_gathered = ours.share is not None and (
            ours.share.is_gathered(self.name) or ours.share.is_gathered(other.name)
        )
        return (
            not is_gathered
            and (self.size, self.own_size) == (other.size, other.own_size)
            and self.is_narrow == other.is_narrow
            and (self.bias is None) == (other.bias is None)
        )

    def parts(self, ours: OurProducts) -> Parts:
        return ours.narrow if self.is_narrow else ours.parts_of(self.size, self.own_size)


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
