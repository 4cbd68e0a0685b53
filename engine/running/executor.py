"""Runs steps on the devices of one engine: one worker in this process, or more in others (engine/tensor_parallel).

Owns the worker. The engine decides, this does: `launch` returns when the step is in the device's queue (a CPU has done
it by then), and its tokens can be waited for.
"""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.kv_cache import KVCacheShape, KVMemory
from engine.running.worker import Worker
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import OnLayerWritten, SchedulerOutput


class RankLost(RuntimeError):  # noqa: N818 - named for what happened
    """A process that computes with this one has ended, and with it what this one can do."""


class Executor:
    """Used by the stepping thread alone, but for `rank_pids`. The constructor loads the model: seconds."""

    def __init__(
        self, config: EngineConfig, on_layer_written: OnLayerWritten | None = None, memory: KVMemory | None = None
    ) -> None:
        self._worker = Worker(config, on_layer_written, (memory or KVMemory()).allocate)

    @property
    def kv_pool(self) -> torch.Tensor:
        """[layer, block, part, kv_head, slot, head_dim], contiguous. Lives as long as this object, in one place."""
        return self._worker.kv_pool

    @property
    def kv_shape(self) -> KVCacheShape:
        return self._worker.kv_shape

    @property
    def rank_pids(self) -> list[int]:
        """Of other processes that compute with this one, and without which it cannot."""
        return []

    def launch(self, output: SchedulerOutput) -> SampledTokens:
        """Begin to compute one step, before `Scheduler.begin` counts it; after it at most one other is in flight."""
        runner = self._worker.runner
        return runner.launch(output, runner.prepare(output))

    def wait(self, tokens: SampledTokens) -> list[list[int]]:
        """For the tokens of a step that was launched: see `SampledTokens.wait`."""
        return tokens.wait()

    def close(self) -> None:
        """Nothing is launched any more. To be called by an engine that is to end before its process does."""
