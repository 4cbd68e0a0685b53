"""A mixture of experts: a token's feed-forward is the sum of a few experts, chosen by scores, and of the shared ones.

DeepSeek-AI, "DeepSeekMoE", 2024 (arXiv 2401.06066). expert_choice.py chooses the experts.

Tokens are sorted by expert (chosen_experts.py) and multiplied with all experts' weights at once (expert_products.py).
No length goes back to the host, so that a CUDA graph can record it. An expert's output for a token is a row of a
product, and a token's experts are added up in the order in which they were chosen. So the result depends on the rest of
the batch only as far as rows of products do.

With several ranks, each has a part of every expert and of the shared ones. All ranks choose the same experts, and one
sum over ranks completes both.

Shapes: T tokens, D hidden, E experts, G groups, A experts of a token, R = T * A rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.models.expert_choice import Choice
from engine.models.experts_config import ExpertsConfig
from engine.models.feed_forward import GatedFeedForward
from engine.models.parts import PartsFactory


class Router:
    """Chooses each token's experts and their weights, in float32."""

    def __init__(self, config: ExpertsConfig, factory: PartsFactory, name: str, hidden_size: int) -> None:
        self.config = config
        self._choose_experts = factory.parts.choose_experts
        E = config.num_experts
        self.logits = factory.parts.expert_scores(factory.weights.take(f"{name}.weight", (E, hidden_size)))
        self.bias_E = None
        if config.scoring == "sigmoid":
            # float32: differences between experts are far below the precision of 16 bits.
            self.bias_E = factory.weights.take(f"{name}.e_score_correction_bias", (E,), torch.float32)

    def __call__(self, h_TD: torch.Tensor) -> Choice:
        return self._choose_experts(self.logits(h_TD), self.bias_E, self.config)


class ExpertsFeedForward:
    def __init__(self, config: ExpertsConfig, factory: PartsFactory, name: str, hidden_size: int, has_bias: bool):
        """`has_bias`: whether the shared experts have biases."""
        self.router = Router(config, factory, f"{name}.gate", hidden_size)
        self.shared = None
        if config.num_shared_experts:
            size = config.num_shared_experts * config.intermediate_size
            parts = replace(factory.parts, sum_over_ranks=None)  # summed together with the chosen experts below
            alone = replace(factory, parts=parts)
            self.shared = GatedFeedForward(alone, f"{name}.shared_experts", hidden_size, size, has_bias)
        self._sum_over_ranks = factory.parts.sum_over_ranks
        products = factory.experts(f"{name}.experts", config, hidden_size)
        self.experts = factory.parts.chosen_experts(products, config.num_experts, factory.weights.device)
        self.reads_back = self.experts.reads_back

    def __call__(self, h_TD: torch.Tensor) -> torch.Tensor:
        o_TD = self.experts(h_TD, self.router(h_TD))
        if self.shared is not None:
            o_TD = o_TD + self.shared(h_TD)
        return o_TD if self._sum_over_ranks is None else self._sum_over_ranks(o_TD)
