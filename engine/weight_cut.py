"""The part of a product's weight that one owner has, such as one of several ranks. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OUTPUTS, INPUTS = 0, 1
"""Axes of a weight."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part `index` of `num_parts` along an axis."""

    axis: int
    num_parts: int
    index: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole's shape, from a part's shape."""
        return tuple(size * self.num_parts if i == self.axis else size for i, size in enumerate(shape))

    def part(self, shape: tuple[int, ...]) -> range:
        """The part's range in the whole, along the axis."""
        size = shape[self.axis]
        return range(self.index * size, (self.index + 1) * size)

    def part_of(self, size: int) -> range:
        """The part's range in a whole of this size along the axis."""
        return self.part((size // self.num_parts,) * (self.axis + 1))

    def part_in_groups(self, size: int, group_size: int) -> range:
        """Like `part_of`, in whole groups, of which some parts have one more than others."""
        num_groups = size // group_size
        first, end = (i * num_groups // self.num_parts for i in (self.index, self.index + 1))
        return range(first * group_size, end * group_size)


CutOf = Callable[[str], Cut | None]
"""Maps a product's name to its cut; None: the whole product."""


def uncut(product: str) -> Cut | None:
    del product
    return None
