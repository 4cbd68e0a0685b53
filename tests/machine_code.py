"""Searches a kernel's machine code, as disassembled by `nvdisasm`, for errors that no interpreter shows.

On Hopper, tensor cores multiply asynchronously: an HGMMA whose first operand lies in registers reads them until the
program has waited for the group of products that it belongs to. If the program writes to these registers earlier, the
product is sometimes wrong. Neither Triton nor its assembler prevents that in every loop (triton-lang/triton issue
9433).

Tensor cores also read shared memory through a separate path (the async proxy), on which copied data may be invisible
before a fence. Triton emits that fence from 3.7.1 on (triton-lang/triton pull requests 9610, 10537; wrong reads without
it, on a B200: pytorch/pytorch issue 181248).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPERAND_REGISTERS = 4
"""Registers per thread that hold the first operand of an HGMMA, whatever its type."""
MOST_GROUPS = 64
"""Groups of products in flight at a time. If there are more, a loop never waits for them, or this module misreads the
code."""

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([^;]*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\w+):")
TARGET = re.compile(r"`\((\.L_x_\w+)\)")
WRITTEN = re.compile(r"^\S+\s+(?:U?P\w+,\s*)?R(\d+)\b")
MULTIPLIED = re.compile(r"^\wGMMA\S*\s+R\d+,\s*R(\d+)\b")
COPIED = "DEPBAR.LE SB0"
"""A wait for copies to shared memory (cp.async)."""
FENCE = "FENCE.VIEW.ASYNC"
WAIT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Reading:
    """Registers that tensor cores may still read: those of products not in a group yet, and of each group in flight."""

    ungrouped: frozenset[int] = frozenset()
    groups: tuple[frozenset[int], ...] = ()

    def after(self, code: str) -> Reading:
        if wait := WAIT.match(code):
            num_done = max(len(self.groups) - int(wait[1], 16), 0)
            return Reading(self.ungrouped, self.groups[num_done:])
        if not re.match(r"\wGMMA", code):
            return self
        ungrouped = self.ungrouped | operand_of(code)
        if "gsb0" not in code:
            return Reading(ungrouped, self.groups)
        assert len(self.groups) < MOST_GROUPS, "nothing waits for these products"
        return Reading(groups=(*self.groups, ungrouped))

    def registers(self) -> frozenset[int]:
        return self.ungrouped.union(*self.groups)


@dataclass(slots=True)
class Code:
    instructions: list[tuple[str, str]] = field(default_factory=list)
    """(predicate or "", the instruction without it)"""
    labels: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> Code:
        code = Code()
        for line in text.splitlines():
            if label := LABEL.match(line):
                code.labels[label[1]] = len(code.instructions)
            elif found := INSTRUCTION.search(line):
                code.instructions.append((found[1] or "", found[2]))
        return code

    def following(self, index: int) -> list[int]:
        """Return the indexes of the instructions that may run next. Calls are taken to return."""
        predicate, code = self.instructions[index]
        name, _, operands = code.partition(" ")
        kind = name.split(".")[0]
        target = TARGET.search(operands)
        places = []
        if kind == "BRA" and target:
            places.append(self.labels[target[1]])
        is_certain = not predicate and (kind in ("EXIT", "RET") or (name == "BRA" and operands.startswith("`")))
        if not is_certain and index + 1 < len(self.instructions):
            places.append(index + 1)
        return places


def early_writes(text: str) -> list[str]:
    """Find instructions that, on any path through the program, write to a register which tensor cores may still
    read."""
    code = Code.of(text)
    found = {}
    seen = {(0, Reading())}
    left = list(seen)
    while left:
        index, reading = left.pop()
        instruction = code.instructions[index][1]
        if written_by(instruction) & reading.registers():
            found[index] = instruction
        after = reading.after(instruction)
        for place in code.following(index):
            if (place, after) not in seen:
                seen.add((place, after))
                left.append((place, after))
    return [found[index] for index in sorted(found)]


def unfenced_products(text: str) -> list[str]:
    """Find products that, on some path through the program, have no fence after the last wait for copies to shared
    memory."""
    code = Code.of(text)
    found = {}
    seen = {(0, False)}
    left = list(seen)
    while left:
        index, is_unfenced = left.pop()
        instruction = code.instructions[index][1]
        if is_unfenced and re.match(r"\wGMMA", instruction):
            found[index] = instruction
        after = instruction.startswith(COPIED) or (is_unfenced and not instruction.startswith(FENCE))
        for place in code.following(index):
            if (place, after) not in seen:
                seen.add((place, after))
                left.append((place, after))
    return [found[index] for index in sorted(found)]


def num_from_registers(text: str) -> int:
    """Count the products whose first operand lies in registers."""
    return sum(bool(operand_of(instruction)) for _, instruction in Code.of(text).instructions)


def operand_of(instruction: str) -> frozenset[int]:
    """Return the registers of a product's first operand: none if it lies in shared memory, or if the instruction is no
    product."""
    operand = MULTIPLIED.match(instruction)
    first = int(operand[1]) if operand else 0
    return frozenset(range(first, first + OPERAND_REGISTERS) if operand else ())


def written_by(instruction: str) -> set[int]:
    """Return the registers that the instruction writes, except those that an HGMMA accumulates to: the wait for the
    product covers them, too."""
    written = WRITTEN.match(instruction)
    name = instruction.split(maxsplit=1)[0]
    # The first register of all these but HGMMA is read, not written.
    if not written or re.match(r"\wGMMA", name) or name.startswith(("RET", "BRX", "CALL", "WARPSYNC")):
        return set()
    first = int(written[1])
    return set(range(first, first + num_written(name)))


def num_written(name: str) -> int:
    parts = name.split(".")
    if parts[0].startswith("LD"):
        if parts[0] == "LDSM":
            return int(parts[-1]) if parts[-1].isdigit() else 1
        return 4 if "128" in parts else 2 if "64" in parts else 1
    if parts[0] in ("HMMA", "IMMA"):
        return 4
    is_pair = parts[0] in ("CS2R", "DADD", "DMUL", "DFMA") or "WIDE" in parts or {"F64", "S64", "U64"} & set(parts[1:2])
    return 2 if is_pair else 1
