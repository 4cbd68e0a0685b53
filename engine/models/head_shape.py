"""The shape of a layer's heads, and of a pool for layers whose heads differ. Integers only, no torch.

Gemma 4's layers with a sliding window have heads of another size and number than the others. A block of the pool then
has room for the largest token, and, by its number of bytes, is several blocks of a layer with smaller ones: see
`engine.attention.shaped_backend`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class HeadShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_size(self) -> int:
        """Numbers of a token's keys."""
        return self.num_kv_heads * self.head_dim


def pool_shape(shapes: Iterable[HeadShape]) -> HeadShape:
    """The shape of a pool for layers of all these shapes: a token of each of them takes a whole part of its tokens."""
    distinct = set(shapes)
    largest = max(distinct, key=lambda shape: (shape.token_size, shape))
    size = math.lcm(*(shape.token_size for shape in distinct))
    return largest._replace(num_kv_heads=size // largest.head_dim)


def why_not_together(shapes: Iterable[HeadShape]) -> str:
    """Why layers of these shapes cannot share a pool, as a clause; empty if they can."""
    distinct = sorted(set(shapes))
    is_told_apart = len({shape.head_dim for shape in distinct}) == len(distinct)
    if is_told_apart and pool_shape(distinct).token_size <= 2 * max(shape.token_size for shape in distinct):
        return ""
    return (
        f"its layers have heads of several shapes (query heads, key heads, size): {[tuple(each) for each in distinct]}"
    )
