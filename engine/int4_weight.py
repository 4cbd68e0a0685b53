"""A product's weight in 4 bits: integers, with a scale and an offset for each output and group of inputs.

    number = integer * scale + offset     in float32, rounded once; then to the model's dtype

This covers all 4-bit formats: with a zero point z the offset is -z * scale, and with blocks that have a smallest number
the offset is that number. With scales of at most 20 significant bits, such as bfloat16 or float16, both
integer * scale and (integer - z) * scale are exact, so that only the final rounding to the dtype remains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.grains import INT4_GRAIN, INT4_GROUP_SIZE
from engine.narrow_weight import NarrowWeight, cannot_cut, check_finite, joined_narrow

LEVELS = 16
MAX_NUMBERS = 1 << 20
"""Numbers that are dequantised at once: 8 MiB of scratch in float64."""


@dataclass(frozen=True, slots=True)
class Int4Weight(NarrowWeight):
    """[N, K] as integers from 0 to 15 with scales and offsets.

    Shapes: N outputs, K inputs, G groups of an even number of them.
    """

    packed: torch.Tensor
    """[N, K / 2] uint8: input 2i in the lower half of byte i, input 2i + 1 in the upper one."""
    scale: torch.Tensor
    """[N, G] float32."""
    offset: torch.Tensor
    """[N, G] float32."""
    dtype: torch.dtype
    """The model's dtype, to which the weight is dequantised."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.packed, self.scale, self.offset

    @property
    def num_inputs(self) -> int:
        return 2 * self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale and an offset."""
        return self.num_inputs // self.scale.shape[1]

    @staticmethod
    def of_integers(
        integers_NK: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, dtype: torch.dtype
    ) -> Int4Weight:
        """`integers_NK`: 0 to 15, in any integer dtype."""
        pairs = integers_NK.to(torch.uint8).reshape(len(integers_NK), -1, 2)
        packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
        return Int4Weight(packed.contiguous(), scale.contiguous(), offset.contiguous(), dtype)

    def integers(self) -> torch.Tensor:
        """[N, K] uint8."""
        return torch.stack((self.packed & 15, self.packed >> 4), dim=2).flatten(1)

    def dequantized(self) -> torch.Tensor:
        """[N, K] in `dtype`."""
        wide_NK = torch.empty(len(self), self.num_inputs, dtype=self.dtype, device=self.packed.device)
        num_rows = max(MAX_NUMBERS // max(self.num_inputs, 1), 1)
        for start in range(0, len(self), num_rows):
            rows = self.rows(range(start, start + num_rows))
            of_groups = rows.integers().view(*rows.scale.shape, -1).double()
            # In float64, product and sum are exact, so that only the conversion to float32 rounds, as in a fused
            # multiply-add.
            of_groups.mul_(rows.scale[:, :, None]).add_(rows.offset[:, :, None])
            wide_NK[start : start + num_rows] = of_groups.float().flatten(1)
        return wide_NK

    @property
    def form(self) -> tuple[object, ...]:
        return "int4", self.group_size

    def like(self, *tensors: torch.Tensor) -> Int4Weight:
        packed, scale, offset = tensors
        return Int4Weight(packed, scale, offset, self.dtype)

    def _inputs(self, part: range) -> Int4Weight:
        """If a group is cut, its pieces become groups with the same scale. Raises `ValueError` if their size would not
        be a multiple of INT4_GRAIN."""
        size = math.gcd(self.group_size, part.start, len(part))
        if size != self.group_size and size % INT4_GRAIN:
            raise cannot_cut(part, self.group_size)
        groups = torch.arange(part.start, part.stop, size, device=self.scale.device) // self.group_size
        packed = self.packed[:, part.start // 2 : part.stop // 2].clone(memory_format=torch.contiguous_format)
        return Int4Weight(packed, self.scale.index_select(1, groups), self.offset.index_select(1, groups), self.dtype)


def quantize_int4(weight_NK: torch.Tensor, group_size: int = INT4_GROUP_SIZE) -> Int4Weight:
    """Quantise: each group's smallest number becomes 0, its largest 15. Scale and offset are rounded to bfloat16
    (float32 for other dtypes) before the integers are rounded to the nearest. `group_size` must divide the inputs.

    Processes some rows at a time, since intermediate results take several times a weight's size. Raises `ValueError` if
    a weight is not finite.
    """
    num_rows = max(MAX_NUMBERS // weight_NK.shape[1], 1)
    return joined_narrow([_quantized(rows, group_size) for rows in torch.split(weight_NK, num_rows)], torch.cat)


def _quantized(weight_NK: torch.Tensor, group_size: int) -> Int4Weight:
    dtype = weight_NK.dtype
    groups = weight_NK.float().view(len(weight_NK), -1, group_size)
    low, high = groups.aminmax(dim=2)
    check_finite(low, high)
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    offset = low.to(kept).float()
    scale = ((high - offset) / (LEVELS - 1)).to(kept).float().clamp_min(torch.finfo(torch.float32).tiny)
    integers = ((groups - offset[:, :, None]) / scale[:, :, None]).round_().clamp_(0, LEVELS - 1)
    return Int4Weight.of_integers(integers.flatten(1), scale, offset, dtype)
