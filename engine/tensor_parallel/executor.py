"""Runs steps on several ranks: rank 0 in this process, each other one in a process of its own.

Owns the other ranks' processes and the watch over them: once one has ended, nothing more is launched, and no tokens are
taken. See `engine.tensor_parallel` for what ranks do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.kv_memory import KVMemory
from engine.kv_shape import KVCacheShape
from engine.lora.adapters import ReadAdapter
from engine.lora.modules import LoRAModule
from engine.running.executor import Executor, RankLost
from engine.running.head_drafter import HeadDrafter
from engine.running.host_copies import HostCopies
from engine.running.worker import Worker
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import BlockExport, DraftPart, OnLayerWritten, SchedulerOutput
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.rank_adapters import RankAdapters
from engine.tensor_parallel.rank_copies import RankCopies
from engine.tensor_parallel.rank_processes import RankProcesses
from engine.tensor_parallel.rank_watch import RankWatch


class TensorParallelExecutor(Executor):
    """Used only by the stepping thread, except `rank_pids`. The constructor loads the model on all ranks in
    parallel."""

    def __init__(self, config: EngineConfig, on_layer_written: OnLayerWritten | None, memory: KVMemory) -> None:
        self._num_ranks = config.parallel.tensor_parallel_size
        self._memory = memory
        self._ranks = RankProcesses(config, memory)
        self._rank_adapters = RankAdapters(self._ranks.adapter_connections, self._ranks.tell_change)
        self._watch: RankWatch | None = None
        """Set once all ranks have loaded."""
        self._pool: torch.Tensor | None = None
        """The pool of all ranks, on a CPU."""
        device = config.device.device
        try:
            self._ranks.wait_until_here()
            told = None if on_layer_written is None else self._of_all_ranks(on_layer_written, config.model.num_layers)
            # If a rank has ended, exchanges with it fail on a CPU but hang on GPUs.
            with nullcontext() if device == "cpu" else self._ranks.ending_with_them():
                group = RankGroup(0, self._num_ranks, device, self._ranks.meeting_file)
                self._worker = Worker(config, told, self._allocate, group)
            if isinstance(self._worker.drafter, HeadDrafter):
                self._worker.drafter.on_round = self._ranks.tell_round
            self._host_copies = self._make_host_copies(config)
            self._watch = self._ranks.watch(group.abort)
        except BaseException as error:
            if not isinstance(error, ValueError):
                self._ranks.check()  # reports the rank that ended first, and why
            self._ranks.close()
            raise

    @property
    def kv_pool(self) -> torch.Tensor:
        """[layer, block, part, kv_head, slot, head_dim]. On a CPU: all layers of rank 0, then all of rank 1, and so on.
        On GPUs: only those of rank 0; the other ranks have theirs."""
        return super().kv_pool if self._pool is None else self._pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return super().kv_shape if self._pool is None else self._shape_of_all(super().kv_shape)

    @property
    def rank_pids(self) -> list[int]:
        return self._ranks.pids

    def draft(self, parts: list[DraftPart]) -> list[list[int]]:
        """Raises `RankLost` where a rank has ended."""
        assert self._watch is not None
        with self._watch.launching():
            return super().draft(parts)

    def launch(self, output: SchedulerOutput) -> SampledTokens:
        """Raises `RankLost` where a rank has ended."""
        assert self._watch is not None
        with self._watch.launching():
            step = self._worker.runner.prepare(output)
            self._ranks.tell(step)
            return self._worker.runner.launch(output, step)

    def wait(self, tokens: SampledTokens) -> list[list[int]]:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            return tokens.wait()

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            super().copy_blocks(copies)

    def take_copied(self) -> list[BlockCopy]:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            return super().take_copied()

    def wait_for_copies(self) -> bool:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            return super().wait_for_copies()

    def read_adapter(self, module: LoRAModule) -> ReadAdapter:
        """May also raise `RankLost`. With several ranks, an adapter must be put before the next one is read."""
        try:
            return self._rank_adapters.read(module, super().read_adapter)
        except RankLost:
            self._ranks.check()  # raises with the rank that ended, and how
            raise

    def put_adapter(self, number: int, adapter: ReadAdapter) -> None:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            self._rank_adapters.put(number, adapter, super().put_adapter)

    def remove_adapter(self, number: int) -> None:
        """Raises `RankLost` where a rank has ended."""
        with self._taking():
            super().remove_adapter(number)
            self._rank_adapters.remove(number)

    def close(self) -> None:
        super().close()
        self._ranks.close()
        # Free recorded steps: NCCL's abort waits for them, which torch would treat as a hang and end the process.
        # Without an error nothing is aborted, so that closing does not depend on NCCL.
        self._worker.runner.close()

    def _taking(self) -> AbstractContextManager[None]:
        """Context for work that needs the other ranks. Raises `RankLost` if one has ended."""
        assert self._watch is not None
        return self._watch.taking()

    def _allocate(self, shape: KVCacheShape, device: str) -> torch.Tensor:
        if device != "cpu":
            return self._memory.allocate(shape, device)
        self._pool, fd = self._memory.allocate_shared(self._shape_of_all(shape))
        self._ranks.tell_pool(fd, shape.num_blocks)
        return self._pool[: shape.num_layers]

    def _host_copies_of(self, num_blocks: int) -> HostCopies:
        if self._pool is not None:  # this process maps the pool of all ranks
            return super()._host_copies_of(num_blocks)
        return RankCopies(self.kv_pool, num_blocks, self._ranks.copy_connections)

    def _shape_of_all(self, shape: KVCacheShape) -> KVCacheShape:
        return replace(shape, num_layers=self._num_ranks * shape.num_layers)

    def _of_all_ranks(self, on_layer_written: OnLayerWritten, num_layers: int) -> OnLayerWritten:
        """Report a layer for all ranks. When rank 0 (or its GPU) has done a layer, every rank has written its part: a
        sum over ranks follows the writes, and ends on no rank before all ranks have reached it."""

        def tell(layer: int, exports: list[BlockExport]) -> None:
            for rank in range(self._num_ranks):
                on_layer_written(rank * num_layers + layer, exports)

        return tell
