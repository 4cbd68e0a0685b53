"""FlashAttention on the pretended GPU: the functions of tests/flash_reference.py, launched like the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pretend_gpu.device import PretendGpu
from pretend_gpu.memory import device_tensors_in, on_host, tensors_in


def launched(gpu: PretendGpu, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function`, as a launch: its first argument is queries, and the host does not wait for its result."""

    def launch(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = q, args, kwargs
        assert len(device_tensors_in(given)) == len(tensors_in(given)), "a tensor of the host"
        out = torch.empty_like(q)
        memory, (q, args, kwargs) = on_host(out), on_host(given)

        def compute() -> None:
            for each in tensors_in((q, args, kwargs)):
                gpu.memory.accesses.touch(each, None, "FlashAttention", is_written=False)
            gpu.memory.accesses.touch(memory, None, "FlashAttention", is_written=True)
            with _disable_current_modes(), torch.inference_mode(False):
                memory.copy_(function(q, *args, **kwargs))

        gpu.launch(compute, tensors_in((memory, q, args, kwargs)))
        return out

    return launch
