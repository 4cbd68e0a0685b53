"""One layer of a decoder, made of any parts, and a stack of layers.

Defines the order within a layer: norm, attention, norm, feed-forward, and the two residual sums. Attention and
feed-forward are in engine/models/head_attention.py, feed_forward.py and their siblings.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine.layers import CosSin, RMSNorm

OnLayer = Callable[[int], None]


class Attention(Protocol):
    """A layer's attention, from the normed hidden state to what is added to the residual."""

    def __call__(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> torch.Tensor:
        """[T, D] -> [T, D]. `kv`: the layer's part of the pool, into which this writes the step's own KV."""

    def write(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> None:
        """Only write the step's own KV."""


class FeedForward(Protocol):
    def __call__(self, h_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D], each token independently."""


class DecoderLayer:
    """Attention and feed-forward of one layer."""

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, feed_forward: FeedForward
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.feed_forward = feed_forward

    def __call__(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, kv: torch.Tensor, plan: Any, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the hidden state as two terms, which the next norm adds up (fused add and norm)."""
        x_TD, h_TD = self.input_norm.add(x_TD, delta_TD)
        x_TD, h_TD = self.post_attention_norm.add(x_TD, self.attention(h_TD, kv, plan, cos_sin))
        return x_TD, self.feed_forward(h_TD)


class Features:
    """Hidden states between layers, side by side, for a draft head that reads them (engine/models/draft_head.py)."""

    def __init__(self, layers: tuple[int, ...], most_TF: torch.Tensor) -> None:
        """`layers`: a hidden state is taken before each of them; the number of all layers stands for after the last.
        `most_TF`: [most tokens of a step, layers * D], which each step overwrites: a recorded step writes to fixed
        addresses."""
        self.layers = layers
        self._most_TF = most_TF
        self._hidden_size = most_TF.shape[1] // len(layers)

    def of_step(self, num_tokens: int) -> torch.Tensor:
        """[T, layers * D], of the step that was launched last."""
        return self._most_TF[:num_tokens]

    def take(self, layer: int, x_TD: torch.Tensor, delta_TD: torch.Tensor | None) -> None:
        """Note the hidden state before `layer`, in two terms, if it is wanted."""
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                first = place * self._hidden_size
                out_TD = self._most_TF[: len(x_TD), first : first + self._hidden_size]
                out_TD.copy_(x_TD) if delta_TD is None else torch.add(x_TD, delta_TD, out=out_TD)


class LayerStack(Protocol):
    """All layers of a decoder."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: Any,
        cos_sin: CosSin,
        on_layer: OnLayer | None,
        features: Features | None,
    ) -> torch.Tensor:
        """The hidden state after the last layer: [T, D]. `x_TD` may be overwritten."""


class PlainLayers:
    """Calls one layer after the other."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self._layers = layers

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: Any,
        cos_sin: CosSin,
        on_layer: OnLayer | None,
        features: Features | None,
    ) -> torch.Tensor:
        delta_TD = None
        for i, layer in enumerate(self._layers):
            if features is not None:
                features.take(i, x_TD, delta_TD)
            x_TD, delta_TD = layer(x_TD, delta_TD, kv_pool[i], plan, cos_sin)
            if on_layer is not None:
                on_layer(i)
        if features is not None:
            features.take(len(self._layers), x_TD, delta_TD)
        return x_TD if delta_TD is None else x_TD + delta_TD
