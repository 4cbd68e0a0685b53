"""The registers of some threads of a block, and how instructions name them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.arithmetic import DTYPES, UNSIGNED, Numbers
from ptx.program import Program

WARP = 32
NUMBER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?$")
EXACT = re.compile(r"0([fd])([0-9a-fA-F]+)$")
ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
Mask = NDArray[np.bool_]
"""Which of the threads run an instruction; None: all."""
Place = tuple[int, int, int]


class Registers:
    """The registers of `size` threads, from `first` on, of the block at `place` in a grid. Unwritten registers have all
    bits set."""

    def __init__(self, program: Program, first: int, size: int, place: Place, grid: Place) -> None:
        self._program = program
        self._size = size
        self._threads = np.arange(first, first + size, dtype=np.uint32)
        self._place_of_block = place
        self._grid = grid
        self._registers: dict[str, Numbers] = {}

    def _read(self, operand: str, kind: str) -> Numbers:
        dtype = DTYPES[kind]
        if (constant := _constant(operand, kind)) is not None:
            return np.full(self._size, constant, dtype=dtype)
        if operand.startswith("!"):
            return ~self._read(operand[1:], kind)
        if (special := self._special(operand)) is not None:
            return special.astype(dtype)
        bits = self._bits(operand)
        size = np.dtype(dtype).itemsize
        if bits.dtype == np.bool_ or dtype == np.bool_:
            return bits.astype(dtype)
        return bits.astype(UNSIGNED[size]).view(dtype)

    def _bits(self, name: str) -> Numbers:
        if name not in self._registers:
            self._registers[name] = np.full(self._size, -1).astype(self._dtype_of(name))
        return self._registers[name]

    def _dtype_of(self, name: str) -> Any:
        numbered = f"{name.rstrip('0123456789')}<"
        width = self._program.widths[name if name in self._program.widths else numbered]
        return np.bool_ if width == 1 else UNSIGNED[width // 8]

    def _special(self, operand: str) -> Numbers | None:
        if not operand.startswith("%") or "." not in operand:
            return self._threads % WARP if operand == "%laneid" else None
        name, _, axis = operand.partition(".")
        index = "xyz".index(axis)
        if name == "%tid":
            return self._threads if axis == "x" else np.zeros(self._size, dtype=np.uint32)
        of_block = {
            "%ctaid": self._place_of_block, "%nctaid": self._grid, "%ntid": (self._program.num_threads, 1, 1),
        }  # fmt: skip
        return np.full(self._size, of_block[name][index], dtype=np.uint32)

    def _write(self, operand: str, values: Numbers, mask: Mask | None) -> None:
        if operand == "_":
            return
        dtype = self._dtype_of(operand)
        if dtype != np.bool_:
            width = np.dtype(dtype).itemsize
            if values.dtype.kind == "i" and values.dtype.itemsize < width:
                values = values.astype(f"i{width}")
            values = np.ascontiguousarray(values).view(UNSIGNED[values.dtype.itemsize]).astype(dtype)
        if mask is None:
            self._registers[operand] = values
        else:
            self._registers[operand] = np.where(mask, values, self._bits(operand))

    def _addresses(self, operand: str) -> NDArray[np.int64]:
        found = ADDRESS.match(operand)
        assert found is not None, operand
        base = np.int64(0) if found[1] == "global_smem" else self._bits(found[1]).astype(np.int64)
        return np.broadcast_to(base + int(found[2] or 0), self._size)


@cache
def parts_of(operand: str) -> tuple[str, ...]:
    """The parts of a vector operand, or the single operand."""
    return tuple(each.strip() for each in operand.strip("{} ").split(","))


@cache
def _constant(operand: str, kind: str) -> Any:
    """The constant's value; None: `operand` is no constant."""
    dtype = np.dtype(DTYPES[kind])
    if exact := EXACT.match(operand):
        bits = int(exact[2], 16)
        return np.array(bits, dtype=UNSIGNED[4 if exact[1] == "f" else 8]).view(dtype)[()]
    if not NUMBER.match(operand):
        return None
    value = int(operand.rstrip("U"), 0)
    if dtype.kind in "fb":
        return dtype.type(value)
    return np.array(value % (1 << 8 * dtype.itemsize), dtype=UNSIGNED[dtype.itemsize]).view(dtype)[()]
