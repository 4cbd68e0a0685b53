"""Slices of contexts that are unfolded: they contain what each query sees exactly once, and nothing else."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from attention_cases import Case

from engine.attention.latent_forms import Part, Unfolding, part_of, unfolded_seqs
from engine.attention.unfolded_slices import ALIGNMENT, FIRST, LAST, Slice, list_slices, slots_of_slice

STEPS = {
    "one": [(0, 40)],
    "a short slice's tokens": [(300, 90)],
    "some, the longest cut": [(5, 1), (0, 200), (520, 40), (3, 2), (0, 17), (128, 128)],
    "each fits, together they do not": [(0, 70), (30, 60), (0, 100), (1, 20)],
    "to the last slot": [(0, 128), (128, 128), (0, 256)],
}


def unfolded_part(lens: list[tuple[int, int]], block_size: int) -> Part:
    layout = Case(lens, num_heads=1, num_kv_heads=1, head_dim=1, block_size=block_size).layout
    part = part_of(layout, unfolded_seqs(layout, Unfolding(16, 1, 1)))
    assert part is not None
    return part


def seen_in(each: Slice, block_size: int) -> list[tuple[int, int, list[int]]]:
    """For each token of the step, the marks of its tile, and the pool's slots that the token sees, in order."""
    slots = (each.block_ids[:, None] * block_size + np.arange(block_size)).reshape(-1)
    told = []
    for first_token, num_tokens, row, num_seen, num_keys, marks in each.tiles.tolist():
        for i in range(num_tokens):
            end = min(num_keys, num_seen + i)
            told.append((first_token + i, marks, slots[row : row + max(end, 0)].tolist()))
    return told


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("num_slots", [128, 256, 1024])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS.keys())
def test_each_query_sees_its_own_tokens_in_order(lens: list[tuple[int, int]], num_slots: int, block_size: int) -> None:
    part = unfolded_part(lens, block_size)
    slices = list_slices(part, block_size=block_size, num_slots=num_slots, tokens_per_tile=32)
    seen: dict[int, list[int]] = defaultdict(list)
    marks: dict[int, list[int]] = defaultdict(list)
    for each in slices:
        assert len(each.block_ids) * block_size <= num_slots
        for token, of_tile, slots in seen_in(each, block_size):
            seen[token] += slots
            marks[token].append(of_tile)
    layout = part.layout
    for table, context_len, query_len, first in zip(
        layout.block_tables, layout.context_lens, layout.query_lens, part.first_tokens, strict=True
    ):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(context_len)]
        for i in range(query_len):
            assert seen.pop(first + i) == slots[: context_len - query_len + i + 1]
            of_tile = marks.pop(first + i)
            assert [bool(mark & FIRST) for mark in of_tile] == [True] + [False] * (len(of_tile) - 1)
            assert [bool(mark & LAST) for mark in of_tile] == [False] * (len(of_tile) - 1) + [True]
    assert not seen


def test_only_what_is_longer_than_a_slice_is_cut() -> None:
    part = unfolded_part([(0, 70), (0, 70), (300, 40), (0, 30)], 16)
    slices = list_slices(part, block_size=16, num_slots=128, tokens_per_tile=64)
    assert [len(each.block_ids) * 16 for each in slices] == [80, 80, 128, 128, 128]
    assert [each.tiles[:, 5].tolist() for each in slices] == [[3, 3], [3, 3], [1], [0], [2, 3]]


def test_the_tiles_that_read_most_come_first() -> None:
    part = unfolded_part([(0, 70), (100, 40)], 16)
    (only,) = list_slices(part, block_size=16, num_slots=1024, tokens_per_tile=32)
    assert only.tiles[:, 4].tolist() == [140, 132, 70, 64, 32]


@pytest.mark.parametrize(
    ("bytes_per_token", "max_bytes", "block_size", "expected"),
    [(65536, 256 << 20, 16, 4096), (8192, 256 << 20, 16, 32768), (1000, 300_000, 24, 384), (1000, 1, 24, 384)],
)
def test_slices_have_as_many_slots_as_there_is_room_for(
    bytes_per_token: int, max_bytes: int, block_size: int, expected: int
) -> None:
    """The sizes of DeepSeek-V3 on one GPU, of DeepSeek-V2-Lite, and with blocks that are no power of two."""
    num_slots = slots_of_slice(bytes_per_token, max_bytes, block_size)
    assert num_slots == expected
    assert num_slots % block_size == num_slots % ALIGNMENT == 0
