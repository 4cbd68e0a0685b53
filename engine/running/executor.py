"""Runs steps on the devices of one engine: one worker in this process, or several in others (engine/tensor_parallel).

Owns the worker and the `HostCopies` between its pool and host memory. The engine decides, the executor does: `launch`
returns when the step is in the device's queue (a CPU has computed it by then); `wait` then waits for its tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from engine.cache_dir import report
from engine.config import GIB, EngineConfig
from engine.kv_memory import KVMemory
from engine.kv_shape import KVCacheShape
from engine.lora.adapters import Adapters, ReadAdapter
from engine.lora.modules import LoRAModule
from engine.running.host_copies import HostCopies, num_host_blocks
from engine.running.worker import Worker
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.offloading import BlockCopy
from engine.scheduling.sequence import DraftPart, OnLayerWritten, SchedulerOutput


class RankLost(RuntimeError):  # noqa: N818 - named for what happened
    """The process of another rank has ended, so that this engine can no longer compute."""


class Executor:
    """Used only by the stepping thread, except `rank_pids`. The constructor loads the model, which takes seconds."""

    def __init__(
        self, config: EngineConfig, on_layer_written: OnLayerWritten | None = None, memory: KVMemory | None = None
    ) -> None:
        self._worker = Worker(config, on_layer_written, (memory or KVMemory()).allocate)
        self._host_copies = self._make_host_copies(config)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[layer, block, part, kv_head, slot, head_dim], contiguous. Lives as long as this object, at one address."""
        return self._worker.kv_pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return self._worker.kv_shape

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the other ranks, without which this one cannot compute."""
        return []

    def draft(self, parts: list[DraftPart]) -> list[list[int]]:
        """Let the draft model or head do its parts of a step, before `launch`. Returns each one's drafts."""
        assert self._worker.drafter is not None
        return self._worker.drafter.draft(parts)

    def launch(self, output: SchedulerOutput) -> SampledTokens:
        """Begin to compute a step, before `Scheduler.begin` counts it. At most one other step may be in flight."""
        runner = self._worker.runner
        return runner.launch(output, runner.prepare(output))

    def wait(self, tokens: SampledTokens) -> list[list[int]]:
        """Wait for the tokens of a launched step: see `SampledTokens.wait`."""
        return tokens.wait()

    @property
    def num_host_blocks(self) -> int:
        """How many blocks fit into the host memory for offloading."""
        return 0 if self._host_copies is None else self._host_copies.num_blocks

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Begin to copy blocks between the pool and host memory."""
        if copies:
            assert self._host_copies is not None
            self._host_copies.begin(copies)

    def take_copied(self) -> list[BlockCopy]:
        """Return the copies that all ranks have finished since the last call. Raises what a copy raised."""
        return [] if self._host_copies is None else self._host_copies.take_done()

    def wait_for_copies(self) -> bool:
        """Wait until `take_copied` has something to return. Returns False if no copy is in progress. Raises what a copy
        raised."""
        return self._host_copies is not None and self._host_copies.wait()

    def on_copied(self, wake: Callable[[], object]) -> None:
        """Let `wake` be called, on any thread, when `take_copied` has something to return."""
        if self._host_copies is not None:
            self._host_copies.on_done = wake

    def max_adapter_bytes(self, name: str, rank: int) -> int:
        """See `Adapters.max_bytes`."""
        return self._adapters.max_bytes(name, rank)

    @torch.inference_mode()
    def read_adapter(self, module: LoRAModule) -> ReadAdapter:
        """Read weights for `put_adapter`: see `Adapters.read`. May run on any thread."""
        return self._adapters.read(module)

    @torch.inference_mode()
    def put_adapter(self, number: int, adapter: ReadAdapter) -> None:
        """Install an adapter. Call it between two steps; a step in flight must not use adapter `number`."""
        self._adapters.put(number, adapter)

    @torch.inference_mode()
    def remove_adapter(self, number: int) -> None:
        """Remove an adapter. Call it when `put_adapter` may be called."""
        self._adapters.remove(number)

    @property
    def _adapters(self) -> Adapters:
        adapters = self._worker.runner.adapters
        if adapters is None:
            raise ValueError("max_loras is 0: the engine has no room for further adapters")
        return adapters

    def close(self) -> None:
        """End the copying thread. No launch may follow. Needed if the engine ends before its process."""
        if self._host_copies is not None:
            self._host_copies.close()

    def _make_host_copies(self, config: EngineConfig) -> HostCopies | None:
        """Allocate the host's blocks. Returns None if offloading is off. Raises `ValueError` if `kv_offloading_size` is
        too small for one block, or larger than the memory."""
        num_blocks = num_host_blocks(config, self._worker.kv_shape)
        if not num_blocks:
            return None
        if config.device.device != "cpu":
            report(f"pinning {config.cache.kv_offloading_bytes / GIB:g} GiB of host memory")
        copies = self._host_copies_of(num_blocks)
        # An engine may be dropped without `close`, and the thread references the pool.
        weakref.finalize(self, copies.leave).atexit = False
        return copies

    def _host_copies_of(self, num_blocks: int) -> HostCopies:
        return HostCopies(self.kv_pool, num_blocks)
