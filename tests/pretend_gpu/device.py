"""The pretended GPU, which takes over `torch.cuda` as long as it exists."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import engine.kernels.gpu
from engine.kernels.gpu.gpu_kind import H200, GpuKind
from pretend_gpu import devices
from pretend_gpu.memory import mapped
from pretend_gpu.operations import Operations
from pretend_gpu.streams import (
    Event,
    Graph,
    Stream,
    current_graph,
    current_stream,
    recording,
    stream_context,
    synchronize,
)


class PretendGpu:
    """What `torch.cuda` reports about the pretended GPU, and does with it."""

    def __init__(self, total_bytes: int, kind: GpuKind) -> None:
        self.total_bytes = total_bytes
        self.kind = kind
        self._operations = Operations(total_bytes, has_grouped_products=kind.capability[0] in (9, 10))
        self.memory = self._operations.memory

    @property
    def num_launches(self) -> int:
        """Launches of torch's operations so far, see operations.py."""
        return self._operations.num_launches

    def launch(self, action: Callable[[], object], touched: list[torch.Tensor]) -> None:
        """Launches `action`, which is no operation of torch, on memory of the device (given as tensors of the host).
        `action` reports its own accesses to `memory.accesses`."""
        devices.used()
        action()
        if graph := current_graph():
            graph.launch(action, touched, [])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread uses the device."""
        # `torch.tensor` makes its tensor on the host, and then copies it like any other.
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with self._operations.mode:
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    @contextmanager
    def graph(self, graph: Graph, pool: list[Graph] | None = None, **_: object) -> Iterator[None]:
        with recording(graph, [] if pool is None else pool, self.memory):
            yield

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        del device
        return self.total_bytes - self.memory.allocated_bytes, self.total_bytes

    def reset_peak_memory_stats(self, device: object = None) -> None:
        del device
        self.memory.peak_bytes = self.memory.allocated_bytes

    def properties(self, device: object = None) -> SimpleNamespace:
        del device
        return SimpleNamespace(
            name="pretended", total_memory=self.total_bytes, L2_cache_size=1 << 20, multi_processor_count=132,
            major=self.kind.capability[0], minor=self.kind.capability[1],
            shared_memory_per_block_optin=self.kind.shared_bytes,
        )  # fmt: skip

    def as_torch_cuda(self) -> dict[str, Any]:
        """The replacements in `torch.cuda`, by name."""
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": devices.device_count,
            "current_device": devices.current_index,
            "set_device": devices.set_device,
            "get_device_capability": lambda device=None: self.kind.capability,
            "get_device_name": lambda device=None: "pretended",
            "get_device_properties": self.properties,
            "mem_get_info": self.mem_get_info,
            "memory_allocated": lambda device=None: self.memory.allocated_bytes,
            "memory_reserved": lambda device=None: self.memory.allocated_bytes,
            "max_memory_allocated": lambda device=None: self.memory.peak_bytes,
            "reset_peak_memory_stats": self.reset_peak_memory_stats,
            "empty_cache": lambda: None,
            "Stream": Stream,
            "Event": Event,
            "stream": stream_context,
            "current_stream": current_stream,
            "synchronize": synchronize,
            "CUDAGraph": Graph,
            "graph": self.graph,
            "graph_pool_handle": list,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        }


@contextmanager
def pretend_gpu(
    *,
    total_bytes: int = 1 << 30,
    kind: GpuKind = H200,
    has_triton: bool = False,
    num_devices: int = 1,
) -> Iterator[PretendGpu]:
    """`has_triton`: whether the engine finds Triton, if it is installed (triton.py launches its kernels).
    `num_devices`: this process uses one of them, other processes the others."""
    # Torch looks up once, for good, which functions `with torch.device` applies to. This must not happen while
    # `torch.tensor` is replaced: transformers, which finds the device of a new model that way, would from then on leave
    # rotary angles uninitialised.
    _device_constructors()
    gpu = PretendGpu(total_bytes, kind)
    run = threading.Thread.run

    def run_on_gpu(thread: threading.Thread) -> None:
        with gpu.entered():
            run(thread)

    with pytest.MonkeyPatch.context() as patch, devices.so_many(num_devices):
        for name, said in gpu.as_torch_cuda().items():
            patch.setattr(torch.cuda, name, said)
        patch.setattr(threading.Thread, "run", run_on_gpu)
        for owner, name in ((torch.Tensor, "to"), (torch, "tensor")):
            patch.setattr(owner, name, _with_numbers(getattr(owner, name)))
        patch.setattr(torch, "Generator", _HostGenerator)
        # A parameter on the host cannot become one of another class, as it can on a device that exists.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        if not has_triton:
            patch.setattr(engine.kernels.gpu, "find_spec", lambda _: None)
        if num_devices > 1:
            _connect(gpu, patch)
        with gpu.entered():
            yield gpu
        gpu.memory.accesses.check()


def _connect(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    """Connects `gpu` with the GPUs of other processes."""
    from pretend_gpu.ipc import PretendDriver  # a single GPU needs none of these imports
    from pretend_gpu.nccl import PretendNccl
    from pretend_gpu.nixl import import_nixl

    driver = PretendDriver(gpu)
    patch.setattr("engine.kv_memory.allocate_kv_pool", driver.allocate_kv_pool)
    patch.setattr("worker_service.pool_memory.cuda_peers", driver.peers)
    patch.setattr("engine.tensor_parallel.group._nccl", partial(PretendNccl, gpu))
    patch.setattr("kv_transfer.nixl_agent._import_nixl", partial(import_nixl, gpu.memory.accesses, driver.pools))


class _HostGenerator(torch.Generator):
    """A generator of the host, whatever the device: both get the same random numbers."""

    def __new__(cls, device: object = "cpu") -> _HostGenerator:
        del device
        return super().__new__(cls, "cpu")


def _with_numbers(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gives `cuda` its number, since torch would ask the device's library which device it is."""

    def numbered(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = mapped((str, torch.device), _with_number, (args, kwargs))
        return function(*args, **kwargs)

    return numbered


def _with_number(device: str | torch.device) -> str | torch.device:
    return devices.used() if str(device) == "cuda" else device
