"""The common base of quantised weights: several tensors with one row for each output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import torch

Join = Callable[[list[torch.Tensor]], torch.Tensor]
"""Joins the tensors of several weights, whose first axis is outputs, into one."""


class NarrowWeight(ABC):
    __slots__ = ()

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The weight's tensors; outputs are the first axis of each."""

    @property
    @abstractmethod
    def form(self) -> tuple[object, ...]:
        """Weights with equal forms can be joined."""

    @abstractmethod
    def like(self, *tensors: torch.Tensor) -> Self:
        """Make a weight of the same form from `tensors`."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """[N, K] in the model's dtype."""

    def __len__(self) -> int:
        return len(self.tensors[0])

    def rows(self, part: range) -> Self:
        """A view of some outputs."""
        return self.like(*(each[part.start : part.stop] for each in self.tensors))

    def with_room(self, num_outputs: int) -> Self:
        """A weight of the same form with `num_outputs` uninitialised outputs."""
        return self.like(*(each.new_empty(num_outputs, *each.shape[1:]) for each in self.tensors))


W = TypeVar("W", bound=NarrowWeight)


def joined_narrow(weights: Sequence[W], join: Join) -> W:
    """Join weights of the same form along their outputs."""
    return weights[0].like(*(join([*each]) for each in zip(*(weight.tensors for weight in weights), strict=True)))
