"""How a layer turns products of queries and keys into scores, before the softmax. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


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


class Rotation(NamedTuple):
    """How transformers' code rotates queries and keys by tables of cosines and sines."""

    of_neighbours: bool
    """A number is rotated with its neighbour. Otherwise with the one half of all rotated numbers further on."""
    table: Literal["per number", "per pair", "per pair, twice"]
    """What the tables have: a cosine for each number, one for each pair, or one for each pair whose repetition is not
    read."""

    def num_rotated(self, table_size: int) -> int:
        """How many of a head's numbers, from the first on, are rotated."""
        return 2 * table_size if self.table == "per pair" else table_size


ROTATIONS = (
    Rotation(of_neighbours=False, table="per number"),
    Rotation(of_neighbours=False, table="per pair"),
    Rotation(of_neighbours=True, table="per number"),
    Rotation(of_neighbours=True, table="per pair, twice"),
)


@dataclass(frozen=True, kw_only=True)
class AttentionModule:
    """The attention of one layer in transformers' code."""

    name: str
    """Path of the module that calls transformers' attention interface, within the causal language model."""
    scores: Scores
    has_sinks: bool = False
    """The module passes attention sinks (`AttentionBackend.attend`)."""
    rotation: Rotation | None = None
    """Of its queries and keys, right before it attends, where we may do it instead."""
