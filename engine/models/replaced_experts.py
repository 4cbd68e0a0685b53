"""Our products in place of transformers' experts: by the CPU kernels, or with weights in 8 or 4 bits.

transformers keeps a layer's experts in two tensors, and computes them by one of several functions, all of which do the
same: those that its decorator `use_experts_implementation` describes. We replace experts of the common kind, with a
gate by SiLU or GELU and without biases. gpt-oss' have biases and a gate of their own: the CPU kernels compute these.

Shapes: T tokens, D hidden, A experts of each, E experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.integrations import moe
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.int4_weight import Int4Weight
from engine.layers import Activation, Linear
from engine.models.chosen_experts import ChosenExperts
from engine.models.expert_products import ExpertProducts, ExpertWeight, stack_of
from engine.models.four_bit_experts import BiasedExpert, ClampedGate
from engine.models.gated_modules import activation_in
from engine.models.parts import Parts
from engine.models.transformers_experts import FourBitExperts
from engine.quantization import QUANTISERS
from engine.weight import stacked

OF_THE_COMMON_KIND = {
    "has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, "has_post_expert_norm": False,
}  # fmt: skip


class ScoresWeight(torch.Tensor):
    """The weight of experts' scores [E, D], in place of the parameter of transformers' module. Products with it are
    ours, whose rows have the same bits in any batch; everything else is as with any tensor."""

    product: Linear
    """[T, D] bfloat16 -> [T, E] float32"""

    @staticmethod
    def of(weight_ED: torch.Tensor, product: Linear) -> ScoresWeight:
        made = weight_ED.detach().as_subclass(ScoresWeight)
        made.product = product
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = next((each for each in args if isinstance(each, ScoresWeight)), None)
        if func is F.linear and len(args) in (2, 3) and args[1] is weight and not kwargs:
            x = args[0].to(torch.bfloat16)
            # Some modules widen a token and the weight first.
            if x.dtype == args[0].dtype or torch.equal(x.to(args[0].dtype), args[0]):
                y_TE = weight.product(x.reshape(-1, x.shape[-1]).contiguous())
                if len(args) == 3 and args[2] is not None:
                    y_TE = y_TE + args[2]
                return y_TE.to(args[0].dtype).view(*x.shape[:-1], -1)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if weight is None or func not in WIDENINGS or result.dtype != torch.float32:
            return result
        return ScoresWeight.of(result, weight.product)


WIDENINGS = (torch.Tensor.type, torch.Tensor.to, torch.Tensor.float)


class ExpertSizes(NamedTuple):
    num_experts: int
    intermediate_size: int
    hidden_size: int
    activation: Activation


class ReplacedExperts(nn.Module):
    """Has the interface of transformers' experts."""

    def __init__(self, experts: ChosenExperts, num_experts: int) -> None:
        super().__init__()
        self._experts, self._last = experts, num_experts - 1

    def forward(self, h_TD: torch.Tensor, experts_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        # The number of experts stands for none. The last one then counts for nothing.
        weights_TA = weights_TA.float().masked_fill(experts_TA > self._last, 0.0)
        return self._experts(h_TD.contiguous(), (experts_TA.clamp_max(self._last), weights_TA))


def sizes_of_experts(module: Any) -> ExpertSizes | None:
    """None: the module is not experts that we can replace."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or gate_up.ndim != 3:
        return None
    if any(getattr(module, name, None) is not value for name, value in OF_THE_COMMON_KIND.items()):
        return None
    if type(module)._apply_gate is not moe._default_apply_gate or len(list(module.parameters())) != 2:
        return None
    E, I, D = len(gate_up), gate_up.shape[1] // 2, gate_up.shape[2]  # noqa: E741
    is_whole = gate_up.shape == (E, 2 * I, D) and down.shape == (E, D, I) and D % 2 == 0
    activation = activation_in(getattr(module, "act_fn", None))
    return ExpertSizes(E, I, D, activation) if is_whole and activation is not None else None


def replace_experts(
    causal_lm: Any, parts: Parts, quantization: str, stored: dict[str, list[ExpertWeight]], device: str
) -> None:
    """Replace experts, one layer after the other. Plain ones stay, unless the parts take them one by one. Raises
    `ValueError` if a weight is not finite and is to be quantised.

    `stored`: the experts' weights in 8 or 4 bits, by the names of their modules; they are taken from it."""
    # Only names: a list of modules would keep all replaced weights until the end.
    for path in [path for path, module in causal_lm.named_modules() if sizes_of_experts(module) is not None]:
        module = causal_lm.get_submodule(path)
        sizes = sizes_of_experts(module)
        assert sizes is not None
        weights: Iterable[ExpertWeight] | None = None
        in_files = stored.pop(path, None)
        if in_files is not None:
            weights = (_on_device(expert, device) for expert in in_files)
        elif quantization in QUANTISERS:
            weights = _quantised(module, quantization, device)
        elif parts.each_expert is not None:
            weights = _plain(module, device)
        if weights is not None:
            products = _products(weights, sizes, parts)
            chosen = parts.chosen_experts(products, sizes.num_experts, device)
            causal_lm.set_submodule(path, ReplacedExperts(chosen, sizes.num_experts))
            if parts.each_expert is not None:
                _replace_scores(causal_lm, path, sizes.num_experts, sizes.hidden_size, parts)
    assert not stored
    if parts.clamped_experts is not None:
        _replace_those_of_gpt_oss(causal_lm, parts, device)


def _replace_those_of_gpt_oss(causal_lm: nn.Module, parts: Parts, device: str) -> None:
    """In MXFP4, only their scores: the experts are ours already."""
    assert parts.clamped_experts is not None
    for path in [path for path, each in causal_lm.named_modules() if isinstance(each, GptOssExperts | FourBitExperts)]:
        module: Any = causal_lm.get_submodule(path)
        num_experts, hidden_size = module.num_experts, module.hidden_size
        if isinstance(module, GptOssExperts):
            products = parts.clamped_experts(_biased(module, device), ClampedGate(module.alpha, module.limit))
            chosen = parts.chosen_experts(products, num_experts, device)
            causal_lm.set_submodule(path, ReplacedExperts(chosen, num_experts))
        _replace_scores(causal_lm, path, num_experts, hidden_size, parts)


def _biased(module: Any, device: str) -> Iterator[BiasedExpert]:
    """Gate and up alternate in transformers' tensors, [E, D, 2I]; `down` is [E, I, D]."""
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    for each in zip(*(getattr(module, name).data for name in names), strict=True):
        gate_up, gate_up_bias, down, down_bias = (x.to(device) for x in each)
        weights = (gate_up.T[::2].contiguous(), gate_up.T[1::2].contiguous(), down.T.contiguous())
        yield weights, (gate_up_bias[::2], gate_up_bias[1::2], down_bias)


def _replace_scores(causal_lm: nn.Module, path: str, num_experts: int, hidden_size: int, parts: Parts) -> None:
    """Let our product compute the scores of the experts at `path`, in a module beside them."""
    for module in causal_lm.get_submodule(path.rpartition(".")[0]).children():
        weight_ED = module._parameters.get("weight")
        is_of_scores = weight_ED is not None and weight_ED.shape == (num_experts, hidden_size)
        if weight_ED is None or not is_of_scores or weight_ED.dtype != torch.bfloat16 or isinstance(module, nn.Linear):
            continue
        del module._parameters["weight"]
        module.weight = ScoresWeight.of(weight_ED.data, parts.expert_scores(weight_ED.data))


def _on_device(expert: ExpertWeight, device: str) -> ExpertWeight:
    gate, up, down = (weight.to(device) for weight in expert)
    return gate, up, down


def _plain(module: Any, device: str) -> Iterator[ExpertWeight]:
    for gate_up, down in zip(module.gate_up_proj.data, module.down_proj.data, strict=True):
        gate, up = gate_up.to(device).chunk(2)
        yield gate, up, down.to(device)


def _quantised(module: Any, quantization: str, device: str) -> Iterator[ExpertWeight]:
    quantise = QUANTISERS[quantization]
    for gate, up, down in _plain(module, device):
        yield quantise(gate), quantise(up), quantise(down)


def _products(weights: Iterable[ExpertWeight], sizes: ExpertSizes, parts: Parts) -> ExpertProducts:
    num_experts, activation = sizes.num_experts, sizes.activation
    if parts.each_expert is not None:
        return parts.each_expert(iter(weights), activation)
    each = list(weights)
    gate_up = stack_of((stacked([gate, up]) for gate, up, _ in each), num_experts)
    down = stack_of((down for _, _, down in each), num_experts)
    assert gate_up is not None
    assert down is not None
    if isinstance(gate_up, Int4Weight):
        assert isinstance(down, Int4Weight)
        return parts.int4_experts(gate_up, down, activation)
    assert not isinstance(down, Int4Weight)
    return parts.scaled_experts(gate_up, down, activation)
