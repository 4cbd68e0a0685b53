"""The kinds of GPUs that tests compile kernels for, on a machine that has none of them."""

from __future__ import annotations

from engine.kernels.gpu.gpu_kind import H200, GpuKind

GPU_KINDS = {
    kind.capability: kind
    for kind in (
        GpuKind((8, 0), 163 << 10),  # A100
        GpuKind((8, 6), 99 << 10),  # A10, RTX 30
        GpuKind((8, 9), 99 << 10),  # L4, RTX 40
        H200,
        GpuKind((10, 0), 227 << 10),  # B200
        GpuKind((12, 0), 99 << 10),  # RTX 50, RTX PRO
    )
}
"""By compute capability. The shared memory per program is from CUDA's programming guide, technical specifications."""
