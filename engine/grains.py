"""Sizes of weights in 8 or 4 bits must be multiples of these. No torch."""

INT8_GRAIN = 2
"""The CPU kernels take inputs in pairs."""
FLOAT8_GRAIN = 16
"""Both sizes of a weight in 8 bits must be multiples of this for `torch._scaled_mm`."""
GROUP_GRAIN = 16
"""Groups of inputs must be a multiple of this, the least that tensor cores multiply at once."""
INT4_GRAIN = 32
"""Groups of inputs in 4 bits must be a multiple of this for our kernels, which take this many inputs at once."""
INT4_GROUP_SIZE = 32
"""Group size of weights that are quantised here: as in GGUF's formats; its errors are half of those of 128 inputs."""
