"""What sizes of a launch follow from: the shared memory that a program may have, and how tensor cores are told.

A GPU's kind is asked for once by whoever launches on it, and passed down. No Triton is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class TensorCores(Enum):
    """What Triton compiles a product of 64 rows and more to. Fewer rows are multiplied by MMA everywhere."""

    MMA = "mma.sync"
    """8.x and 12.x: a warp's own, from registers into registers. Also of kinds that are not known."""
    WGMMA = "wgmma"
    """9.0: four warps together, from shared memory; sums lie in registers."""
    TCGEN05 = "tcgen05"
    """10.x: sums lie in a memory of their own, and pass through registers to be scaled."""


MIN_CAPABILITY = (8, 0)
"""Of GPUs whose tensor cores Triton uses. For earlier ones it still compiles, without them, and tiles of this size are
spilled by the kilobyte."""
WITH_THEIR_OWN = {9: TensorCores.WGMMA, 10: TensorCores.TCGEN05}
"""By the first number of the compute capability."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    capability: tuple[int, int]
    shared_bytes: int
    """Of shared memory, that a program may have at most."""

    @property
    def tensor_cores(self) -> TensorCores:
        return WITH_THEIR_OWN.get(self.capability[0], TensorCores.MMA)


H200 = GpuKind((9, 0), 227 << 10)
"""And an H100's."""


def gpu_kind(device: str | torch.device) -> GpuKind:
    """Of `device`; on a CPU, where Triton's interpreter takes any sizes, an H200's."""
    if torch.device(device).type != "cuda":
        return H200
    properties: Any = torch.cuda.get_device_properties(device)
    # Not `shared_memory_per_block`, which is what a program has without asking, 48 KiB everywhere; torch's stubs lack
    # this one.
    return GpuKind((properties.major, properties.minor), properties.shared_memory_per_block_optin)
