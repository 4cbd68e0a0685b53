"""What transformers' code has after a model's body: the way from hidden states to logits.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast


class Head:
    """Computes logits from hidden states, with everything that a causal language model has after its body (such as a
    cap, a scale, a bias). Removes the body from the model."""

    def __init__(self, model: Any, body: str) -> None:
        self._model = model
        self._handed_over = _HandedOver(model.get_submodule(body))
        model.set_submodule(body, self._handed_over)

    def logits(self, x_1TD: torch.Tensor) -> torch.Tensor:
        """[1, T, D] -> [1, T, V]"""
        self._handed_over.x_1TD = x_1TD
        logits_1TV: torch.Tensor = self._model(inputs_embeds=x_1TD, use_cache=False).logits
        self._handed_over.x_1TD = None
        return logits_1TV


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """A body's output. Further attributes, which heads read to pass them on (such as router logits), are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _HandedOver(nn.Module):
    """Replaces a body, and returns hidden states that were computed before. Heads may read the body's numbers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.x_1TD: torch.Tensor | None = None
        numbers = {name: value for name, value in vars(body).items() if isinstance(value, (int, float))}
        for name in numbers.keys() - vars(self).keys():
            setattr(self, name, numbers[name])

    def forward(self, *_args: object, **_kwargs: object) -> _Hidden:
        assert self.x_1TD is not None
        return _Hidden(last_hidden_state=self.x_1TD)
