"""A product's weight in 8 bits, with its scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.narrow_weight import NarrowWeight, cannot_cut

MAX_FLOATS = 1 << 22
"""Numbers that are dequantised at once: 16 MiB of scratch. With four times as many, a CPU takes twice the time."""


@dataclass(frozen=True, slots=True)
class ScaledWeight(NarrowWeight):
    """A weight in 8 bits as in a checkpoint: `weight * scale`, with a scale for each output and group of inputs.

    Shapes: N outputs, K inputs, G groups.
    """

    weight: torch.Tensor
    """[N, K] int8 or float8_e4m3fn."""
    scale: torch.Tensor
    """[N, G] float32."""
    group_size: int
    """Inputs that share a scale; the last group may have fewer. K if G is 1."""
    dtype: torch.dtype
    """The model's dtype, to which the weight is dequantised."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers are viewed as bytes, since not every device can copy or concatenate 8-bit floats."""
        return self.weight.view(torch.uint8), self.scale

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

    @property
    def form(self) -> tuple[object, ...]:
        return self.weight.dtype, self.group_size

    def like(self, *tensors: torch.Tensor) -> ScaledWeight:
        as_bytes, scale_NG = tensors
        return ScaledWeight(as_bytes.view(self.weight.dtype), scale_NG, self.group_size, self.dtype)

    def _inputs(self, part: range) -> ScaledWeight:
        # As bytes: not every device can copy 8-bit floats.
        as_bytes = self.weight.view(torch.uint8)[:, part.start : part.stop]
        cut = as_bytes.clone(memory_format=torch.contiguous_format).view(self.weight.dtype)
        if not self.has_groups:
            return ScaledWeight(cut, self.scale, len(part), self.dtype)
        size = self.group_size
        if part.start % size or len(part) % size:
            raise cannot_cut(part, size)
        groups = slice(part.start // size, part.stop // size)
        return ScaledWeight(cut, self.scale[:, groups].clone(), size, self.dtype)
