"""Compiles the Triton kernels as their callers launch them, for GPUs of any kind, on a machine without one.

    triton_compile.py 90 "128 bfloat16" normed 120     # two cases for an H200, all for an RTX 50

A process of its own: where Triton interprets, it does not compile.

Prints a JSON object: per kind, kernel and case, what a program takes: registers of a thread, bytes of stack (registers
that did not fit), bytes of shared memory; how it stores to the device's; by what it multiplies, but for the number of
columns; and of Hopper's tensor cores, products whose first operand lies in registers, instructions that write to such
registers too early, and products that no fence keeps from reading too early (`machine_code.py`).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

from gpu_kinds import GPU_KINDS
from triton.runtime.jit import JITFunction
from triton_attention_cases import attention_cases
from triton_compiler import compile_instead, now
from triton_other_cases import other_cases

from engine.float8 import why_no_float8


def has_float8(name: str) -> bool:
    marks = ("8-bit", "float8", "groups", "DeepSeek-V3", "in blocks")
    return any(mark in name for mark in marks)


def compile_for(capability: tuple[int, int], chosen: list[str]) -> dict[str, dict[str, Any]]:
    """`chosen`: names of cases. Empty: all that such a GPU is given."""
    now.kind, now.found = GPU_KINDS[capability], {}
    cases = attention_cases() | other_cases()
    if why_no_float8(capability):
        cases = {name: compile_case for name, compile_case in cases.items() if not has_float8(name)}
    for case in chosen or cases:
        now.case = case
        cases[case]()
    return now.found


def main(arguments: list[str]) -> None:
    """Numbers are kinds of GPUs, without the point; cases follow theirs."""
    JITFunction.run = compile_instead
    chosen: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.isdigit():
            chosen[argument] = cases = []
        else:
            cases.append(argument)
    usage = {number: compile_for((int(number[:-1]), int(number[-1])), cases) for number, cases in chosen.items()}
    json.dump(usage, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
