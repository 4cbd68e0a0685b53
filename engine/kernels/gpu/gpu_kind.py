"""The properties of a GPU that determine the sizes of launches: the shared memory available to a program, and the
instructions of its tensor cores.

The code that launches kernels on a GPU asks for its kind once and passes it down. Triton is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class TensorCores(Enum):
    """The instruction to which Triton compiles a product of 64 rows and more. On all GPUs, fewer rows are multiplied by
    MMA."""

    MMA = "mma.sync"
    """8.x and 12.x: one warp, from registers into registers. Also used for unknown GPUs."""
    WGMMA = "wgmma"
    """9.0: four warps together, from shared memory; sums are in registers."""
    TCGEN05 = "tcgen05"
    """10.x: sums are in a separate memory, and pass through registers to be scaled."""


MIN_CAPABILITY = (8, 0)
"""The lowest compute capability whose tensor cores Triton uses. For earlier GPUs it still compiles, but without tensor
cores, and tiles of these sizes spill kilobytes of registers."""
WITH_THEIR_OWN = {9: TensorCores.WGMMA, 10: TensorCores.TCGEN05}
"""By the major number of the compute capability."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    capability: tuple[int, int]
    shared_bytes: int
    """The most shared memory that a program may have."""

    @property
    def tensor_cores(self) -> TensorCores:
        return WITH_THEIR_OWN.get(self.capability[0], TensorCores.MMA)


H200 = GpuKind((9, 0), 227 << 10)
"""Also the kind of an H100."""


def gpu_kind(device: str | torch.device) -> GpuKind:
    """The kind of `device`; on a CPU, where Triton's interpreter accepts any sizes, that of an H200."""
    if torch.device(device).type != "cuda":
        return H200
    properties: Any = torch.cuda.get_device_properties(device)
    # Not `shared_memory_per_block`, the default limit, which is 48 KiB on all GPUs. torch's stubs lack this property.
    return GpuKind((properties.major, properties.minor), properties.shared_memory_per_block_optin)
