"""Collectives of ranks with pretended GPUs: by gloo, on the memory of their tensors. They take only tensors of the
device, as NCCL does, and graphs record them. If another rank has ended, they wait until they are aborted, and their
result is rubbish."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions
from torch.utils._python_dispatch import _disable_current_modes

from engine.tensor_parallel.group import Store, _gloo
from pretend_gpu.device import PretendGpu
from pretend_gpu.devices import used
from pretend_gpu.memory import DeviceTensor
from pretend_gpu.streams import current_stream, host


class PretendNccl:
    """`ProcessGroupNCCL`, as far as `RankGroup` uses it. A launch runs at once: this thread waits for the other ranks'
    launches."""

    def __init__(self, gpu: PretendGpu, store: Store, rank: int, num_ranks: int) -> None:
        self._gpu = gpu
        self._rank = rank
        self._is_aborted = threading.Event()
        with _disable_current_modes():
            self._gloo = _gloo(store, rank, num_ranks)
            indices = torch.empty(num_ranks, dtype=torch.int64)
            self._gloo._allgather_base(indices, torch.tensor([used().index]), AllgatherOptions()).wait()
            if len(set(indices.tolist())) < num_ranks:
                raise RuntimeError(f"Duplicate GPU detected: ranks use {indices.tolist()}")

    def abort(self) -> None:
        self._is_aborted.set()

    def _set_default_timeout(self, timeout: Any) -> None:
        self._gloo._set_default_timeout(timeout)

    def _allgather_base(self, gathered: torch.Tensor, x: torch.Tensor, options: AllgatherOptions) -> None:
        out, part = self._memory_of(gathered, x, options)
        self._launch(lambda: self._gloo._allgather_base(out, part, AllgatherOptions()), out, part)

    def alltoall_base(
        self, mine: torch.Tensor, parts: torch.Tensor, out_sizes: list[int], sizes: list[int], options: AllToAllOptions
    ) -> None:
        out, part = self._memory_of(mine, parts, options)
        self._launch(lambda: self._gloo.alltoall_base(out, part, out_sizes, sizes, AllToAllOptions()), out, part)

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> None:
        memories = self._memory_of(*tensors, options)
        self._launch(lambda: self._gloo.broadcast(memories, BroadcastOptions()), *memories)

    def _memory_of(self, *arguments: Any) -> list[torch.Tensor]:
        *tensors, options = arguments
        assert not options.asyncOp, "beside the current stream"
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor):
                raise RuntimeError("No backend type associated with device type cpu")
            assert tensor.device == used(), "NCCL communicates over the current device"
            assert tensor.is_contiguous()
        return [tensor.memory for tensor in tensors]

    def _launch(self, call: Any, *touched: torch.Tensor) -> None:
        def do() -> None:
            for memory in touched:
                self._gpu.memory.accesses.touch(memory, None, "NCCL", is_written=True)
            with _disable_current_modes(), torch.inference_mode(False):
                try:
                    call().wait()
                except RuntimeError:  # a rank has gone; NCCL does not notice: the device and whoever asks it wait
                    self._is_aborted.wait()
            if self._rank:
                # Rank 0 asks this rank to read memory once it has waited for its own work, and so for the exchanges
                # before. How far rank 0 has waited is not visible here.
                host.follow(current_stream().timeline.mark())

        self._gpu.launch(do, list(touched))
