"""What adapters add to a product, for all rows of a step in two launches however many adapters they ask for.

    rows sorted by adapter, in tiles of 16 of one adapter each (`tiles_of`, on the host; one copy to the device)
      shrink   partial sums of A x, of pieces of the inputs     [pieces, slots, ranks] float32
      expand   their sum, rounded, times B, added to y

Which adapter a tile is of stands in memory, and so does where an adapter's weights begin: a launch depends on the
number of tiles alone, and can be recorded. Tiles of no adapter end at once.

A row's sums run through its inputs in pieces at fixed places, and then through its ranks, whatever rows are beside it.
The idea of such kernels: L. Chen et al., "Punica", 2023; Y. Sheng et al., "S-LoRA", 2023.

Shapes: T rows (tokens), G tiles, I rows of a tile, K inputs, N outputs, P parts (products below one another), R ranks
of a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine.lora.adapters import NO_ROOM, AddedPart
from engine.lora.modules import LoRARoom
from engine.to_device import fill

TILE_ROWS = 16
"""The fewest that tensor cores take. Rows of prompts may have larger tiles some day: no GPU has measured it."""
RANK_GRAIN = 16
"""Ranks are filled up to a multiple with zeros."""
PIECE = 1024
"""Inputs of a program of `shrink`: few rows and ranks alone would keep few multiprocessors reading."""
BLOCK_K = 128
BLOCK_N = 64


def max_tiles(num_rows: int, num_adapters: int) -> int:
    """Of so many rows, whoever's they are."""
    in_use = min(num_rows, num_adapters)
    return (num_rows - in_use) // TILE_ROWS + in_use


def tiles_of(adapter_ids: NDArray[np.int64], num_tiles: int) -> NDArray[np.int32]:
    """[G, 1 + I]: a tile's adapter, 0 for none, and its rows, -1 where there are no more. `adapter_ids`: of each row, 0
    for none. `num_tiles`: at least as many as there are."""
    tiles = np.full((num_tiles, 1 + TILE_ROWS), -1, dtype=np.int32)
    tiles[:, 0] = 0
    at = 0
    for number in np.unique(adapter_ids[adapter_ids > 0]).tolist():
        rows = np.flatnonzero(adapter_ids == number)
        for first in range(0, len(rows), TILE_ROWS):
            some = rows[first : first + TILE_ROWS]
            tiles[at, 0] = number
            tiles[at, 1 : 1 + len(some)] = some
            at += 1
    return tiles


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """All adapters' weights of one product."""

    weights: torch.Tensor
    """One after the other: A [P * R, K] and B [N, R] of each, R its own. Then, of as many as there is room for."""
    table: torch.Tensor
    """[adapters + 1, 3] int64: by id, where A and B begin, and R; 0: it adds nothing."""
    blocks: torch.Tensor
    """[blocks, 3] int32: of outputs, the first, the end, and which part they are of."""
    align: int
    """What divides where parts begin and end, at most 16."""
    num_parts: int
    num_inputs: int
    num_outputs: int
    max_ranks: int
    """Of all parts together, of the adapter that has most, or may have."""
    starts: Sequence[int]
    """Of the parts, in numbers of outputs, and where the last one ends."""
    slots: Mapping[int, int]
    """Where the weights of adapters begin that may come later, by id."""

    @staticmethod
    def of(
        added: Mapping[int, Sequence[AddedPart]],
        sizes: Sequence[int],
        num_inputs: int,
        num_adapters: int,
        *,
        room: LoRARoom = NO_ROOM,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> StackedAdapters:
        """`sizes`: of the parts, in numbers of outputs. `num_adapters`: that the engine begins with, of which those in
        `added` change this product; those that there is `room` for have the ids after theirs. `dtype`, `device`: of
        their weights."""
        starts = np.cumsum([0, *sizes]).tolist()
        weights: list[torch.Tensor] = []
        table = np.zeros((num_adapters + room.num + 1, 3), dtype=np.int64)
        at = 0
        for number, parts in added.items():
            down, up = _side_by_side(parts, starts, num_inputs)
            table[number] = at, at + down.numel(), up.shape[1]
            weights += [down.flatten(), up.flatten()]
            at += down.numel() + up.numel()
        max_rank = int(table[:, 2].max())
        slots: dict[int, int] = {}
        if room.num:
            rank = room.max_rank + -room.max_rank % RANK_GRAIN
            max_rank = max(max_rank, rank)
            size = rank * (len(sizes) * num_inputs + starts[-1])
            slots = {num_adapters + 1 + i: at + i * size for i in range(room.num)}
            weights.append(torch.zeros(room.num * size, dtype=dtype, device=device))
        blocks = [
            (first, min(first + BLOCK_N, end), i)
            for i, (start, end) in enumerate(pairwise(starts))
            for first in range(start, end, BLOCK_N)
        ]
        whole = torch.cat(weights)
        return StackedAdapters(
            weights=whole,
            table=torch.from_numpy(table).to(whole.device),
            blocks=torch.tensor(blocks, dtype=torch.int32).to(whole.device),
            align=math.gcd(16, *sizes),
            num_parts=len(sizes),
            num_inputs=num_inputs,
            num_outputs=starts[-1],
            max_ranks=len(sizes) * max_rank,
            starts=starts,
            slots=slots,
        )

    def prepare(self, parts: Sequence[AddedPart]) -> tuple[torch.Tensor, torch.Tensor]:
        """What `put` takes."""
        return _side_by_side(parts, self.starts, self.num_inputs)

    def put(self, number: int, down_PRK: torch.Tensor, up_NR: torch.Tensor) -> None:
        """Into that id's place, on the device's stream. Recorded launches find it there."""
        at, size = self.slots[number], down_PRK.numel()
        self.weights[at : at + size].copy_(down_PRK.flatten())
        self.weights[at + size : at + size + up_NR.numel()].copy_(up_NR.flatten())
        fill(self.table[number], np.array([at, at + size, up_NR.shape[1]], dtype=np.int64))

    def remove(self, number: int) -> None:
        """It adds nothing any more."""
        self.table[number].zero_()


def _side_by_side(
    parts: Sequence[AddedPart], starts: Sequence[int], num_inputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One adapter's A [P, R, K] and B [N, R], the ranks of all parts filled up to the same multiple."""
    rank = max(part.down.shape[0] for part in parts)
    rank += -rank % RANK_GRAIN
    down = parts[0].down.new_zeros(len(starts) - 1, rank, num_inputs)
    up = down.new_zeros(starts[-1], rank)
    for part in parts:
        own_rank = len(part.down)
        down[starts.index(part.start), :own_rank] = part.down
        up[part.start : part.start + len(part.up), :own_rank] = part.up
    return down, up


def add_adapters(x_TK: torch.Tensor, adapters: StackedAdapters, tiles_GI: torch.Tensor, y_TN: torch.Tensor) -> None:
    """To y, of x, both contiguous. `tiles_GI`: see `tiles_of`, on the device."""
    num_tiles, size_k, ranks = len(tiles_GI), adapters.num_inputs, adapters.max_ranks
    num_slots, num_pieces = num_tiles * TILE_ROWS, triton.cdiv(size_k, PIECE)
    partial = x_TK.new_empty(num_pieces * num_slots * ranks, dtype=torch.float32)
    block_r = min(2 * RANK_GRAIN, ranks)
    shared = {"RANKS": ranks, "TILE_ROWS": TILE_ROWS, "GRAIN": RANK_GRAIN, "num_warps": 4}
    _shrink_kernel[(triton.cdiv(ranks, block_r), num_pieces, num_tiles)](
        x_TK, adapters.weights, adapters.table, tiles_GI, partial, num_slots,
        NUM_PARTS=adapters.num_parts, SIZE_K=size_k, PIECE=PIECE, BLOCK_K=BLOCK_K, BLOCK_R=block_r, **shared,
        num_stages=4,
    )  # fmt: skip
    _expand_kernel[(len(adapters.blocks), num_tiles)](
        partial, adapters.weights, adapters.table, adapters.blocks, tiles_GI, y_TN, num_slots,
        SIZE_N=adapters.num_outputs, NUM_PIECES=num_pieces, BLOCK_N=BLOCK_N, ALIGN=adapters.align, **shared,
        num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _shrink_kernel(
    x_ptr,
    weights_ptr,
    table_ptr,
    tiles_ptr,
    partial_ptr,
    num_slots,
    NUM_PARTS: tl.constexpr,
    SIZE_K: tl.constexpr,
    RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GRAIN: tl.constexpr,
):
    """Program (block of ranks, piece of the inputs, tile): `partial` [pieces, slots, ranks]."""
    tile = tl.program_id(2)
    slots_I = tl.arange(0, TILE_ROWS)
    rows_I = tl.load(tiles_ptr + tile * (1 + TILE_ROWS) + 1 + slots_I)
    number = tl.load(tiles_ptr + tile * (1 + TILE_ROWS))
    ranks_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    num_ranks = tl.load(table_ptr + number * 3 + 2).to(tl.int32) * NUM_PARTS
    if tl.program_id(0) * BLOCK_R >= num_ranks:
        return
    down_ptr = weights_ptr + tl.multiple_of(tl.load(table_ptr + number * 3), GRAIN)
    is_row_I = rows_I >= 0
    is_rank_R = ranks_R < num_ranks
    begin = tl.program_id(1) * PIECE
    ins_K = begin + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows_I[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    down_ptrs = down_ptr + ranks_R[None, :].to(tl.int64) * SIZE_K + ins_K[:, None]
    acc_IR = tl.zeros([TILE_ROWS, BLOCK_R], dtype=tl.float32)
    for start in range(0, PIECE, BLOCK_K):
        is_in_K = start + ins_K < SIZE_K
        x_IK = tl.load(x_ptrs + start, mask=is_row_I[:, None] & is_in_K[None, :], other=0.0)
        down_KR = tl.load(down_ptrs + start, mask=is_in_K[:, None] & is_rank_R[None, :], other=0.0)
        acc_IR += tl.dot(x_IK, down_KR, input_precision="ieee")
    slots = tl.program_id(1).to(tl.int64) * num_slots + tile * TILE_ROWS + slots_I
    tl.store(partial_ptr + slots[:, None] * RANKS + ranks_R[None, :], acc_IR, mask=is_rank_R[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def _expand_kernel(
    partial_ptr,
    weights_ptr,
    table_ptr,
    blocks_ptr,
    tiles_ptr,
    y_ptr,
    num_slots,
    RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SIZE_N: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,  # divides where parts begin and end
    GRAIN: tl.constexpr,
):
    """Program (block of outputs, tile)."""
    tile = tl.program_id(1)
    number = tl.load(tiles_ptr + tile * (1 + TILE_ROWS))
    rank = tl.load(table_ptr + number * 3 + 2).to(tl.int32)
    if rank == 0:
        return
    rank = tl.multiple_of(rank, GRAIN)
    slots_I = tl.arange(0, TILE_ROWS)
    rows_I = tl.load(tiles_ptr + tile * (1 + TILE_ROWS) + 1 + slots_I)
    block_ptr = blocks_ptr + tl.program_id(0) * 3
    # Several numbers are loaded at once where they are known to lie together.
    outs_N = tl.multiple_of(tl.load(block_ptr), ALIGN) + tl.arange(0, BLOCK_N)
    is_out_N = outs_N < tl.multiple_of(tl.load(block_ptr + 1), ALIGN)
    first_rank = tl.load(block_ptr + 2) * rank
    up_ptr = weights_ptr + tl.multiple_of(tl.load(table_ptr + number * 3 + 1), GRAIN)
    is_real_IN = (rows_I >= 0)[:, None] & is_out_N[None, :]
    y_ptrs = y_ptr + rows_I[:, None].to(tl.int64) * SIZE_N + outs_N[None, :]
    y_IN = tl.load(y_ptrs, mask=is_real_IN, other=0.0)
    acc_IN = y_IN.to(tl.float32)
    ranks_R = tl.arange(0, GRAIN)
    partial_ptrs = partial_ptr + (tile * TILE_ROWS + slots_I).to(tl.int64)[:, None] * RANKS + ranks_R[None, :]
    up_ptrs = up_ptr + outs_N[None, :].to(tl.int64) * rank + ranks_R[:, None]
    for start in range(0, rank, GRAIN):
        up_RN = tl.load(up_ptrs + start, mask=is_out_N[None, :], other=0.0)
        sum_IR = tl.zeros([TILE_ROWS, GRAIN], dtype=tl.float32)
        for piece in range(NUM_PIECES):
            sum_IR += tl.load(partial_ptrs + piece * num_slots.to(tl.int64) * RANKS + first_rank + start)
        acc_IN += tl.dot(sum_IR.to(y_IN.dtype), up_RN, input_precision="ieee")
    tl.store(y_ptrs, acc_IN.to(y_ptr.dtype.element_ty), mask=is_real_IN)
