"""Kernels for GPUs, in Triton: compiled for the device when first called, or run by Triton's interpreter on a CPU.

    decode.py, prefill.py   paged attention; tile.py is what both do with a tile of keys
    latents.py              paged attention to latents (DeepSeek)
    latent_project.py       their norm, rotation and write into the pool, as one pass
    rotate.py               norms of heads, rotary positions and the write into the pool, as one pass
    draw.py                 the sampler's draws, with and without filters
    pointwise.py            residual + RMS norm, SiLU * up
    eight_bits.py           products with weights in 8 bits, rows of activations to 8-bit floats
    digest.py               xxh3_64 of blocks in the pool
    parts.py                a decoder's parts by these kernels

Nothing here is imported before a backend that needs it is chosen: Triton need not be installed. What is tried where,
and what has never run: docs/gpu.md.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which


def has_c_compiler() -> bool:
    """Triton compiles a small library for the driver on a machine's first start."""
    return any(which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name)


def why_no_triton(device: str) -> str:
    """What keeps these kernels from running on `device`, as a clause; empty if nothing does.

    On a CPU only Triton's interpreter can run them (TRITON_INTERPRET=1), for tests: it is thousands of times slower.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        return "" if has_c_compiler() else "Triton needs a C compiler, and there is none (cc, gcc or clang, or CC)"
    import triton

    return "" if triton.knobs.runtime.interpret else f"the device is {device}"
