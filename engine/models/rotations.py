"""What our kernels need to rotate queries and keys as transformers' code would.

They rotate a number with the one half of a head further on. Where the code rotates neighbours, the numbers of queries
and keys are put in another order first, and stay so in the pool: their products are the same.

Shapes: T tokens, N heads, H head dim, C numbers of a row of the code's tables, R rotated numbers of a head.
"""

from __future__ import annotations

import torch

from engine.layers import CosSin
from engine.models.scores import Rotation


def cos_sin_of(rotation: Rotation, cos_1TC: torch.Tensor, sin_1TC: torch.Tensor) -> CosSin:
    """The code's tables as our kernels read them."""
    cos_T1R, sin_T1R = (_of_halves(rotation, table[0].unsqueeze(1)) for table in (cos_1TC, sin_1TC))
    half = sin_T1R.shape[-1] // 2
    return cos_T1R.contiguous(), torch.cat((-sin_T1R[..., :half], sin_T1R[..., half:]), dim=-1)


def in_halves(rotation: Rotation, x: torch.Tensor, table_size: int) -> torch.Tensor:
    """[..., H]: the same numbers, those that are rotated together half of R apart."""
    if not rotation.of_neighbours:
        return x
    R = rotation.num_rotated(table_size)
    return torch.cat((_apart(x[..., :R]), x[..., R:]), dim=-1)


def _of_halves(rotation: Rotation, table: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., R]"""
    if rotation.table == "per number":
        return _apart(table) if rotation.of_neighbours else table
    if rotation.table == "per pair, twice":
        table = table[..., : table.shape[-1] // 2]
    return torch.cat((table, table), dim=-1)


def _apart(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
