"""8-bit floats of the KV pool and of quantised products: float8_e4m3fn.

One bit of sign, 4 of exponent, 3 of fraction, no infinity (P. Micikevicius et al., "FP8 Formats for Deep Learning",
2022). The rounding error is at most 1/16 of a number, and at most 2**-10 below 2**-6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOAT8 = "float8_e4m3fn"
"""torch's name; Triton's is float8e4nv."""
MAX_FLOAT8 = 448.0
MIN_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that support them: Ada, then Hopper."""


def why_no_float8(capability: tuple[int, int] | None) -> str:
    """Why a GPU of this compute capability (None: no GPU) cannot use them, as a clause; empty if it can."""
    needed = "it needs a GPU of compute capability {}.{} or later".format(*MIN_CAPABILITY)
    if capability is None:
        return needed
    return "" if capability >= MIN_CAPABILITY else "{}, and this one has {}.{}".format(needed, *capability)


def saturated_float8(x: torch.Tensor) -> torch.Tensor:
    """Round `x` to 8 bits, and numbers that are too large to the largest. Plain conversions of those differ by version
    and device: some give NaN. NaN stays NaN."""
    import torch  # only here: settings that name these floats are checked without it

    return x.clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)
