"""What a layer makes of the products of queries and keys, before their softmax. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one layer: equal ones share what a backend prepares for a step."""

    scale: float
    """What a product is multiplied with."""
    sliding_window: int = 0
    """A token sees itself and this many minus one before it; 0: all before it."""
    soft_cap: float = 0.0
    """c > 0: a scaled product s becomes c * tanh(s / c). 0: it stays."""

    @staticmethod
    def of(head_dim: int, sliding_window: int = 0, soft_cap: float = 0.0) -> Scores:
        """With the usual scale (A. Vaswani et al., "Attention Is All You Need", 2017)."""
        return Scores(head_dim**-0.5, sliding_window, soft_cap)


@dataclass(frozen=True, kw_only=True)
class AttentionModule:
    """Where a layer of somebody else's code attends, and how."""

    name: str
    """Of the module that calls transformers' attention interface, from the causal language model on."""
    scores: Scores
    has_sinks: bool = False
    """It hands over a score for each query head that has no value (`AttentionBackend.attend`)."""
