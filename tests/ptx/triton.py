"""Triton's launches, compiled for a GPU and run by `machine.py`.

    kernel[grid](tensors, …) ── Triton: specialise, compile ── PTX ── Launch: on the memory of the tensors

Compiles for compute capability 8.9: of those whose tensor cores take their operands from registers (`mma.sync`), it is
the one with 8-bit floats.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from triton_accesses import known_tensors

from ptx.machine import Launch
from ptx.memory import Memory, Region
from ptx.program import parse

CAPABILITY = 89
FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
NO_SCRATCH = struct.pack("Q", 0)


@dataclass
class Settings:
    """The settings of the process."""

    warps_together: bool = False
    num_launches: int = 0


settings = Settings()


class Launcher:
    """Replaces Triton's launcher, which puts a kernel and its arguments on a device."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = list(source.signature.values())
        self._shared_bytes = metadata.shared

    def __call__(self, x: int, y: int, z: int, stream: int, text: bytes, *rest: Any) -> None:
        del stream
        program = parse(text.decode())
        arguments = rest[4:]  # after the hooks and their arguments
        given = [each for each in zip(self._types, arguments, strict=True) if each[0] != "constexpr"]
        packed = [*(_packed(*each) for each in given), NO_SCRATCH, NO_SCRATCH]  # the two kinds of scratch memory
        parameters = {f"{program.name}_param_{index}": value for index, value in enumerate(packed)}
        tensors = [value for _, value in given if isinstance(value, torch.Tensor)] + known_tensors()
        memory = Memory("global", [Region.of(tensor) for tensor in tensors])
        settings.num_launches += 1
        launch = Launch(program, parameters, memory, self._shared_bytes, (x, y, z), settings.warps_together)
        launch.run(seed=settings.num_launches)


def run_ptx(*, warps_together: bool) -> None:
    """Runs the PTX of all kernels that this process compiles from now on. `warps_together`: see `machine.Launch`."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    settings.warps_together = warps_together
    knobs.runtime.add_stages_inspection_hook = _without_machine_code
    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda name, text, shared, device: (None, text, 0, 0, 1024),
        ),
    )
    driver.set_active(pretended)  # type: ignore[arg-type]


def _packed(kind: str, value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return struct.pack("Q", value.data_ptr())
    return struct.pack("Q" if kind.startswith("*") else FORMATS[kind], value)


def _without_machine_code(*compilation: Any) -> tuple[str, str] | None:
    """Replaces a compilation's last stage, which makes machine code from PTX, by one that keeps the PTX. Called without
    a compilation, returns the key that, besides the source, tells these kernels from others in Triton's cache."""
    if not compilation:
        return "PTX alone", "PTX alone"
    _, stages, *_ = compilation
    stages["cubin"] = lambda text, metadata: text.encode()
    return None
