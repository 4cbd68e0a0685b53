"""Runs steps on the devices of one engine: today one worker in this process.

Owns the worker. The engine decides, this does: `launch` returns when the step is in the device's queue (a CPU has done
it by then), and its tokens can be waited for.
"""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.kv_cache import AllocateKVPool, KVCacheShape, allocate_kv_pool
from engine.sampled_tokens import SampledTokens
from engine.sequence import OnLayerWritten, SchedulerOutput
from engine.worker import Worker


class Executor:
    """Used by the stepping thread alone. The constructor loads the model: seconds."""

    def __init__(
        self,
        config: EngineConfig,
        on_layer_written: OnLayerWritten | None = None,
        allocate_pool: AllocateKVPool = allocate_kv_pool,
    ) -> None:
        self._worker = Worker(config, on_layer_written, allocate_pool)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[layer, block, part, kv_head, slot, head_dim], contiguous. Lives as long as this object, in one place."""
        return self._worker.kv_pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return self._worker.kv_shape

    def launch(self, output: SchedulerOutput) -> SampledTokens:
        """Begin to compute one step, before `Scheduler.begin` counts it; after it at most one other is in flight."""
        return self._worker.launch(output, self._worker.prepare(output))
