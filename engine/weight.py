"""A product's weight, [outputs, inputs]: a tensor, or a quantised weight with its scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.int4_weight import Int4Weight, quantize_int4
from engine.narrow_weight import Join, joined_narrow
from engine.scaled_weight import ScaledWeight

Weight = torch.Tensor | ScaledWeight | Int4Weight
"""Quantised only if the products made from it are, too."""
Quantise = Callable[[Weight], Weight]
"""Puts a weight into some form, unless it has it already. Raises `ValueError` if it cannot have it."""


def dequantized(weight: Weight) -> torch.Tensor:
    """[N, K] in the model's dtype."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()


def as_it_is(weight: Weight) -> Weight:
    return weight


def as_int4(weight: Weight) -> Int4Weight:
    """Quantise the weight unless it is in 4 bits already."""
    return weight if isinstance(weight, Int4Weight) else quantize_int4(dequantized(weight))


def stacked(weights: Sequence[Weight]) -> Weight:
    """Stack weights of the same inputs along their outputs."""
    return joined(weights, torch.cat)


def joined(weights: Sequence[Weight], join: Join) -> Weight:
    """Join weights along their outputs. The result is quantised if all weights have the same quantised form."""
    narrow = [weight for weight in weights if not isinstance(weight, torch.Tensor)]
    if len(narrow) == len(weights) and len({weight.form for weight in narrow}) == 1:
        return joined_narrow(narrow, join)
    return join([dequantized(weight) for weight in weights])


def part_of(weight: Weight, axis: int, part: range) -> Weight:
    """Copy some outputs (axis 0) or inputs (axis 1), or some elements of a bias. Raises `ValueError` if inputs that
    share a scale cannot be cut there."""
    if isinstance(weight, torch.Tensor):
        return weight.narrow(axis, part.start, len(part)).clone(memory_format=torch.contiguous_format)
    return weight.part(axis, part)
