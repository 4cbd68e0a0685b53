"""Launches of Triton kernels on the pretended GPU.

`triton_interprets`: by Triton's interpreter, which computes results (import `triton_device` before the kernels).
`triton_compiles`: Triton compiles each launched kernel to machine code as usual, for the types, constants and
alignments of the launch's arguments; the driver then does not run it, so nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes
from triton_accesses import races_allowed, told_of

from pretend_gpu.device import PretendGpu
from pretend_gpu.memory import device_tensors_in, on_host, storage_of, tensors_in
from pretend_gpu.races import GRANULE_BYTES


@contextmanager
def triton_interprets(gpu: PretendGpu) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_on_gpu(kernel: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _arguments(args, kwargs)
        given = tensors_in((args, kwargs))

        def touch(name: str, addresses: NDArray[np.uint64], is_stored: bool) -> None:
            for memory in {storage_of(each): each for each in given}.values():
                storage = memory.untyped_storage()
                # unsigned: addresses before it wrap to huge offsets
                offsets = addresses - np.uint64(storage.data_ptr())
                places = np.unique(offsets[offsets < storage.nbytes()].astype(np.int64) // GRANULE_BYTES)
                gpu.memory.accesses.touch(memory, places, name, is_written=is_stored)

        def launch() -> None:
            with _disable_current_modes(), torch.inference_mode(False), told_of(touch):
                run(kernel, *args, **kwargs)

        gpu.launch(launch, given)

    with pytest.MonkeyPatch.context() as patch, races_allowed():
        patch.setattr(InterpretedFunction, "run", run_on_gpu)
        yield


@contextmanager
def triton_compiles(gpu: PretendGpu, variants: Counter[str]) -> Iterator[None]:
    """`variants`: counts the compiled variants of each kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            del metadata
            variants[source.name] += 1

        def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
            assert x < 2**31, f"a grid of {x, y, z}"
            assert y < 2**16, f"a grid of {x, y, z}"
            assert z < 2**16, f"a grid of {x, y, z}"
            arguments, _ = _arguments(rest, {})
            gpu.launch(lambda: None, tensors_in(arguments))

    major, minor = gpu.kind.capability
    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.kind.shared_bytes},
            load_binary=lambda name, binary, shared, device: (object(), 1, 0, 0, 1024),
        ),
    )
    before, gpu.memory.rubbish = driver._active, 0
    driver.set_active(pretended)  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver._active = before


def _arguments(args: Any, kwargs: Any) -> Any:
    """The arguments with memory instead of tensors, all of which must be on the device."""
    on_device = {id(tensor) for tensor in device_tensors_in((args, kwargs))}
    for tensor in tensors_in((args, kwargs)):
        if id(tensor) not in on_device:
            raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {tuple(tensor.shape)}")
    return on_host((args, kwargs))
