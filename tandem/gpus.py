"""Which of this machine's GPUs each worker of a local cluster gets.

    visible_gpus ──> share_out ──> for each worker: CUDA_VISIBLE_DEVICES, and how many workers have these GPUs

A worker has a GPU for each of its ranks: GPUs of its own as long as there are enough, otherwise the workers share all
that there are. It takes the first ones that it sees, so its own come first. It sees the others, too, since CUDA opens
a peer's memory (`--transport ipc`) only on a GPU that is visible.

Owns nothing. Imports no torch, which would take the starting process seconds.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from engine.kernels.gpu import why_no_triton

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"
"""NVIDIA's library about GPUs, which comes with the driver."""

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment of torch's allocator; the second is the older name."""
NOT_EXPORTED = ("expandable_segments:True", "backend:cudaMallocAsync")
"""With these settings, CUDA exports no handle of torch's memory."""
KERNEL_VERSION = Path("/proc/version")
IPC_IS_FASTER = (
    "KV goes over grpc, through the host. If the GPUs have access to each other (NVLink), --transport ipc is many "
    "times faster"
)


class Gpus(NamedTuple):
    """What one worker gets."""

    own: tuple[str, ...]
    """As in CUDA_VISIBLE_DEVICES, one for each rank."""
    others: tuple[str, ...]
    """All others of the machine."""
    num_sharing: int
    """How many workers have the same GPUs for their own, this one included."""

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES for the worker."""
        return ",".join([*self.own, *self.others])


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that processes started from here see, named as in CUDA_VISIBLE_DEVICES; empty if there is none."""
    num_gpus = _num_gpus()
    if (given := os.environ.get(VISIBLE)) is None:
        return tuple(str(number) for number in range(num_gpus))

    def is_name(name: str) -> bool:
        is_no_number = bool(num_gpus) and name.isdecimal() and int(name) >= num_gpus
        return name not in ("", "-1") and not is_no_number

    # CUDA ignores what follows a name that is none.
    return tuple(takewhile(is_name, (name.strip() for name in given.split(","))))


def share_out(gpus: Sequence[str], workers: Sequence[str], num_ranks: int) -> Mapping[str, Gpus]:
    """Each worker's GPUs, by its name: in turn, so that those which share GPUs are of both roles, if there are as many
    of each. Empty if there are fewer GPUs than a worker has ranks: workers then say so themselves."""
    num_places = len(gpus) // num_ranks
    if not num_places:
        return {}
    places = [number % num_places for number in range(len(workers))]
    num_at = Counter(places)

    def at(place: int) -> Gpus:
        begin, end = place * num_ranks, (place + 1) * num_ranks
        return Gpus(tuple(gpus[begin:end]), (*gpus[:begin], *gpus[end:]), num_at[place])

    return {worker: at(place) for worker, place in zip(workers, places, strict=True)}


def in_words(shares: Mapping[str, Gpus]) -> str:
    """ "prefill-1 on GPU 0, decode-1 on GPU 1"."""
    return ", ".join(f"{worker} on GPU {' and '.join(gpus.own)}" for worker, gpus in shares.items())


def has_cuda_ipc() -> bool:
    """Whether workers on one GPU can write into each other's memory there, as far as can be told without the GPU: what
    `--transport ipc` needs for that is installed, and nothing is known to be in its way. A worker that is told to use
    `ipc`, and cannot, does not start."""
    try:
        has_bindings = find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # of `cuda`
        has_bindings = False
    return has_bindings and not why_no_triton("cuda") and _is_memory_exported() and not _is_windows()


def _is_memory_exported() -> bool:
    """Whether torch's allocator takes its memory by `cudaMalloc`, as by default."""
    settings = [os.environ.get(name, "").replace(" ", "") for name in ALLOCATOR_SETTINGS]
    return not any(setting in each.split(",") for each in settings for setting in NOT_EXPORTED)


def _is_windows() -> bool:
    """Whether this is Windows' subsystem for Linux, where CUDA has no interprocess handles (sgl-project/sglang issue
    35385)."""
    try:
        return "microsoft" in KERNEL_VERSION.read_text().lower()
    except OSError:
        return False


def _num_gpus() -> int:
    """By NVIDIA's driver; 0 without one."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():
            return 0
    except (OSError, AttributeError):
        return 0
    number = ctypes.c_uint()
    has_failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    nvml.nvmlShutdown()
    return 0 if has_failed else number.value
