"""Cuts contexts into slices, which are unfolded one after the other, and lists the tiles of queries that attend to
each.

    sequences, long ones cut ──> slices of `num_slots` slots ──> per slice: its blocks, and tiles (rows of
    `Slice.tiles`)

A slice limits the memory for keys and values, which exist for one slice at a time. A sequence goes into a slice that
has room for all of it, or begins a new slice. Only sequences longer than a slice are cut; the sums of their queries are
carried over. Decided on the host from a step's lengths; nothing here holds a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.attention.latent_forms import Part

ALIGNMENT = 128
"""Cuts are at multiples of this and of the block size. So cuts do not move the tiles of keys, and a token has the same
bits with any cut."""
FIRST, LAST = 1, 2
"""Marks of a tile. FIRST: no earlier slice has tokens of its sequence. LAST: no later slice has tokens that it sees."""


@dataclass(frozen=True, slots=True)
class Slice:
    block_ids: NDArray[np.int32]
    """[blocks] of the pool; their slots are the slice's rows."""
    tiles: NDArray[np.int32]
    """[tiles, 6]: the tile's first token among the step's; its number of tokens; the row where its sequence's keys
    begin; how many of these keys its first token sees (may be none or negative, or more than there are); how many its
    last token sees; marks."""


def slots_of_slice(bytes_per_token: int, max_bytes: int, block_size: int) -> int:
    """As many slots as fit into `max_bytes`, but at least the smallest possible cut."""
    step = math.lcm(ALIGNMENT, block_size)
    return max(max_bytes // bytes_per_token // step, 1) * step


def list_slices(part: Part, *, block_size: int, num_slots: int, tokens_per_tile: int) -> list[Slice]:
    """List the slices of all sequences of `part`. `num_slots`: per slice, from `slots_of_slice`."""
    slices = []
    for pieces in _slices_of_pieces(part.layout.context_lens.tolist(), block_size, num_slots):
        blocks, tiles, row = [], [], 0
        for seq, first, end in pieces:
            of_piece = part.layout.block_tables[seq, first // block_size : -(-end // block_size)]
            tiles.append(_tiles_of(part, seq, first, end, row, tokens_per_tile))
            blocks.append(of_piece)
            row += len(of_piece) * block_size
        all_tiles = np.concatenate(tiles)
        # Tiles that read most come first: otherwise they would finish last, with the GPU idle around them.
        in_order = all_tiles[np.argsort(-all_tiles[:, 4], kind="stable")]
        slices.append(Slice(np.concatenate(blocks).astype(np.int32), in_order))
    return slices


def _slices_of_pieces(context_lens: list[int], block_size: int, num_slots: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield each slice's pieces of sequences: index of the sequence, first token, end."""
    pieces: list[tuple[int, int, int]] = []
    room = num_slots
    for seq, context_len in enumerate(context_lens):
        if pieces and context_len > room:
            yield pieces
            pieces, room = [], num_slots
        first = 0
        while context_len - first > num_slots:
            yield [(seq, first, first + num_slots)]
            first += num_slots
        pieces.append((seq, first, context_len))
        room -= -(-(context_len - first) // block_size) * block_size
    yield pieces


def _tiles_of(part: Part, seq: int, first: int, end: int, row: int, tokens_per_tile: int) -> NDArray[np.int32]:
    """The tiles of queries that see any of a sequence's tokens from `first` to `end`, whose keys begin at `row`."""
    query_len, context_len = int(part.layout.query_lens[seq]), int(part.layout.context_lens[seq])
    starts = np.arange(0, query_len, tokens_per_tile)
    num_tokens = np.minimum(tokens_per_tile, query_len - starts)
    num_seen = context_len - query_len + starts + 1 - first
    num_last_seen = num_seen + num_tokens - 1
    marks = np.where(num_last_seen <= end - first, LAST, 0) + (FIRST if first == 0 else 0)
    tiles = np.stack(
        (
            part.first_tokens[seq] + starts,
            num_tokens,
            np.full_like(starts, row),
            num_seen,
            np.minimum(num_last_seen, end - first),
            marks,
        ),
        axis=1,
    )
    return tiles[num_last_seen > 0].astype(np.int32)
