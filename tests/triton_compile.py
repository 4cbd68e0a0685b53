"""Compiles the Triton kernels as their callers launch them, for GPUs of any kind, on a machine without one.

    triton_compile.py 90 "128 bfloat16" normed 120     # two cases for an H200, all for an RTX 50

This is a process of its own because Triton cannot compile in a process in which it interprets.

Prints a JSON object. For each kind of GPU, kernel and case it gives what a program uses: registers per thread, bytes of
stack (spilled registers), bytes of shared memory; the store instructions to global memory; the multiply instructions,
without their number of columns. For Hopper's tensor cores it also counts products whose first operand lies in
registers, instructions that write to such registers too early, and products that lack a fence (`machine_code.py`).
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
    """`chosen`: names of cases. Empty: all cases that this kind of GPU supports."""
    now.kind, now.found = GPU_KINDS[capability], {}
    cases = attention_cases() | other_cases()
    if why_no_float8(capability):
        cases = {name: compile_case for name, compile_case in cases.items() if not has_float8(name)}
    for case in chosen or cases:
        now.case = case
        cases[case]()
    return now.found


def main(arguments: list[str]) -> None:
    """Arguments: each number is a compute capability without the point; the cases after it belong to it."""
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
