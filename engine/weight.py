"""A weight of a product, [outputs, inputs]: a tensor, or fewer bits with what they are multiplied by beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.int4_weight import Int4Weight, quantize_int4
from engine.narrow_weight import Join, joined_narrow
from engine.scaled_weight import ScaledWeight

Weight = torch.Tensor | ScaledWeight | Int4Weight
"""Not a tensor where the products to be made are in fewer bits, and nowhere else."""


def dequantized(weight: Weight) -> torch.Tensor:
    """[N, K] in the model's dtype."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized()


def as_int4(weight: Weight) -> Int4Weight:
    """Quantised, where it is not in 4 bits."""
    return weight if isinstance(weight, Int4Weight) else quantize_int4(dequantized(weight))


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights of the same inputs, one below the other."""
    return joined(weights, torch.cat)


def joined(weights: Sequence[Weight], join: Join) -> Weight:
    """As one, of outputs of all: in fewer bits where all are in the same form."""
    narrow = [weight for weight in weights if not isinstance(weight, torch.Tensor)]
    if len(narrow) == len(weights) and len({weight.form for weight in narrow}) == 1:
        return joined_narrow(narrow, join)
    return join([dequantized(weight) for weight in weights])


def part_of(weight: Weight, axis: int, part: range) -> Weight:
    """A copy of those outputs (axis 0) or inputs (axis 1), or of those elements of a bias. Raises `ValueError` where
    inputs that share a scale would be cut."""
    if isinstance(weight, torch.Tensor):
        return weight.narrow(axis, part.start, len(part)).clone(memory_format=torch.contiguous_format)
    return weight.part(axis, part)
