"""A head that guesses a model's next tokens from the model's own hidden states: the interface of eagle_head.py and
mtp_head.py for what drives them (engine/running/head_drafter.py).

    the model's hidden states ──fused──> a feature of each token
    token t and the feature of the token before t ──read──> keys and values in the pool, with each step of the model
                                                  ──forward──> a guess, and the feature of t, if t is a guess

Shapes: T tokens, D numbers of a feature, F numbers of the hidden states that one is made from.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.models.model import Model


class DraftHead(Model, Protocol):
    """A `Model` of one layer, whose `forward` also reads `features_TD`. Owns its weights, and the tensors in which
    features come in and go out: a recorded step reads and writes at fixed addresses."""

    features_TD: torch.Tensor  # noqa: N815 - named for its axes
    """The features that `forward` reads: the first T rows."""

    outputs_TD: torch.Tensor  # noqa: N815
    """The features that the last `forward` left: the first T rows."""

    def fused(self, features_TF: torch.Tensor) -> torch.Tensor:
        """[T, F] -> [T, D]: hidden states of the model, side by side, to features."""

    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, features_TD: torch.Tensor, plan: Any, kv: torch.Tensor
    ) -> None:
        """Write the keys and values of tokens, each with the feature of the token before it, to `kv`, the head's layer
        of the pool."""
