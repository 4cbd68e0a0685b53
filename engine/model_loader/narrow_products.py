"""A checkpoint in 8 or 4 bits, for transformers' code, which takes plain tensors.

    files ──Weights──> weights in 8 or 4 bits ──> kept, for products of ours, if the code has a linear layer of that
                  │                          │    name and size, or experts of them; it is given tensors without
                  │                          │    memory in their place
                  │                          └──> widened, if not, or of the logits
                  └──> all other tensors, as they are

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.cache_dir import report
from engine.grains import FLOAT8_GRAIN, INT8_GRAIN
from engine.int4_weight import Int4Weight
from engine.model_loader.int4_weights import Int4Weights
from engine.model_loader.weights import SafetensorsWeights, Weights
from engine.models.expert_products import ExpertWeight
from engine.models.replaced_experts import ExpertSizes, sizes_of_experts
from engine.models.transformers_products import is_product, size_of
from engine.narrow_weight import NarrowWeight
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight

EXPERTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's products in checkpoints: gate, up and down."""


class Kept(NamedTuple):
    """Weights in 8 or 4 bits, by the names of the modules whose weights they are."""

    products: dict[str, NarrowWeight]
    experts: dict[str, list[ExpertWeight]]


class Checkpoint(NamedTuple):
    tensors: dict[str, torch.Tensor]
    """For transformers' code."""
    kept: Kept


def split_checkpoint(weights: SafetensorsWeights, causal_lm: Any) -> Checkpoint:
    """Take all tensors of `weights`. `causal_lm`: the model without weights. Raises `ValueError` if a tensor in 8 or 4
    bits lacks its scales, or they do not fit."""
    tensors: dict[str, torch.Tensor] = {}
    kept, num_widened = Kept({}, {}), 0
    products, narrow = _products_of(causal_lm), weights.narrow_products()
    shapes = dict(narrow)
    for module, sizes in _experts_of(causal_lm).items():
        each = _take_experts(weights, module, sizes, shapes)
        if each is not None:
            E, I, D, _ = sizes  # noqa: E741
            kept.experts[module] = each
            tensors[f"{module}.gate_up_proj"] = weight_without_memory((E, 2 * I, D), weights.dtype)
            tensors[f"{module}.down_proj"] = weight_without_memory((E, D, I), weights.dtype)
    transposed = {name for name, module in causal_lm.named_modules() if type(module) is Conv1D}
    is_packed = isinstance(weights, Int4Weights)
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        weight = weights.take_product(name, shape)
        if isinstance(weight, torch.Tensor):
            tensors[name] = weight
        elif module in products and size_of(products[module]) == shape and _fits(weight):
            kept.products[module] = weight
            tensors[name] = weight_without_memory(shape, weight.dtype)
        else:
            tensors[name] = weight.dequantized()
            num_widened += 1
        if is_packed and module in transposed:  # it is packed like a linear layer's weight
            tensors[name] = tensors[name].T.contiguous()
    if num_widened:
        report(
            f"{num_widened} weights in 8 or 4 bits are widened: the logits', or those for which transformers' code has "
            "no products of their names and sizes that ours could replace"
        )
    rest = weights.take_rest()
    used = causal_lm.state_dict().keys()
    for name in [name for name in rest if name.endswith(".bias") and name not in used]:
        module = name.removesuffix(".bias")
        # Old versions of AutoGPTQ have written biases of zeros for every weight.
        if (module in products or f"{module}.weight" in narrow) and not rest[name].any():
            del rest[name]
    weights.check_all_taken()
    return Checkpoint(tensors | rest, kept)


def _take_experts(
    weights: SafetensorsWeights, module: str, sizes: ExpertSizes, shapes: dict[str, tuple[int, int]]
) -> list[ExpertWeight] | None:
    """Take the experts' weights, also out of `shapes`. None, with nothing taken: not all are in 8 or 4 bits, or in
    forms of which our products take all experts' together."""
    for names in EXPERTS:
        names_of = [[f"{module}.{e}.{name}.weight" for name in names] for e in range(sizes.num_experts)]
        if all(shapes.get(name) == shape for each in names_of for name, shape in _shapes(each, sizes)):
            taken = [_expert(weights, each, sizes) for each in names_of]
            if not _are_alike(taken):
                return None
            for each in names_of:
                for name in each:
                    del shapes[name]
            return taken
    return None


def _expert(weights: Weights, names: Sequence[str], sizes: ExpertSizes) -> ExpertWeight:
    gate, up, down = (weights.take_product(name, shape) for name, shape in _shapes(names, sizes))
    return gate, up, down


def _shapes(names: Sequence[str], sizes: ExpertSizes) -> Iterator[tuple[str, tuple[int, int]]]:
    """An expert's names with their shapes."""
    _, I, D, _ = sizes  # noqa: E741
    return zip(names, ((I, D), (I, D), (D, I)), strict=True)


def _are_alike(experts: list[ExpertWeight]) -> bool:
    """Whether all are in 8 or 4 bits, gates and ups in one form, and downs in one."""
    forms: tuple[set[object], set[object]] = set(), set()
    for expert in experts:
        for place, weight in enumerate(expert):
            if isinstance(weight, torch.Tensor):
                return False
            forms[place // 2].add(weight.form)
    return all(len(each) == 1 for each in forms)


def made_up(weights: Weights, causal_lm: Any) -> Kept:
    """The weights that a checkpoint would have in 8 or 4 bits, made up."""
    made = {
        name: weights.take_product(f"{name}.weight", size_of(module))
        for name, module in _products_of(causal_lm).items()
    }
    kept = Kept({name: each for name, each in made.items() if not isinstance(each, torch.Tensor) and _fits(each)}, {})
    for module, sizes in _experts_of(causal_lm).items():
        names_of = [[f"{module}.{e}.{name}.weight" for name in EXPERTS[0]] for e in range(sizes.num_experts)]
        experts = [_expert(weights, each, sizes) for each in names_of]
        if _are_alike(experts):
            kept.experts[module] = experts
    return kept


def weight_without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(shape)


def _experts_of(causal_lm: Any) -> dict[str, ExpertSizes]:
    """The modules of experts that may keep weights in 8 or 4 bits."""
    found = {name: sizes_of_experts(module) for name, module in causal_lm.named_modules()}
    return {name: sizes for name, sizes in found.items() if sizes is not None}


def _products_of(causal_lm: Any) -> dict[str, nn.Linear]:
    """The linear layers that may keep weights in 8 or 4 bits: not the logits', nor one that stands in several places,
    of which only one would be replaced."""
    head = causal_lm.get_output_embeddings()
    places = Counter(id(module) for _, module in causal_lm.named_modules(remove_duplicate=False))
    return {
        name: module
        for name, module in causal_lm.named_modules()
        if is_product(module) and isinstance(module, nn.Linear) and module is not head and places[id(module)] == 1
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
