"""Computes what LoRA adapters add to a product, for all rows of a step in two launches, however many adapters they use.

    rows sorted by adapter, in tiles of 16 of one adapter each (`tiles_of`, on the host; one copy to the device)
      shrink   partial sums of A x, of pieces of the inputs     [pieces, slots, ranks] float32
      expand   their sum, rounded, times B, added to y

The adapter of each tile is in device memory, and so is the position of each adapter's weights: a launch depends only on
the number of tiles, and can be recorded in a CUDA graph. Programs of tiles without an adapter end at once.

The sums of a row run through its inputs in pieces at fixed positions, and then through its ranks, regardless of other
rows. The idea of such kernels: L. Chen et al., "Punica", 2023; Y. Sheng et al., "S-LoRA", 2023.

Shapes: T rows (tokens), G tiles, I rows of a tile, K inputs, N outputs, P parts (stacked products), R ranks of a part.
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
"""The fewest rows that tensor cores support. Larger tiles may suit rows of prompts better: not measured on any GPU."""
RANK_GRAIN = 16
"""Ranks are padded with zeros to a multiple of this."""
PIECE = 1024
"""Inputs of a program of `shrink`: few rows and ranks alone would occupy only few multiprocessors."""
BLOCK_K = 128
BLOCK_N = 64


def max_tiles(num_rows: int, num_adapters: int) -> int:
    """The most tiles that `num_rows` rows may need, however they are distributed among adapters."""
    in_use = min(num_rows, num_adapters)
    return (num_rows - in_use) // TILE_ROWS + in_use


def tiles_of(adapter_ids: NDArray[np.int64], num_tiles: int) -> NDArray[np.int32]:
    """[G, 1 + I]: the adapter of each tile, 0 for none, and its rows, padded with -1. `adapter_ids`: the adapter of
    each row, 0 for none. `num_tiles`: at least as many as the rows need."""
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
    """The weights of all adapters for one product."""

    weights: torch.Tensor
    """A [P * R, K] and B [N, R] of each adapter, one after the other, each with its own R. Then the space for adapters
    that may come later."""
    table: torch.Tensor
    """[adapters + 1, 3] int64: for each id, where A and B begin, and R; R = 0: the adapter adds nothing."""
    blocks: torch.Tensor
    """[blocks, 3] int32: for each block of outputs its first output, its end, and the part that it belongs to."""
    align: int
    """A common divisor of the positions where parts begin and end, at most 16."""
    num_parts: int
    num_inputs: int
    num_outputs: int
    max_ranks: int
    """Ranks of all parts together, for the adapter that has, or may have, the most."""
    starts: Sequence[int]
    """The first output of each part, and the end of the last one."""
    slots: Mapping[int, int]
    """Where the weights begin of adapters that may come later, by id."""

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
        """`sizes`: the number of outputs of each part. `num_adapters`: of the engine at its start; those in `added`
        change this product. Adapters that there is `room` for have the ids after these. `dtype`, `device`: of the
        weights in that room."""
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
        """Return the arguments of `put`."""
        return _side_by_side(parts, self.starts, self.num_inputs)

    def put(self, number: int, down_PRK: torch.Tensor, up_NR: torch.Tensor) -> None:
        """Copy an adapter's weights into the place of its id, on the device's stream. Recorded launches read them
        there."""
        at, size = self.slots[number], down_PRK.numel()
        self.weights[at : at + size].copy_(down_PRK.flatten())
        self.weights[at + size : at + size + up_NR.numel()].copy_(up_NR.flatten())
        fill(self.table[number], np.array([at, at + size, up_NR.shape[1]], dtype=np.int64))

    def remove(self, number: int) -> None:
        """Let this adapter add nothing from now on."""
        self.table[number].zero_()


def _side_by_side(
    parts: Sequence[AddedPart], starts: Sequence[int], num_inputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One adapter's A [P, R, K] and B [N, R]; the ranks of all parts are padded to the same multiple."""
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
    """Add what the adapters make of x to y, both contiguous. `tiles_GI`: from `tiles_of`, on the device."""
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
    ALIGN: tl.constexpr,  # divides the positions where parts begin and end
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
    # Several numbers are loaded at once if the compiler knows that they are adjacent.
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
