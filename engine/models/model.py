"""What the runner asks of a model, whoever computes it: our decoder (decoder.py) or transformers' code
(transformers_model.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.models.layer import OnLayer

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters


class Model(Protocol):
    """Owns the weights. Knows neither sequences nor blocks: tokens come flat, and attention is the backend's.

    Shapes: T tokens, D hidden, V vocabulary.
    """

    adapters: Adapters | None
    """Of the engine. Who calls `forward` has told them whose rows are whose."""

    reads_back: bool
    """A step asks for numbers of the device, so that none can be recorded."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """What `compute_logits` takes, of each token: [T, D].

        `on_layer(i)` is called when layer i's KV of this step is in the pool.
        """

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V], in the model's dtype or wider."""
