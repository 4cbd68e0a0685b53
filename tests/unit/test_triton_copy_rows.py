"""The kernel that copies rows to an address writes the named rows, all of each, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_accesses import known_by_address
from triton_device import DEVICE

from engine.kernels.gpu.copy_rows import TILE_WORDS, copy_rows


@pytest.mark.parametrize("num_words", [1, 32, 1000, TILE_WORDS, TILE_WORDS + 1, 3 * TILE_WORDS])
def test_rows_lie_where_they_were_sent(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    source = torch.randint(-(2**62), 2**62, (7, num_words), generator=generator).to(DEVICE)
    target = torch.randint(-(2**62), 2**62, (1 + 9 + 1, num_words), generator=generator).to(DEVICE)
    before = target.clone()
    src, dst = [6, 0, 3, 3], [8, 2, 0, 5]
    with known_by_address(target[1:-1]):  # the pool
        copy_rows(source, target[1].data_ptr(), np.array([src, dst]))
    assert target[1:-1][dst].equal(source[src])
    rest = [row for row in range(11) if row - 1 not in dst]
    assert target[rest].equal(before[rest])


def test_no_rows_are_no_launch() -> None:
    copy_rows(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), 0, np.empty((2, 0), dtype=np.int64))
