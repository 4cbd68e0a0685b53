"""Our products in place of transformers' linear layers: faster ones, or with weights in 8 or 4 bits.

    gate, up                    ──> one product, with its activation (gated_modules.py says which modules have such)
    others of the same input    ──> one product
    the rest, one by one        ──> a product each, or transformers' layer stays

each of this rank's part of the weights, as they are stored, and with what adapters add. product_modules.py has the
modules that stand in transformers' code then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers import GatedLinear, Linear, MakeLinear
from engine.models.gated_modules import DOWN, GATE, UP, activation_of
from engine.models.parts import Parts
from engine.models.product_modules import GatedProducts, JointProduct, Product, Sibling
from engine.models.share import AnyWeight, Share
from engine.narrow_weight import NarrowWeight
from engine.weight import stacked

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters


Size = tuple[int, int]
"""(outputs, inputs)"""
GRAIN = 16
"""Kernels compute this many outputs together, to which only one product's adapters may add."""


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
    siblings: tuple[tuple[str, ...], ...] = ()
    """Names of products that are given the very same input, one after the other."""
    share: Share | None = None
    """None: one rank has the whole model."""


def replace_products(causal_lm: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> None:
    """Replace linear layers, one after the other, and move the model to the device. What would be plain torch without
    adapters, or does not fit our parts, or is in another dtype than the model's, stays. Raises `ValueError` if an
    adapter does not fit.

    `stored`: weights in 8 or 4 bits, by the names of the modules whose weights they are; they are taken from it."""
    head, dtype = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings().weight.dtype
    _replace_gates(causal_lm, ours, stored, device)
    _join_siblings(causal_lm, ours, stored, device)
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
                setattr(parent, name, Product(linear))
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
        if parts.gated_linear is GatedLinear or gate.is_odd or gate.own_size != up.own_size:
            continue
        if not gate.can_join(up, ours):
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
        causal_lm.set_submodule(path, GatedProducts(gated, getattr(module, DOWN)))


def _join_siblings(causal_lm: Any, ours: OurProducts, stored: dict[str, NarrowWeight], device: str) -> None:
    """Replace products of one input by one product, unless that would be plain torch."""
    dtype, modules = causal_lm.get_input_embeddings().weight.dtype, dict(causal_lm.named_modules())
    for names in ours.siblings:
        there = {name: modules.pop(name) for name in names if name in modules}
        layers = [
            _Layer.of(name, module, ours, stored)
            for name, module in there.items()
            if is_product(module) and module.weight.dtype == dtype
        ]
        for alike in _alike(layers, ours):
            parts = alike[0].parts(ours)
            if len(alike) == 1 or parts.linear is Linear or alike[0].is_odd:
                continue
            for layer in alike:
                stored.pop(layer.name, None)
            joint = JointProduct(_stacked(alike, parts, ours, device), [layer.own_size[0] for layer in alike])
            for number, layer in enumerate(alike):
                causal_lm.set_submodule(layer.name, Sibling(joint, number))


def _alike(layers: list[_Layer], ours: OurProducts) -> Iterator[list[_Layer]]:
    """Layers of one input that may be one product."""
    while layers:
        first, *others = layers
        yield [first, *(layer for layer in others if first.can_join(layer, ours))]
        layers = [layer for layer in others if not first.can_join(layer, ours)]


def _stacked(layers: list[_Layer], parts: Parts, ours: OurProducts, device: str) -> Linear:
    weights: list[Any] = [layer.weight.to(device) for layer in layers]
    biases = [layer.bias.to(device) for layer in layers if layer.bias is not None]
    linear = parts.linear(stacked(weights), *((torch.cat(biases),) if biases else ()))
    if ours.adapters is None or layers[0].name not in ours.adaptable:
        return linear
    outputs = {layer.name: layer.own_size[0] for layer in layers}
    return ours.adapters.adapt(linear, outputs, layers[0].own_size[1])


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
    is_gathered: bool
    """What follows needs the outputs of all ranks."""

    @staticmethod
    def of(name: str, module: Any, ours: OurProducts, stored: dict[str, NarrowWeight]) -> _Layer:
        size = own_size = size_of(module)
        weight: AnyWeight = stored[name] if name in stored else _weight_of(module)
        bias = None if module.bias is None else module.bias.data
        share = ours.share
        if share is not None:
            own_size = share.own_size(name, size)
            weight, bias = share.weight(name, weight, size), share.bias(name, bias)
        is_cut = share is not None and share.is_cut(name)
        is_gathered = share is not None and share.is_gathered(name)
        return _Layer(name, size, own_size, weight, bias, is_cut=is_cut, is_gathered=is_gathered)

    @property
    def is_odd(self) -> bool:
        """Our products read inputs in pairs."""
        return self.own_size[1] % 2 == 1

    @property
    def form(self) -> tuple[object, ...]:
        """Of a weight in 8 or 4 bits; empty for others."""
        return self.weight.form if isinstance(self.weight, NarrowWeight) else ()

    def can_join(self, other: _Layer, ours: OurProducts) -> bool:
        """Whether both, of the same input, may be computed as one product."""
        adaptable = [ours.adapters is not None and layer.name in ours.adaptable for layer in (self, other)]
        if any(adaptable) and (not all(adaptable) or (self.own_size[0] % GRAIN or other.own_size[0] % GRAIN)):
            return False
        return (
            not (self.is_gathered or other.is_gathered)
            and self.size[1] == self.own_size[1] == other.own_size[1]
            and self.form == other.form
            and self.parts(ours) is other.parts(ours)
            and (self.bias is None) == (other.bias is None)
        )

    def parts(self, ours: OurProducts) -> Parts:
        return ours.narrow if self.form else ours.parts_of(self.size, self.own_size)


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
