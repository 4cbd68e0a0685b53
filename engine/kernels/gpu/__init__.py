"""Kernels for GPUs, in Triton: compiled for the device when first called, or run by Triton's interpreter on a CPU.

    decode.py, prefill.py   paged attention; tile.py is what both do with a tile of keys
    pieces.py               the same where a token has the same bits in both (`batch_invariant`)
    latents.py              paged attention to latents (DeepSeek)
    latent_project.py       their norm, rotation and write into the pool, as one pass
    rotate.py               norms of heads, rotary positions and the write into the pool, as one pass
    draw.py                 the sampler's draws, with and without filters
    pointwise.py            residual + RMS norm, SiLU * up
    product.py              products whose rows have the same bits in any batch; invariant_parts.py: a decoder's parts
    eight_bits.py           products with weights in 8 bits, rows of activations to 8-bit floats
    experts.py              products of a mixture's experts with such weights, all experts at once
    choose.py               which experts a token gets
    lora.py                 what adapters add to products, rows of all adapters at once; adapters.py: an engine's
    one_row.py              products of one row with weights of 16 or 8 bits
    digest.py               xxh3_64 of blocks in the pool
    parts.py                a decoder's parts by these kernels

Nothing here is imported before a backend that needs it is chosen: Triton need not be installed. What is tried where,
and what has never run: docs/gpu.md.
"""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which


def why_no_c_compiler() -> str:
    """What keeps Triton from compiling its small libraries for the driver and for launches, as a clause; empty if
    nothing does. Looks where Triton looks (its runtime/build.py): it takes CC as it is, and never asks for `cc`."""
    compiler = os.environ.get("CC")
    if compiler is not None and not which(compiler):
        return f"Triton compiles with CC, which is {compiler!r}, and there is no such program"
    if compiler is None and not (which("gcc") or which("clang")):
        return "Triton needs a C compiler, and there is none (gcc or clang, or CC)"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not Path(headers, "Python.h").is_file():
        return f"Triton compiles C with Python's headers, and there is no Python.h in {headers} (python3-dev)"
    return ""


def why_no_triton(device: str) -> str:
    """What keeps these kernels from running on `device`, as a clause; empty if nothing does.

    On a CPU only Triton's interpreter can run them (TRITON_INTERPRET=1), for tests: it is thousands of times slower.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        return why_no_c_compiler()
    import triton

    return "" if triton.knobs.runtime.interpret else f"the device is {device}"
