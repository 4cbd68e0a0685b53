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

    def part(self, axis: int, part: range) -> Self:
        """Copy some outputs (axis 0) or inputs (axis 1). Raises `ValueError` if inputs that share a scale cannot be cut
        there."""
        return self.like(*(each.clone() for each in self.rows(part).tensors)) if axis == 0 else self._inputs(part)

    @abstractmethod
    def _inputs(self, part: range) -> Self:
        """Copy some inputs."""

    def to(self, device: str) -> Self:
        return self.like(*(each.to(device) for each in self.tensors))

    def with_room(self, num_outputs: int) -> Self:
        """A weight of the same form with `num_outputs` uninitialised outputs."""
        return self.like(*(each.new_empty(num_outputs, *each.shape[1:]) for each in self.tensors))


def cannot_cut(part: range, group_size: int) -> ValueError:
    """The error if `part` begins or ends among inputs that share a scale."""
    at = part.stop if part.start % group_size == 0 else part.start
    return ValueError(
        f"tensor_parallel_size cuts a weight at input {at}, where {group_size} share a scale; give quantization none"
    )


def check_finite(*extremes: torch.Tensor) -> None:
    """Raise `ValueError` if one of these, of a weight that is to be quantised, is not finite."""
    if not all(bool(each.isfinite().all()) for each in extremes):
        raise ValueError("weights that are not finite (NaN, infinity) cannot be quantised; give quantization none")


W = TypeVar("W", bound=NarrowWeight)


def joined_narrow(weights: Sequence[W], join: Join) -> W:
    """Join weights of the same form along their outputs."""
    return weights[0].like(*(join([*each]) for each in zip(*(weight.tensors for weight in weights), strict=True)))
