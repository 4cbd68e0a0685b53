"""8-bit floats, as the KV pool and quantised products use them: float8_e4m3fn.

One bit of sign, 4 of the exponent, 3 of the fraction, no infinity (P. Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). A number is off by 1/16 of itself at most, and by 2**-10 where it is below 2**-6.
"""

from __future__ import annotations

import torch

FLOAT8 = "float8_e4m3fn"
"""In torch's words; Triton calls it float8e4nv."""
MAX_FLOAT8 = 448.0
MIN_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that have them: Ada, then Hopper."""


def why_no_float8(capability: tuple[int, int] | None) -> str:
    """What keeps a GPU of that compute capability (None: there is no GPU) from them, as a clause; empty if nothing."""
    needed = "it needs a GPU of compute capability {}.{} or later".format(*MIN_CAPABILITY)
    if capability is None:
        return needed
    return "" if capability >= MIN_CAPABILITY else "{}, and this one has {}.{}".format(needed, *capability)


def saturated_float8(x: torch.Tensor) -> torch.Tensor:
    """`x` in 8 bits, rounded to the nearest, what is too large to the largest. Of that, conversions differ by version
    and device: some make NaN of it. NaN stays NaN."""
    return x.clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)
