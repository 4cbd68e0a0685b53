"""Kernels for GPUs, in Triton: compiled for the device when first called, or run by Triton's interpreter on a CPU.

    decode.py, prefill.py   paged attention; tile.py has the work on one tile of keys that both share
    pieces.py               paged attention in which a token has the same bits in both (`batch_invariant`)
    latents.py              paged attention to latents (DeepSeek); unfolded.py: to keys and values made from them
    latent_project.py       norm, rotation and the write into the pool for latents, in one pass
    rotate.py               norms of heads, rotary positions and the write into the pool, in one pass
    draw.py                 the sampler's draws, with and without filters
    pointwise.py            residual + RMS norm, SiLU * up
    product.py              products whose rows have the same bits in any batch; invariant_parts.py: a decoder's parts
    eight_bits.py           products with 8-bit weights, conversion of rows of activations to 8-bit floats
    int4.py                 products with 4-bit weights
    experts.py              products of a mixture's experts with 8-bit weights, all experts in one launch;
                            int4_experts.py: with 4-bit weights; four_bits.py: with weights in MXFP4
    choose.py               chooses the experts of each token
    convolution.py          causal convolutions, over the states of sequences
    delta.py                gated delta rules, likewise
    scan.py                 scans of Mamba-2, likewise
    spans.py                what the next two share
    delta_spans.py          gated delta rules, many tokens of a sequence at once
    scan_spans.py           scans of Mamba-2, likewise
    lora.py                 what adapters add to products, all adapters in one launch; adapters.py: those of an engine
    one_row.py              products of one row with 16-bit or 8-bit weights
    digest.py               xxh3_64 of blocks in the pool
    copy_rows.py            rows of blocks into another process' pool
    gpu_kind.py             the properties of a GPU that launches depend on
    parts.py                the parts of a decoder, built from these kernels

Nothing here is imported before a backend that needs it is chosen, because Triton may not be installed. docs/gpu.md says
what has been tested on which devices, and what has never run.
"""

from __future__ import annotations

import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from shutil import which


def why_no_c_compiler() -> str:
    """The reason why Triton cannot compile its small libraries for the driver and for launches, as a clause; empty if
    it can. Looks where Triton looks (its runtime/build.py): Triton uses CC unchanged, and never tries `cc`."""
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
    """The reason why these kernels cannot run on `device`, as a clause; empty if they can.

    On a CPU only Triton's interpreter can run them (TRITON_INTERPRET=1), for tests: it is thousands of times slower.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cuda":
        return why_no_c_compiler()
    import triton

    return "" if triton.knobs.runtime.interpret else f"the device is {device}"
