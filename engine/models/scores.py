"""How a layer turns products of queries and keys into scores, before the softmax. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one layer. Layers with equal scores share what a backend prepares for a step."""

    scale: float
    """Factor of the products."""
    sliding_window: int = 0
    """A token sees itself and this many minus one before it; 0: all before it."""
    soft_cap: float = 0.0
    """c > 0: a scaled product s becomes c * tanh(s / c). 0: no cap."""

    @staticmethod
    def of(head_dim: int, sliding_window: int = 0, soft_cap: float = 0.0) -> Scores:
        """Scores with the usual scale (A. Vaswani et al., "Attention Is All You Need", 2017)."""
        return Scores(head_dim**-0.5, sliding_window, soft_cap)


@dataclass(frozen=True, kw_only=True)
class AttentionModule:
    """The attention of one layer in transformers' code."""

    name: str
    """Path of the module that calls transformers' attention interface, within the causal language model."""
    scores: Scores
    has_sinks: bool = False
    """The module passes attention sinks (`AttentionBackend.attend`)."""
