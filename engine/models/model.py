"""The interface of models for the runner: our decoder (decoder.py) and transformers' code (transformers_model.py)
implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.models.layer import Features, OnLayer

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters
    from engine.models.recurrent_states import RecurrentStates


class Model(Protocol):
    """Owns the weights. Knows neither sequences nor blocks: tokens are flattened, and the backend does attention.

    Shapes: T tokens, D hidden, V vocabulary.
    """

    adapters: Adapters | None
    """The engine's adapters. The caller of `forward` must first assign the step's rows to them (`Adapters.assign`)."""

    states: RecurrentStates | None
    """What layers keep besides keys and values; None: nothing. The caller of `forward` must first assign the step's
    sequences to them (`RecurrentStates.assign`)."""

    reads_back: bool
    """A step reads values back from the device, so that steps cannot be recorded."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """Compute each token's input for `compute_logits`: [T, D].

        `on_layer(i)` is called when the pool holds layer i's KV of this step.
        """

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V], in the model's dtype or wider."""


class FeatureSource(Model, Protocol):
    """A model whose hidden states a draft head may read (engine/models/draft_head.py)."""

    @property
    def embedding_VD(self) -> torch.Tensor: ...  # noqa: N802 - named for its axes

    def let_note(self, features: Features) -> None:
        """Note hidden states between layers in each `forward` from now on. Raises `ValueError` if there are none."""
