"""Instructions that compute numbers from numbers, in each thread separately."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx import arithmetic as numbers
from ptx.arithmetic import DTYPES, UNSIGNED, Numbers
from ptx.program import Instruction
from ptx.registers import Mask, Registers, parts_of


class Computing(Registers):
    """`_do_NAME` runs instructions of that name; `_compute` those that are one operation on numbers of one type."""

    def _do_mov(self, instruction: Instruction, mask: Mask | None) -> None:
        to, source = instruction.operands
        if to.startswith("{"):
            parts = parts_of(to)
            bits = self._read(source, instruction.type)
            columns = bits.view(UNSIGNED[bits.itemsize // len(parts)]).reshape(-1, len(parts)).T
            for name, column in zip(parts, columns, strict=True):
                self._write(name, column, mask)
        elif source.startswith("{"):
            parts = parts_of(source)
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
        """Applies `operation` to numbers of one type, including two 16-bit numbers in one register."""
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
