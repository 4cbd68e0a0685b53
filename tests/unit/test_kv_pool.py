"""Copies of rows from one pool in host memory to another."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kv_transfer import host_pool as module
from kv_transfer.host_pool import HostPeerPool

ROW_BYTES = 64


def random_rows(num_rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, ROW_BYTES), dtype=np.uint8)


def never() -> float:
    return math.inf


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([3], [0]),
        ([3, 4, 5], [7, 8, 9]),
        ([3, 4, 5], [9, 8, 7]),
        ([5, 4, 3], [7, 8, 9]),
        ([5, 4, 3], [9, 8, 7]),
        ([0, 1, 2, 9, 10, 3], [4, 5, 6, 7, 0, 1]),
        ([0], [5]),
        (list(range(30)), list(range(10, 40))),
    ],
)
@pytest.mark.parametrize("max_piece_bytes", [1, ROW_BYTES, 3 * ROW_BYTES, 1 << 20])
def test_rows_arrive_and_others_stay(
    src: list[int], dst: list[int], max_piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", max_piece_bytes)
    source, target = random_rows(30, seed=1), random_rows(40, seed=2)
    wanted = target.copy()
    wanted[dst] = source[src]
    HostPeerPool(source, target).copy(np.array([src, dst]), never).synchronize()
    np.testing.assert_array_equal(target, wanted)


def test_it_asks_before_each_piece_and_stops() -> None:
    source = random_rows(2 * module.MAX_PIECE_BYTES // ROW_BYTES, seed=1)
    target = np.zeros_like(source)
    moments = iter([math.inf, -math.inf])
    rows = np.stack([np.arange(len(source))] * 2)
    HostPeerPool(source, target).copy(rows, lambda: next(moments))
    half = len(source) // 2
    np.testing.assert_array_equal(target[:half], source[:half])
    assert not target[half:].any()
