"""The text of a compiled kernel, in NVIDIA's PTX, as instructions.

Knows only the part of PTX that Triton's compiler writes. Source: NVIDIA's "Parallel Thread Execution ISA", version 8.7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

DIRECTIVES = (".reg", ".loc", ".pragma", ".file", ".section", ".shared", ".global", ".extern")
LABEL = re.compile(r"^(\$[\w.$]+):")
GUARD = re.compile(r"^@(!?)(%\w+)\s+")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    """The operation: `add`, `ld`, …"""
    modifiers: tuple[str, ...]
    """The rest of the instruction's name; its type comes last."""
    operands: tuple[str, ...]
    """The target comes first, if there is one."""
    guard: str
    """The predicate under which a thread runs the instruction; empty: always."""
    is_negated: bool
    text: str

    @property
    def type(self) -> str:
        return self.modifiers[-1]

    @property
    def num_in_vector(self) -> int:
        return next((int(each[1:]) for each in self.modifiers if re.fullmatch(r"v[248]", each)), 1)


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    num_threads: int
    instructions: tuple[Instruction, ...]
    places: dict[str, int]
    """By label, the index of the instruction that follows it."""
    widths: dict[str, int]
    """Registers' widths in bits, by name; numbered registers by their common prefix, such as `%r<`."""


@lru_cache(maxsize=64)
def parse(text: str) -> Program:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    found = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\n\{(.*?)\$L__func_end0:", text, re.S)
    assert found is not None
    name, _, directives, body = found.groups()
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", directives)
    assert threads is not None
    widths: dict[str, int] = {}
    instructions: list[Instruction] = []
    places: dict[str, int] = {}
    for line in _statements(body):
        rest = line
        while label := LABEL.match(rest):
            places[label[1]] = len(instructions)
            rest = rest[label.end() :].strip()
        if rest.startswith(".reg"):
            _, kind, *names = re.split(r"[\s,]+", rest)
            for each in names:
                widths[re.sub(r"\d+>$", "", each)] = 1 if kind == ".pred" else int(re.sub(r"\D", "", kind))
        elif rest and not rest.startswith(DIRECTIVES):
            instructions.append(_instruction(rest))
    return Program(name, int(threads[1]), tuple(instructions), places, widths)


def _statements(body: str) -> list[str]:
    """The statements, each after its labels, without the directives that end with their line, and without braces."""
    body = re.sub(r"^\s*\.(?:loc|file|section)\b[^\n]*$", "", body, flags=re.M)
    statements = []
    for each in body.split(";"):
        statement = " ".join(each.split())
        while True:
            if statement.startswith("}") or statement.startswith("{"):
                statement = statement[1:].strip()
            elif (label := LABEL.match(statement)) and statement[label.end() :].strip()[:1] in ("{", "}"):
                statement = statement[: label.end()] + statement[label.end() :].strip()[1:]
            else:
                break
        statements.append(statement)
    return statements


def _instruction(text: str) -> Instruction:
    guard = GUARD.match(text)
    rest = text[guard.end() :] if guard else text
    name, _, operands = rest.partition(" ")
    name, *modifiers = name.split(".")
    return Instruction(
        name, tuple(modifiers), tuple(each.strip() for each in OPERAND.findall(operands)), guard[2] if guard else "",
        bool(guard and guard[1]), text,
    )  # fmt: skip
