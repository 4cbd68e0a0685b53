"""The part that one of several ranks has of a model that transformers' code computes: an interface, which
engine/tensor_parallel/transformers_share.py implements."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from engine.layers import Linear
from engine.models.expert_products import ExpertWeight
from engine.narrow_weight import NarrowWeight

AnyWeight = torch.Tensor | NarrowWeight


class Share(Protocol):
    """Products and experts go by the names of their modules. Raises `ValueError` where inputs that share a scale cannot
    be cut."""

    def is_cut(self, name: str) -> bool:
        """Whether this rank has only a part of a product."""

    def is_gathered(self, name: str) -> bool:
        """Whether what follows a product uses the outputs of all ranks, of which this one computes a part."""

    def own_size(self, name: str, size: tuple[int, int]) -> tuple[int, int]:
        """(outputs, inputs) of the rank's part of a product, from the whole product's."""

    def weight(self, name: str, weight: AnyWeight, size: tuple[int, int]) -> AnyWeight:
        """The rank's part of a product's weight. `size`: the whole's outputs and inputs."""

    def bias(self, name: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What the rank adds of a product's bias."""

    def joined(self, name: str, linear: Linear, size: tuple[int, int]) -> Linear:
        """The product, from what each rank computes of it; this one: `linear`. `size`: outputs, inputs of the whole."""

    def cut_experts(self, causal_lm: nn.Module, stored: dict[str, list[ExpertWeight]]) -> None:
        """Leave the rank's part of each expert, in the modules of transformers' that hold them, and in `stored`
        (weights in 8 or 4 bits, by the names of the modules)."""

    def sum_experts(self, causal_lm: nn.Module) -> None:
        """Let the modules that compute experts, of which each rank has a part, return the sums of all ranks."""

    def own_heads(self, x_1N: torch.Tensor, num_own: int) -> torch.Tensor:
        """The rank's heads, of all or of these alone: [1, N, …] -> [1, num_own, …]."""

    def all_heads(self, o_TX: torch.Tensor, size: int) -> torch.Tensor:
        """What attention yields of all heads, from that of each rank's: [T, own heads * H] -> [T, size]."""
