"""A block of threads that runs a program.

    Block   parameters, shared memory ── warps, in any order, each to the next barrier ── all there? ── on
    Warp    32 threads, or several such together: registers, where each thread is, copies under way

Threads that go different ways go one after the other, the one furthest behind first, until they meet.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import arithmetic as numbers
from ptx.arithmetic import DTYPES, UNSIGNED, Numbers
from ptx.memory import Memory
from ptx.program import Instruction, Program

WARP = 32
NUMBER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?$")
EXACT = re.compile(r"0([fd])([0-9a-fA-F]+)$")
ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
Mask = NDArray[np.bool_]
_Copy = tuple[NDArray[np.int64], NDArray[np.int64], int, NDArray[np.int64]]
"""To where, from where, how many bytes, and how many of them are read."""


class WrongProgram(Exception):  # noqa: N818
    """What PTX leaves undefined."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the blocks of one launch share."""

    program: Program
    parameters: dict[str, bytes]
    memory: Memory
    shared_bytes: int
    grid: tuple[int, int, int]
    warps_together: bool
    """All warps of a block do an instruction at the same time: faster, and shows nothing of their order."""

    def run(self, seed: int = 0) -> None:
        order = np.random.default_rng(seed)
        x, y, z = self.grid
        with np.errstate(all="ignore"):
            for block in order.permutation(x * y * z):
                Block(self, (int(block) % x, int(block) // x % y, int(block) // (x * y))).run(order)


class Block:
    def __init__(self, launch: Launch, place: tuple[int, int, int]) -> None:
        num_threads = launch.program.num_threads
        self.launch = launch
        self.place = place
        self.shared = Memory.shared(launch.shared_bytes)
        size = num_threads if launch.warps_together else WARP
        self._warps = [Warp(self, first, size) for first in range(0, num_threads, size)]

    def run(self, order: np.random.Generator) -> None:
        left = self._warps
        while left:
            for index in order.permutation(len(left)):
                left[index].run_to_barrier()
            has_ended = [warp.has_ended for warp in left]
            if any(has_ended) and not all(has_ended):
                raise WrongProgram("a barrier that some threads do not reach")
            left = [warp for warp in left if not warp.has_ended]


class Warp:
    def __init__(self, block: Block, first: int, size: int) -> None:
        self._block = block
        self._launch = block.launch
        self._program = block.launch.program
        self._size = size
        self._threads = np.arange(first, first + size, dtype=np.uint32)
        self._registers: dict[str, Numbers] = {}
        self._place = 0
        self._places: NDArray[np.int64] | None = None
        """Of each thread, where they are not all at one."""
        self._copies: deque[list[_Copy]] = deque([[]])
        """cp.async, by groups, the last one open."""
        self.has_ended = False

    # -- ways through the program -------------------------------------------------------------------------------

    def run_to_barrier(self) -> None:
        instructions = self._program.instructions
        while not self.has_ended:
            here, active = self._next()
            instruction = instructions[here]
            if instruction.name == "bar" and instruction.modifiers[0] != "warp":
                if active is not None:
                    raise WrongProgram("a barrier that some threads of a warp do not reach")
                self._place += 1
                return
            self._do(instruction, here, active)

    def _next(self) -> tuple[int, Mask | None]:
        if self._places is None:
            return self._place, None
        here = int(self._places.min())
        active = self._places == here
        if active.all():
            self._place, self._places = here, None
            return here, None
        return here, active

    def _do(self, instruction: Instruction, here: int, active: Mask | None) -> None:
        mask = active
        if instruction.guard:
            guard = self._read(instruction.guard, "pred")
            guard = ~guard if instruction.is_negated else guard
            mask = guard if active is None else active & guard
            if mask.all():
                mask = None
        if instruction.name in ("bra", "ret", "exit"):
            self._jump(instruction, here, active, mask)
            return
        if mask is None or mask.any():
            try:
                getattr(self, f"_do_{instruction.name}")(instruction, mask)
            except (AttributeError, KeyError, IndexError) as error:
                raise NotImplementedError(f"{instruction.text} ({error!r})") from error
        if self._places is None:
            self._place += 1
        else:
            self._places[self._all(active)] = here + 1

    def _jump(self, instruction: Instruction, here: int, active: Mask | None, mask: Mask | None) -> None:
        end = len(self._program.instructions)
        to = self._program.places[instruction.operands[0]] if instruction.name == "bra" else end
        if mask is None and active is None:
            self._place = to
            self.has_ended = to == end
            return
        if self._places is None:
            self._places = np.full(self._size, here)
        self._places[self._all(active)] = here + 1
        self._places[self._all(mask)] = to
        if (self._places == self._places[0]).all():
            self._place, self._places = int(self._places[0]), None
            self.has_ended = self._place == end

    def _all(self, mask: Mask | None) -> Mask:
        return np.ones(self._size, dtype=bool) if mask is None else mask

    def _whole_warps(self, mask: Mask | None, what: str) -> None:
        if mask is not None and (mask.reshape(-1, WARP).any(1) != mask.reshape(-1, WARP).all(1)).any():
            raise WrongProgram(f"{what}, by some threads of a warp")

    # -- registers ----------------------------------------------------------------------------------------------

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
            "%ctaid": self._block.place, "%nctaid": self._launch.grid, "%ntid": (self._program.num_threads, 1, 1),
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

    # -- memory -------------------------------------------------------------------------------------------------

    def _memory(self, instruction: Instruction) -> Memory:
        return self._launch.memory if "global" in instruction.modifiers else self._block.shared

    def _do_ld(self, instruction: Instruction, mask: Mask | None) -> None:
        dtype, to = DTYPES[instruction.type], _parts(instruction.operands[0])
        if instruction.modifiers[0] == "param":
            found = ADDRESS.match(instruction.operands[1])
            assert found is not None
            first = int(found[2] or 0)
            bits = self._launch.parameters[found[1]][first : first + np.dtype(dtype).itemsize]
            self._write(to[0], np.full(self._size, np.frombuffer(bits, dtype=dtype)[0]), mask)
            return
        num_bytes = np.dtype(dtype).itemsize * len(to)
        chosen = self._all(mask)
        loaded = np.zeros((self._size, num_bytes), dtype=np.uint8)
        loaded[chosen] = self._memory(instruction).load(self._addresses(instruction.operands[1])[chosen], num_bytes)
        for name, column in zip(to, loaded.view(dtype).T, strict=True):
            self._write(name, column, mask)

    def _do_st(self, instruction: Instruction, mask: Mask | None) -> None:
        columns = [self._read(name, instruction.type) for name in _parts(instruction.operands[1])]
        values = np.stack(columns, axis=1).view(np.uint8)
        chosen = self._all(mask)
        self._memory(instruction).store(self._addresses(instruction.operands[0])[chosen], values[chosen])

    def _do_cp(self, instruction: Instruction, mask: Mask | None) -> None:
        """cp.async: made when it is waited for."""
        match instruction.modifiers[1]:
            case "commit_group":
                self._copies.append([])
            case "wait_group":
                for _ in range(len(self._copies) - 1 - int(instruction.operands[0])):
                    self._copy(self._copies.popleft())
            case "wait_all":
                while self._copies:
                    self._copy(self._copies.popleft())
                self._copies.append([])
            case _:
                to, source, num_bytes, *num_read = instruction.operands
                chosen = self._all(mask)
                most = np.full(self._size, int(num_bytes, 0), dtype=np.int64)
                taken = self._read(num_read[0], "u32").astype(np.int64) if num_read else most
                self._copies[-1].append(
                    (
                        self._addresses(to)[chosen],
                        self._addresses(source)[chosen],
                        int(num_bytes, 0),
                        np.minimum(taken, most)[chosen],
                    )
                )

    def _copy(self, group: list[_Copy]) -> None:
        for to, source, num_bytes, num_read in group:
            if ((num_read != 0) & (num_read != num_bytes)).any():
                raise NotImplementedError("a copy of a part")
            values = np.zeros((len(to), num_bytes), dtype=np.uint8)
            is_read = num_read > 0
            values[is_read] = self._launch.memory.load(source[is_read], num_bytes)
            self._block.shared.store(to, values)

    def _do_ldmatrix(self, instruction: Instruction, mask: Mask | None) -> None:
        self._whole_warps(mask, "ldmatrix")
        to = _parts(instruction.operands[0])
        addresses = self._addresses(instruction.operands[1]).reshape(-1, WARP)
        lane = np.arange(WARP)
        for matrix, name in enumerate(to):
            rows = self._block.shared.load(addresses[:, 8 * matrix : 8 * matrix + 8].reshape(-1), 16)
            tiles = rows.view(np.uint16).reshape(-1, 8, 8)
            if "trans" in instruction.modifiers:
                tiles = tiles.transpose(0, 2, 1)
            column = 2 * (lane % 4)
            low, high = tiles[:, lane // 4, column], tiles[:, lane // 4, column + 1]
            self._write(name, numbers.joined(low.reshape(-1), high.reshape(-1)), mask)

    # -- between threads ----------------------------------------------------------------------------------------

    def _do_bar(self, instruction: Instruction, mask: Mask | None) -> None:
        self._whole_warps(mask, "bar.warp")

    def _do_shfl(self, instruction: Instruction, mask: Mask | None) -> None:
        self._whole_warps(mask, "shfl")
        to, *is_inside = instruction.operands[0].split("|")
        lane = np.arange(self._size) % WARP
        by, clamp = (self._read(operand, "u32").astype(np.int64) for operand in instruction.operands[2:4])
        assert (clamp % 32 == (0 if instruction.modifiers[1] == "up" else 31)).all(), "a part of a warp"
        source = {"bfly": lane ^ by, "idx": by % WARP, "up": lane - by, "down": lane + by}[instruction.modifiers[1]]
        inside = (source >= 0) & (source < WARP)
        values = self._read(instruction.operands[1], "b32")
        first = np.arange(self._size) - lane
        self._write(to, values[first + np.where(inside, source, lane)], mask)
        for name in is_inside:
            self._write(name, inside, mask)

    def _do_redux(self, instruction: Instruction, mask: Mask | None) -> None:
        self._whole_warps(mask, "redux")
        values = self._read(instruction.operands[1], instruction.type).reshape(-1, WARP)
        reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[instruction.modifiers[1]]
        self._write(instruction.operands[0], np.repeat(reduce.reduce(values, axis=1), WARP).astype(values.dtype), mask)

    def _do_mma(self, instruction: Instruction, mask: Mask | None) -> None:
        self._whole_warps(mask, "mma")
        shape, kinds = instruction.modifiers[2], instruction.modifiers[-4:]
        if shape != "m16n8k16" or kinds[0] != "f32" or kinds[1] != kinds[2]:
            raise NotImplementedError(instruction.text)
        widen = {"bf16": numbers.widened, "f16": lambda bits: bits.view(np.float16).astype(np.float32)}[kinds[1]]
        to, a, b, c = (_parts(operand) for operand in instruction.operands)
        product = numbers.product_of_tiles(
            [self._read(name, "b32") for name in a], [self._read(name, "b32") for name in b],
            [self._read(name, "f32") for name in c], widen,
        )  # fmt: skip
        for name, values in zip(to, product, strict=True):
            self._write(name, values, mask)

    # -- numbers ------------------------------------------------------------------------------------------------

    def _do_mov(self, instruction: Instruction, mask: Mask | None) -> None:
        to, source = instruction.operands
        if to.startswith("{"):
            parts = _parts(to)
            bits = self._read(source, instruction.type)
            columns = bits.view(UNSIGNED[bits.itemsize // len(parts)]).reshape(-1, len(parts)).T
            for name, column in zip(parts, columns, strict=True):
                self._write(name, column, mask)
        elif source.startswith("{"):
            parts = _parts(source)
            kind = f"b{8 * np.dtype(DTYPES[instruction.type]).itemsize // len(parts)}"
            columns = np.stack([self._read(name, kind) for name in parts], axis=1)
            self._write(to, columns.view(DTYPES[instruction.type]).reshape(-1), mask)
        elif source.startswith("global_smem"):
            offset = int(source.partition("+")[2] or 0)
            self._write(to, np.full(self._size, offset, dtype=DTYPES[instruction.type]), mask)
        else:
            self._write(to, self._read(source, instruction.type), mask)

    def _do_cvta(self, instruction: Instruction, mask: Mask | None) -> None:
        self._write(instruction.operands[0], self._read(instruction.operands[1], instruction.type), mask)

    def _do_cvt(self, instruction: Instruction, mask: Mask | None) -> None:
        to, source = instruction.modifiers[-2:]
        given = [self._read(operand, source) for operand in instruction.operands[1:]]
        if source.endswith("x2"):
            values = numbers.packed(*numbers.unpacked(given[0], source), to)
        elif to.endswith("x2"):
            high, low = given
            values = numbers.packed(low, high, to)
        else:
            [x] = given
            values = numbers.converted(numbers.widened(x) if source == "bf16" else x, to, instruction.modifiers)
        self._write(instruction.operands[0], values, mask)

    def _do_setp(self, instruction: Instruction, mask: Mask | None) -> None:
        compare, *rest = instruction.modifiers
        to, *operands = instruction.operands
        a, b = (self._read(operand, instruction.type) for operand in operands[:2])
        values = numbers.COMPARE[compare](a, b)
        if len(operands) == 3:
            other = self._read(operands[2], "pred")
            values = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[rest[0]](values, other)
        self._write(to, values, mask)

    def _do_selp(self, instruction: Instruction, mask: Mask | None) -> None:
        to, a, b, predicate = instruction.operands
        kind = instruction.type
        values = np.where(self._read(predicate, "pred"), self._read(a, kind), self._read(b, kind))
        self._write(to, values, mask)

    def _compute(self, instruction: Instruction, mask: Mask | None, operation: Any) -> None:
        """Of numbers of one type, two of 16 bits in one register included."""
        to, *operands = instruction.operands
        kind = instruction.type
        given = [self._read(operand, kind) for operand in operands]
        if kind in ("bf16x2", "f16x2"):
            halves = zip(*(numbers.halves(each) for each in given), strict=True)
            low, high = (self._in_16_bits(operation, half, kind[:-2]) for half in halves)
            values = numbers.joined(low, high)
        elif kind == "bf16":
            values = self._in_16_bits(operation, given, kind)
        else:
            if "ftz" in instruction.modifiers and kind == "f32":
                given = [numbers.flushed(each) for each in given]
            values = operation(*given).astype(given[0].dtype)
            if "ftz" in instruction.modifiers and kind == "f32":
                values = numbers.flushed(values)
            if "sat" in instruction.modifiers:
                values = np.clip(np.nan_to_num(values, nan=0.0), 0, 1).astype(values.dtype)
        self._write(to, values, mask)

    def _in_16_bits(self, operation: Any, given: Any, kind: str) -> Numbers:
        if kind == "bf16":
            return numbers.to_bfloat16(operation(*(numbers.widened(each) for each in given)))
        wide = (each.view(np.float16).astype(np.float32) for each in given)
        return operation(*wide).astype(np.float16).view(np.uint16)  # type: ignore[no-any-return]

    def _binary(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, numbers.BINARY[instruction.name])

    _do_add = _do_sub = _do_and = _do_or = _do_xor = _do_rem = _binary

    def _do_not(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.invert)

    def _do_neg(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.negative)

    def _do_abs(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.abs)

    def _do_div(self, instruction: Instruction, mask: Mask | None) -> None:
        is_float = instruction.type.startswith("f")
        self._compute(instruction, mask, np.divide if is_float else numbers.quotient)

    def _do_min(self, instruction: Instruction, mask: Mask | None) -> None:
        keeps_nan = "NaN" in instruction.modifiers or "f" not in instruction.type
        self._compute(instruction, mask, np.minimum if keeps_nan else np.fmin)

    def _do_max(self, instruction: Instruction, mask: Mask | None) -> None:
        keeps_nan = "NaN" in instruction.modifiers or "f" not in instruction.type
        self._compute(instruction, mask, np.maximum if keeps_nan else np.fmax)

    def _do_fma(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, numbers.fused)

    def _do_ex2(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.exp2)

    def _do_lg2(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.log2)

    def _do_rcp(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, lambda x: 1 / x)

    def _do_sqrt(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.sqrt)

    def _do_rsqrt(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, lambda x: 1 / np.sqrt(x))

    def _do_tanh(self, instruction: Instruction, mask: Mask | None) -> None:
        self._compute(instruction, mask, np.tanh)

    def _do_shl(self, instruction: Instruction, mask: Mask | None) -> None:
        self._shift(instruction, mask, left=True)

    def _do_shr(self, instruction: Instruction, mask: Mask | None) -> None:
        self._shift(instruction, mask, left=False)

    def _shift(self, instruction: Instruction, mask: Mask | None, *, left: bool) -> None:
        to, x, by = instruction.operands
        shifted = numbers.shifted(self._read(x, instruction.type), self._read(by, "u32"), left=left)
        self._write(to, shifted, mask)

    def _do_mul(self, instruction: Instruction, mask: Mask | None) -> None:
        to, a, b = instruction.operands
        if "wide" in instruction.modifiers:
            self._write(to, self._wide_product(instruction, a, b), mask)
        elif "hi" in instruction.modifiers:
            self._compute(instruction, mask, numbers.high_half)
        else:
            self._compute(instruction, mask, np.multiply)

    def _do_mad(self, instruction: Instruction, mask: Mask | None) -> None:
        to, a, b, c = instruction.operands
        if "wide" in instruction.modifiers:
            product = self._wide_product(instruction, a, b)
        else:
            product = self._read(a, instruction.type) * self._read(b, instruction.type)
        kind = f"{instruction.type[0]}{8 * product.itemsize}"
        self._write(to, product + self._read(c, kind), mask)

    def _wide_product(self, instruction: Instruction, a: str, b: str) -> Numbers:
        wide = f"{'i' if instruction.type[0] == 's' else 'u'}{2 * np.dtype(DTYPES[instruction.type]).itemsize}"
        first, second = (self._read(operand, instruction.type).astype(wide) for operand in (a, b))
        return first * second  # type: ignore[no-any-return]

    def _do_bfe(self, instruction: Instruction, mask: Mask | None) -> None:
        to, x, position, length = instruction.operands
        taken = numbers.bits_from(
            self._read(x, instruction.type), self._read(position, "u32"), self._read(length, "u32")
        )
        self._write(to, taken, mask)

    def _do_prmt(self, instruction: Instruction, mask: Mask | None) -> None:
        to, *operands = instruction.operands
        self._write(to, numbers.permuted(*(self._read(operand, "b32") for operand in operands)), mask)


@cache
def _parts(operand: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in operand.strip("{} ").split(","))


@cache
def _constant(operand: str, kind: str) -> Any:
    """None: it is none."""
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
