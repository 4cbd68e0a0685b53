"""A weight of a product: a tensor, or numbers in 8 bits with their scales beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_FLOATS = 1 << 22
"""Of a weight in 8 bits that are widened at once: 16 MiB beside the weight and what becomes of it. Four times as many
take a CPU twice the time."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight in 8 bits as a checkpoint has it: `weight * scale`, a scale for each output and each group of inputs.

    Shapes: N outputs, K inputs, G groups.
    """

    weight: torch.Tensor
    """[N, K] int8 or float8_e4m3fn."""
    scale: torch.Tensor
    """[N, G] float32."""
    group_size: int
    """Inputs that share a scale, the last group may have fewer; K where G is 1."""
    dtype: torch.dtype
    """Of the model: what the weight stands for."""

    @property
    def has_groups(self) -> bool:
        return self.scale.shape[1] > 1

    def dequantized(self) -> torch.Tensor:
        """[N, K] in `dtype`: multiplied in float32, then rounded."""
        num_outputs, num_inputs = self.weight.shape
        wide_NK = torch.empty(num_outputs, num_inputs, dtype=self.dtype, device=self.weight.device)
        num_rows = max(MAX_FLOATS // max(num_inputs, 1), 1)
        for start in range(0, num_outputs, num_rows):
            rows = slice(start, start + num_rows)
            scale = self.scale[rows]
            if self.has_groups:
                scale = scale.repeat_interleave(self.group_size, dim=1)[:, :num_inputs]
            wide_NK[rows] = self.weight[rows].float() * scale
        return wide_NK


Weight = torch.Tensor | ScaledWeight
"""[outputs, inputs]. `ScaledWeight` where the products to be made are in 8 bits, and nowhere else."""


def stacked(weights: Sequence[Weight]) -> Weight:
    """Weights of the same inputs, one below the other: in 8 bits where all are in the same, with groups alike."""
    scaled = [weight for weight in weights if isinstance(weight, ScaledWeight)]
    kinds = {(each.weight.dtype, each.group_size) for each in scaled}
    if len(scaled) < len(weights) or len(kinds) > 1:
        return torch.cat([weight.dequantized() if isinstance(weight, ScaledWeight) else weight for weight in weights])
    # As bytes: not every device can put 8-bit floats together.
    as_bytes = torch.cat([each.weight.view(torch.uint8) for each in scaled])
    scale_NG = torch.cat([each.scale for each in scaled])
    ((dtype, group_size),) = kinds
    return ScaledWeight(as_bytes.view(dtype), scale_NG, group_size, scaled[0].dtype)


def part_of(weight: Weight, axis: int, part: range) -> Weight:
    """A copy of those outputs (axis 0) or inputs (axis 1), or of those elements of a bias. Raises `ValueError` where
    inputs that share a scale would be cut."""
    if isinstance(weight, torch.Tensor):
        return weight.narrow(axis, part.start, len(part)).clone(memory_format=torch.contiguous_format)
    # As bytes: not every device can copy 8-bit floats.
    as_bytes = weight.weight.view(torch.uint8).narrow(axis, part.start, len(part))
    cut = as_bytes.clone(memory_format=torch.contiguous_format).view(weight.weight.dtype)
    group_size, scale_NG = weight.group_size, weight.scale
    if axis == 0:
        return ScaledWeight(cut, scale_NG[part.start : part.stop].clone(), group_size, weight.dtype)
    if not weight.has_groups:
        return ScaledWeight(cut, scale_NG, len(part), weight.dtype)
    if part.start % group_size or len(part) % group_size:
        raise ValueError(f"tensor_parallel_size cuts a weight at input {part.start}, where {group_size} share a scale")
    groups = slice(part.start // group_size, part.stop // group_size)
    return ScaledWeight(cut, scale_NG[:, groups].clone(), group_size, weight.dtype)
