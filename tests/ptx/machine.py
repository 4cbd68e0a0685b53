"""A block of threads that runs a program.

    Block   parameters, shared memory ── warps, in any order, each to the next barrier ── all there? ── on
    Warp    32 threads, or several such together: registers, each thread's place in the program, copies under way

Threads that take different branches run one after the other, those furthest behind first, until they meet again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptx import arithmetic as numbers
from ptx.arithmetic import DTYPES
from ptx.computing import Computing
from ptx.memory import Memory
from ptx.program import Instruction, Program
from ptx.registers import ADDRESS, WARP, Mask, Place, parts_of

_Copy = tuple[NDArray[np.int64], NDArray[np.int64], int, NDArray[np.int64]]
"""Target addresses, source addresses, bytes of each copy, and how many of these are read."""


class WrongProgram(Exception):  # noqa: N818
    """The program does what PTX leaves undefined."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the blocks of one launch share."""

    program: Program
    parameters: dict[str, bytes]
    memory: Memory
    shared_bytes: int
    grid: Place
    warps_together: bool
    """All warps of a block run each instruction at once: faster, but hides errors of their order."""

    def run(self, seed: int = 0) -> None:
        order = np.random.default_rng(seed)
        x, y, z = self.grid
        with np.errstate(all="ignore"):
            for block in order.permutation(x * y * z):
                Block(self, (int(block) % x, int(block) // x % y, int(block) // (x * y))).run(order)


class Block:
    def __init__(self, launch: Launch, place: Place) -> None:
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


class Warp(Computing):
    def __init__(self, block: Block, first: int, size: int) -> None:
        super().__init__(block.launch.program, first, size, block.place, block.launch.grid)
        self._block = block
        self._launch = block.launch
        self._place = 0
        self._places: NDArray[np.int64] | None = None
        """Each thread's place; None: all are at `_place`."""
        self._copies: deque[list[_Copy]] = deque([[]])
        """Pending cp.async copies, by group; the last group is open."""
        self.has_ended = False

    # -- control flow -------------------------------------------------------------------------------------------

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
                self._do_it(instruction, mask)
            except (AttributeError, KeyError, IndexError) as error:
                raise NotImplementedError(f"{instruction.text} ({error!r})") from error
        if self._places is None:
            self._place += 1
        else:
            self._places[self._all(active)] = here + 1

    def _do_it(self, instruction: Instruction, mask: Mask | None) -> None:
        name = instruction.name
        if do := getattr(self, f"_do_{name}", None):
            do(instruction, mask)
            return
        operations = numbers.OF_NAN if "NaN" in instruction.modifiers else numbers.OPERATIONS
        self._compute(instruction, mask, operations[name])

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

    # -- memory -------------------------------------------------------------------------------------------------

    def _memory(self, instruction: Instruction) -> Memory:
        return self._launch.memory if "global" in instruction.modifiers else self._block.shared

    def _do_createpolicy(self, instruction: Instruction, mask: Mask | None) -> None:
        """How long a cache keeps loaded data changes no result."""

    def _do_ld(self, instruction: Instruction, mask: Mask | None) -> None:
        dtype, to = DTYPES[instruction.type], parts_of(instruction.operands[0])
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
        columns = [self._read(name, instruction.type) for name in parts_of(instruction.operands[1])]
        values = np.stack(columns, axis=1).view(np.uint8)
        chosen = self._all(mask)
        self._memory(instruction).store(self._addresses(instruction.operands[0])[chosen], values[chosen])

    def _do_cp(self, instruction: Instruction, mask: Mask | None) -> None:
        """cp.async: the copy is made when the program waits for it."""
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
        to = parts_of(instruction.operands[0])
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
        to, a, b, c = (parts_of(operand) for operand in instruction.operands)
        product = numbers.product_of_tiles(
            [self._read(name, "b32") for name in a], [self._read(name, "b32") for name in b],
            [self._read(name, "f32") for name in c], widen,
        )  # fmt: skip
        for name, values in zip(to, product, strict=True):
            self._write(name, values, mask)
