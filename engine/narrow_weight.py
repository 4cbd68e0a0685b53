"""What weights of products in fewer bits have in common: tensors that lie side by side, one row for each output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import torch

Join = Callable[[list[torch.Tensor]], torch.Tensor]
"""Makes one tensor of those of several weights, whose first axis is that of outputs."""


class NarrowWeight(ABC):
    __slots__ = ()

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Each with an axis of outputs, and others."""

    @property
    @abstractmethod
    def form(self) -> tuple[object, ...]:
        """Equal of weights that can be joined."""

    @abstractmethod
    def like(self, *tensors: torch.Tensor) -> Self:
        """One of these `tensors`, in the same form."""

    def __len__(self) -> int:
        return len(self.tensors[0])

    def rows(self, part: range) -> Self:
        """Those outputs. Not a copy."""
        return self.like(*(each[part.start : part.stop] for each in self.tensors))

    def with_room(self, num_outputs: int) -> Self:
        """One of so many outputs, with any numbers."""
        return self.like(*(each.new_empty(num_outputs, *each.shape[1:]) for each in self.tensors))


W = TypeVar("W", bound=NarrowWeight)


def joined_narrow(weights: Sequence[W], join: Join) -> W:
    """As one, of outputs of all. They are of one form."""
    return weights[0].like(*(join([*each]) for each in zip(*(weight.tensors for weight in weights), strict=True)))
