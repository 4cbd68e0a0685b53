"""Our replacement for transformers' experts, which keeps MXFP4 weights as they are.

    with_four_bit_experts(class) ──transformers makes and loads one──> FourBitExperts ──compute_by(parts)──> serves

Its parameters have the names of the checkpoint's tensors, so that transformers loads them without further code.

Shapes: T tokens, D hidden, A experts of each, E experts, I intermediate, G = inputs / 32 groups.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.models.chosen_experts import ChosenExperts
from engine.models.four_bit_experts import BIAS, GROUP, ClampedGate, FourBitStack
from engine.models.parts import Parts

MADE_UP_SIZE = 0.02


class FourBitExperts(nn.Module):
    """Has the interface of `GptOssExperts`."""

    def __init__(self, like: GptOssExperts) -> None:
        """`like`: the experts to replace; gives the sizes and the biases. Raises `ValueError` if its inputs do not come
        in groups."""
        super().__init__()
        E, D, X = like.gate_up_proj.shape
        if D % GROUP or X // 2 % GROUP:
            raise ValueError(
                "config.json: with quant_method mxfp4, hidden_size and intermediate_size must be multiples of "
                f"{GROUP}, are {D} and {X // 2}"
            )
        self.num_experts, self.hidden_size = E, D
        device = like.gate_up_proj.device
        self._gate = ClampedGate(alpha=like.alpha, limit=like.limit)
        self.gate_up_proj_blocks, self.gate_up_proj_scales = _without_numbers(E, X, D, device)
        self.down_proj_blocks, self.down_proj_scales = _without_numbers(E, D, X // 2, device)
        self.gate_up_proj_bias, self.down_proj_bias = like.gate_up_proj_bias, like.down_proj_bias
        self._experts: ChosenExperts | None = None

    def compute_by(self, parts: Parts) -> None:
        """Build the products with `parts`, which keep the weights. Call it once these are loaded."""
        assert parts.four_bit_experts is not None
        gate_up = _stack(self.gate_up_proj_blocks, self.gate_up_proj_scales, self.gate_up_proj_bias)
        down = _stack(self.down_proj_blocks, self.down_proj_scales, self.down_proj_bias)
        products = parts.four_bit_experts(gate_up, down, self._gate)
        self._experts = parts.chosen_experts(products, len(down.bias), down.bias.device)
        self._parameters.clear()

    def make_up_weights(self) -> None:
        """Fill in random weights of about 0.02, like transformers' initial weights, from torch's generator."""
        for parameter in self.parameters():
            numbers = parameter.data
            if numbers.is_floating_point():
                numbers.normal_(std=MADE_UP_SIZE)
            elif numbers.ndim == 4:  # blocks: any bits are valid numbers, with an average magnitude of 3
                numbers.random_(0, 256)
            else:
                numbers.fill_(BIAS + round(math.log2(MADE_UP_SIZE / 3)))

    def forward(self, h_TD: torch.Tensor, experts_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        assert self._experts is not None
        return self._experts(h_TD, (experts_TA, weights_TA.float().contiguous()))


class WithFourBitExperts:
    """Marks a model class that has `FourBitExperts`."""


def with_four_bit_experts(model_class: Any) -> Any:
    """Derive a class from transformers' `model_class` with `FourBitExperts` in place of gpt-oss' experts. Its
    constructor raises `ValueError` if the model has no gpt-oss experts."""

    class Model(WithFourBitExperts, model_class):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            places = [
                (parent, name, module)
                for parent in self.modules()
                for name, module in parent.named_children()
                if isinstance(module, GptOssExperts)
            ]
            if not places:
                raise ValueError("config.json: quant_method mxfp4 is known of experts as gpt-oss has them")
            for parent, name, module in places:
                setattr(parent, name, FourBitExperts(module))

    return Model


def _without_numbers(E: int, N: int, K: int, device: torch.device) -> tuple[nn.Parameter, nn.Parameter]:
    shapes = ((E, N, K // GROUP, GROUP // 2), (E, N, K // GROUP))
    blocks, scales = (torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes)
    return nn.Parameter(blocks, requires_grad=False), nn.Parameter(scales, requires_grad=False)


def _stack(blocks: nn.Parameter, scales: nn.Parameter, bias: nn.Parameter) -> FourBitStack:
    return FourBitStack(blocks.data.flatten(2), scales.data, bias.data)
