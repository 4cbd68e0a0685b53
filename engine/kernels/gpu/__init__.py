"""Kernels for GPUs, in Triton: compiled for the device when first called, or run by Triton's interpreter on a CPU.

    decode.py, prefill.py   paged attention; tile.py is what both do with a tile of keys
    rotate.py               norms of heads, rotary positions and the write into the pool, as one pass
    pointwise.py            residual + RMS norm, SiLU * up
    digest.py               xxh3_64 of blocks in the pool
    parts.py                a decoder's parts by these kernels

Nothing here is imported before a backend that needs it is chosen: Triton need not be installed. What is tried where,
and what has never run: docs/gpu.md.
"""

from __future__ import annotations

from importlib.util import find_spec


def why_no_triton(device: str) -> str:
    """What keeps these kernels from running on `device`, as a clause; empty if nothing does.

    On a CPU only Triton's interpreter can run them (TRITON_INTERPRET=1), for tests: it is thousands of times slower.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        return ""
    import triton

    return "" if triton.knobs.runtime.interpret else f"the device is {device}"
