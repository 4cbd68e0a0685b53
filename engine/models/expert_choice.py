"""Chooses each token's experts and their weights from the router's logits. In float32.

DeepSeek-AI, "DeepSeek-V2", section 2.2 (groups); "DeepSeek-V3 Technical Report", section 2.1.2 (sigmoid scores, and the
bias of the choice).

Shapes: T tokens, E experts, G groups, A experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.models.experts_config import ExpertsConfig

Choice = tuple[torch.Tensor, torch.Tensor]
"""Experts [T, A] int64, the most preferred first; weights [T, A] float32."""
ChooseExperts = Callable[[torch.Tensor, torch.Tensor | None, ExpertsConfig], Choice]
"""Has the signature of `choose_experts`."""
SMALLEST_SUM = 1e-20
"""Avoids a division by zero if weights sum up to zero."""


def choose_experts(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, config: ExpertsConfig) -> Choice:
    """`bias_E`: bias of the choice, with sigmoid scores. None: softmax scores."""
    scores_TE = logits_TE.softmax(dim=-1) if bias_E is None else logits_TE.sigmoid()
    preference_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if config.num_chosen_groups < config.num_groups:
        preference_TE = _of_best_groups(preference_TE, 1 if bias_E is None else 2, config)
    experts_TA = preference_TE.topk(config.num_experts_per_token, dim=-1).indices
    weights_TA = scores_TE.gather(1, experts_TA)
    if config.norms_weights:
        weights_TA = weights_TA / (weights_TA.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return experts_TA, weights_TA * config.scaling


def _of_best_groups(preference_TE: torch.Tensor, num_telling: int, config: ExpertsConfig) -> torch.Tensor:
    """Set the preferences of experts outside the best groups to minus infinity. A group's merit is the sum of its
    `num_telling` best experts."""
    in_groups = preference_TE.view(len(preference_TE), config.num_groups, -1)
    merit_TG = in_groups.topk(num_telling, dim=-1).values.sum(dim=-1)
    chosen = merit_TG.topk(config.num_chosen_groups, dim=-1).indices
    is_out_TG = torch.ones_like(merit_TG, dtype=torch.bool).scatter_(1, chosen, False)
    return in_groups.masked_fill(is_out_TG.unsqueeze(-1), float("-inf")).view_as(preference_TE)
