"""One device's share of an engine: threads, KV pool, model.

    made: threads set -> model loaded -> pool allocated      then `execute` per step; freed with the object

Owns the pool and the runner. Loading is reported on stderr, since a large model takes minutes.
"""

from __future__ import annotations

import gc
import sys
import time

import torch

from engine.attention import create_attention_backend
from engine.config import EngineConfig
from engine.kv_cache import KVCacheShape, allocate_kv_pool
from engine.model_loader import load_model
from engine.model_runner import ModelRunner
from engine.sequence import OnLayerWritten, SchedulerOutput

REPORT_AFTER_S = 5.0


class Worker:
    """Raises `ValueError` where weights do not fit the config, or the device is not there."""

    def __init__(self, config: EngineConfig, on_layer_written: OnLayerWritten | None) -> None:
        if config.device.num_threads > 0:
            torch.set_num_threads(config.device.num_threads)
        self.kv_shape = KVCacheShape(
            num_layers=config.model.num_layers,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            num_kv_heads=config.model.num_kv_heads,
            head_dim=config.model.head_dim,
            dtype=config.model.dtype,
        )
        start_s = time.monotonic()
        backend = create_attention_backend(config)
        with torch.inference_mode():
            model = load_model(config, backend)
        load_s = time.monotonic() - start_s
        if load_s > REPORT_AFTER_S:
            print(f"tandem: loaded {config.model.model} in {load_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
        self.kv_pool = allocate_kv_pool(self.kv_shape, config.device.device)
        self._runner = ModelRunner(config, model, backend, self.kv_pool, on_layer_written)
        # What is there now stays: the garbage collector need not look at it again and again, 1.5 % of a decode step.
        gc.collect()
        gc.freeze()

    def execute(self, output: SchedulerOutput) -> list[int | None]:
        return self._runner.execute(output)
