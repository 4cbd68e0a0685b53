"""Copies rows of a tensor to rows of memory known only by its address: the pool of another process.

One launch moves any number of rows, in pieces of 16 KB, each read and written once. The speed is limited by the memory
of the device, or by the link between two devices.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine.to_device import to_device

TILE_WORDS = 2048
ACCESS_BYTES = 16
"""The most bytes that a thread stores with one instruction."""


def copy_rows(source: torch.Tensor, target_address: int, rows_2R: NDArray[np.int64]) -> None:
    """Row `rows_2R[1, i]` at `target_address` becomes row `rows_2R[0, i]` of `source`, in stream order.

    `source`: int64 `[row, words]`, contiguous; rows at the target are as long. The caller has checked the row numbers.
    """
    assert rows_2R.flags.c_contiguous, "the kernel would take rows of the one for the other's"
    num_rows = rows_2R.shape[1]
    if not num_rows:
        return
    num_words = source.shape[1]
    _copy_kernel[(num_rows, triton.cdiv(num_words, TILE_WORDS))](
        source,
        target_address,
        to_device(rows_2R, source.device),
        num_rows,
        num_words,
        IS_ALIGNED=target_address % ACCESS_BYTES == 0,
        TILE_WORDS=TILE_WORDS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _copy_kernel(
    src_ptr, dst_address, rows_ptr, num_rows, num_words, IS_ALIGNED: tl.constexpr, TILE_WORDS: tl.constexpr
):
    """Program (row, piece of it)."""
    index = tl.program_id(0)
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    is_inside = words < num_words
    dst_ptr = dst_address.to(tl.pointer_type(tl.int64))
    # Triton does not derive the pointer's alignment from the number's: without this, it stores only 8 bytes at a time.
    if IS_ALIGNED:
        dst_ptr = tl.multiple_of(dst_ptr, 16)
    src_row = tl.load(rows_ptr + index)
    dst_row = tl.load(rows_ptr + num_rows + index)
    moved = tl.load(src_ptr + src_row * num_words + words, mask=is_inside)
    tl.store(dst_ptr + dst_row * num_words + words, moved, mask=is_inside)
