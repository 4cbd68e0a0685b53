"""Experts of ours in the place of transformers', where weights in MXFP4 stay so.

    with_four_bit_experts(class) ──transformers makes and loads one──> FourBitExperts ──compute_by(parts)──> serves

Their parameters have the names that a checkpoint gives its tensors, so that whoever loads it needs to know nothing.

Shapes: T tokens, D hidden, A experts of each, E experts, I intermediate, G = inputs / 32 groups.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.models.experts import ChosenExperts
from engine.models.four_bit_experts import BIAS, GROUP, ClampedGate, FourBitStack
from engine.models.parts import Parts

MADE_UP_SIZE = 0.02


class FourBitExperts(nn.Module):
    """Called as `GptOssExperts` is."""

    def __init__(self, like: GptOssExperts) -> None:
        """`like`: of the same sizes, whose biases are taken over."""
        super().__init__()
        E, D, X = like.gate_up_proj.shape
        device = like.gate_up_proj.device
        self._gate = ClampedGate(alpha=like.alpha, limit=like.limit)
        self.gate_up_proj_blocks, self.gate_up_proj_scales = _without_numbers(E, X, D, device)
        self.down_proj_blocks, self.down_proj_scales = _without_numbers(E, D, X // 2, device)
        self.gate_up_proj_bias, self.down_proj_bias = like.gate_up_proj_bias, like.down_proj_bias
        self._experts: ChosenExperts | None = None

    def compute_by(self, parts: Parts) -> None:
        """Once the weights are there."""
        assert parts.four_bit_experts is not None
        gate_up = _stack(self.gate_up_proj_blocks, self.gate_up_proj_scales, self.gate_up_proj_bias)
        down = _stack(self.down_proj_blocks, self.down_proj_scales, self.down_proj_bias)
        products = parts.four_bit_experts(gate_up, down, self._gate)
        self._experts = ChosenExperts(products, parts.sum_of_experts, len(down.bias), down.bias.device)

    def make_up_weights(self) -> None:
        """Numbers as those that transformers begins training with, some 0.02 large. From torch's generator."""
        for parameter in self.parameters():
            numbers = parameter.data
            if numbers.is_floating_point():
                numbers.normal_(std=MADE_UP_SIZE)
            elif numbers.ndim == 4:  # blocks, of which any bits are numbers; on average they are 3
                numbers.random_(0, 256)
            else:
                numbers.fill_(BIAS + round(math.log2(MADE_UP_SIZE / 3)))

    def forward(self, h_TD: torch.Tensor, experts_TA: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
        assert self._experts is not None
        return self._experts(h_TD, (experts_TA, weights_TA.float().contiguous()))


class WithFourBitExperts:
    """A model that has them."""


def with_four_bit_experts(model_class: Any) -> Any:
    """A class of models like `model_class`, a causal language model of transformers', with such experts in place of
    gpt-oss'. Making one raises `ValueError` where it has others."""

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
