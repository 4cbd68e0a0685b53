"""Compiles Triton kernels instead of launching them, for the GPU that `now` names, and records the resources that they
use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from machine_code import early_writes, num_from_registers, unfenced_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.gpu.gpu_kind import H200, GpuKind

OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
MULTIPLIES = r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"


@dataclass
class Now:
    kind: GpuKind = H200
    case: str = ""
    """Name of the launch; follows the kernel's name in `found`."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Resources used, by kernel and case."""


now = Now()


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Replaces `JITFunction.run`: compiles the kernel instead of launching it."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False))
    absent = {name: None for name, value in given.items() if value is None}  # constants at compile time
    types = {name: type_of(value) for name, value in given.items() if name not in absent}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=False))
        if isinstance(value, torch.Tensor)
        or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize)
    }
    target = GPUTarget("cuda", 10 * now.kind.capability[0] + now.kind.capability[1], 32)
    compiled = triton.compile(ASTSource(kernel, signature, kwargs | absent, aligned), target=target, options=options)
    stores = sorted(set(re.findall(r"\bst\.global\S*", compiled.asm["ptx"])))
    multiplies = {re.sub(r"(m64)n\d+", r"\1", each) for each in re.findall(MULTIPLIES, compiled.asm["ptx"])}
    usage = resources_of(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared, "stores": stores}
    usage["multiplies"] = sorted(multiplies)
    if "wgmma" in compiled.asm["ptx"]:
        # -ndf skips nvdisasm's own data flow analysis, half of its time: `machine_code.py` follows the branches itself.
        code = output_of(["nvdisasm", "-c", "-ndf"], compiled.asm["cubin"])
        usage |= {"operands": num_from_registers(code), "early_writes": len(early_writes(code))}
        usage["unfenced"] = len(unfenced_products(code))
    now.found[f"{kernel.__name__.strip('_')} {now.case}"] = usage


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def resources_of(cubin: bytes) -> dict[str, Any]:
    text = output_of(["cuobjdump", "-res-usage"], cubin)
    return {name.lower(): int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK")}  # type: ignore[index]


def output_of(command: list[str], cubin: bytes) -> str:
    tool, *options = command
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
