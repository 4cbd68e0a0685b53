"""Observes the linear layers of a model in transformers' code, in the step that transformers_probe.py watches: which of
them an adapter may change, which may be one product, and how ranks share them."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.models.expert_parts import intermediate_size_of
from engine.models.head_shape import HeadShape
from engine.models.recurrent_shape import RecurrentLayer
from engine.models.split import EXPERTS, FAMILIES, GATHERED, INPUTS, STYLES, Split
from engine.models.transformers_products import is_product, size_of

WHOLE_STYLES = frozenset({"replicate", "replicated_with_grad_allreduce"})
"""transformers' styles of what every device has as a whole."""
OWN_PLANS = {
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
}
"""Plans for several devices, in transformers' words, of models for which transformers has none."""
KEYS_AND_VALUES = ("k_proj", "v_proj")


class _Call(NamedTuple):
    name: str
    x: torch.Tensor
    """Kept, so that no other tensor has its address."""
    version: int
    """How often it had been changed in place."""


class WatchedProducts:
    """Records the inputs of all products of `body`, from now on."""

    def __init__(self, body: nn.Module, name_of_body: str) -> None:
        self._calls: list[_Call] = []
        self._names: list[str] = []
        for name, module in body.named_modules():
            if is_product(module):
                self._watch(f"{name_of_body}.{name}", module)

    def adaptable(self, recurrent_layers: tuple[RecurrentLayer, ...], num_tokens: int) -> tuple[str, ...]:
        """The products whose inputs were the step's tokens, so many, and those of layers that our modules compute,
        which see all tokens, too."""
        ours = tuple(f"{layer.name}." for layer in recurrent_layers)
        return tuple(name for name in self._names if name.startswith(ours) or self._saw_all(name, num_tokens))

    def siblings(self) -> tuple[tuple[str, ...], ...]:
        """Products that were called one after the other, once each, with the very same input."""
        num_calls = {name: sum(call.name == name for call in self._calls) for name in self._names}
        groups = (
            tuple(call.name for call in calls)
            for _, calls in groupby(self._calls, lambda call: (id(call.x), call.version))
        )
        return tuple(names for names in groups if len(names) > 1 and all(num_calls[name] == 1 for name in names))

    def _watch(self, name: str, product: nn.Module) -> None:
        self._names.append(name)

        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            self._calls.append(_Call(name, x, x._version))

        product.register_forward_pre_hook(note, with_kwargs=True)

    def _saw_all(self, name: str, num_tokens: int) -> bool:
        seen = [call.x.shape[:-1].numel() == num_tokens for call in self._calls if call.name == name]
        return bool(seen) and all(seen)


def splits_of(config: Any, body: nn.Module, name_of_body: str, heads_of: dict[str, HeadShape]) -> tuple[Split, ...]:
    """See `TransformersConfig.splits`. `heads_of`: by the names of the modules that attend."""
    if config.model_type not in FAMILIES:
        return ()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or OWN_PLANS.get(config.model_type, {})
    splits: list[Split] = []
    for name, module in body.named_modules():
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is None or style in WHOLE_STYLES:
            continue
        if style not in STYLES:
            return ()
        split = _split_of(f"{name_of_body}.{name}", module, STYLES[style], heads_of)
        if split is None:
            return ()
        splits.append(split)
    return tuple(splits)


def _split_of(name: str, module: nn.Module, how: str, heads_of: dict[str, HeadShape]) -> Split | None:
    """None: we cannot split it so."""
    if how == EXPERTS:
        intermediate_size = intermediate_size_of(module)
        return None if intermediate_size is None else Split(name, how, intermediate_size)
    if not is_product(module):
        return None
    heads = heads_of.get(name.rpartition(".")[0])
    if heads is None or how == GATHERED:
        outputs, inputs = size_of(module)
        return Split(name, how, inputs if how == INPUTS else outputs)
    if name.endswith(KEYS_AND_VALUES):
        return Split(name, how, heads.num_kv_heads, is_shared=True)
    return Split(name, how, heads.num_heads)
