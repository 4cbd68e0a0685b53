"""The weighted sum of each token's chosen experts.

Rows are sorted by expert, multiplied by one of the classes in expert_products.py, and added up in the order in which a
token's experts were chosen.

Shapes: T tokens, D hidden, E experts, A experts of a token, R = T * A rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.models.expert_choice import Choice
from engine.models.expert_products import ExpertProducts

SumOfExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Has the signature of `sum_of_experts`."""


def sum_of_experts(y_RD: torch.Tensor, order_R: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
    """Sum each token's weighted expert outputs in float32: [T, D] in y's dtype.

    `order_R`: int64, the token and choice (t * A + a) of each row.
    """
    y_TAD = torch.empty_like(y_RD).index_copy_(0, order_R, y_RD).view(*weights_TA.shape, -1)
    return (y_TAD * weights_TA.unsqueeze(-1)).sum(dim=1).to(y_RD.dtype)


class ChosenExperts:
    def __init__(
        self,
        products: ExpertProducts,
        num_experts: int,
        device: torch.device | str,
        sum_of_experts: SumOfExperts = sum_of_experts,
    ) -> None:
        self.reads_back = products.reads_back
        self._products, self._sum_of_experts = products, sum_of_experts
        self._experts_E = torch.arange(num_experts, device=device)

    def __call__(self, h_TD: torch.Tensor, choice: Choice) -> torch.Tensor:
        experts_TA, weights_TA = choice
        sorted_experts, order = experts_TA.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_experts, self._experts_E, right=True, out_int32=True)
        y_RD = self._products(h_TD[order // experts_TA.shape[1]], ends_E)
        return self._sum_of_experts(y_RD, order, weights_TA)
