"""When rank 0 reports a layer, every rank has written its part of the layer: only then may it be sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from many_endings import CONFIG

from engine.attention import create_attention_backend
from engine.engine_args import EngineArgs
from engine.kv_cache import allocate_kv_pool
from engine.kv_shape import kv_cache_shape
from engine.model_loader import create_engine_config, load_model
from engine.running.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from engine.step_input import StepInput
from engine.tensor_parallel import group as group_module
from engine.tensor_parallel.group import RankGroup

PATIENCE_S = 5.0
NUM_LAYERS = 3


class Story:
    """What happened on both ranks, in order. A rank can wait for an event of the other."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def until(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, PATIENCE_S), self.events


@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
def test_no_layer_is_told_of_before_all_ranks_have_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_impl: str
) -> None:
    """Rank 1 is as late as possible: it writes a layer only when rank 0 can do nothing more but wait for it."""
    monkeypatch.setattr(group_module, "PATIENCE", timedelta(seconds=PATIENCE_S))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": NUM_LAYERS, "model_type": "llama"}))
    config = create_engine_config(
        EngineArgs(
            model=str(tmp_path), load_format="dummy", dtype="float32", device="cpu", attention_backend="torch",
            num_kv_blocks=64, block_size=4, tensor_parallel_size=2, model_impl=model_impl,
        )
    )  # fmt: skip
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=False))
    story = Story()

    def compute(rank: int) -> torch.Tensor:
        group = RankGroup(rank, 2, "cpu", tmp_path / "meeting")
        backend: Any = create_attention_backend(config)
        projected = backend.project
        num_written = 0

        def exchanging(exchange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def exchanged(*args: Any) -> torch.Tensor:
                story.add(f"rank {rank} begins an exchange behind layer {num_written - 1}")
                return exchange(*args)

            return exchanged

        def project(*args: Any) -> torch.Tensor:
            nonlocal num_written
            if rank == 1:
                story.until(f"rank 0 begins an exchange behind layer {num_written}")
            q: torch.Tensor = projected(*args)
            story.add(f"rank {rank} has written layer {num_written}")
            num_written += 1
            return q

        group.sum, group.gather_outputs = exchanging(group.sum), exchanging(group.gather_outputs)  # type: ignore[method-assign]
        backend.project = project
        with torch.inference_mode():
            model = load_model(config, backend, group)
        shape = kv_cache_shape(config.model, num_blocks=8, block_size=4, kv_dtype=config.cache.kv_dtype)
        pool = allocate_kv_pool(shape, "cpu")
        runner = ModelRunner(config, model, backend, pool, None, group)
        seq = Sequence(1, "r", list(range(5, 12)), 7, SamplingParams(), block_table=[2, 5])
        step = StepInput.of(SchedulerOutput([ScheduledSequence(seq, 7)], []), 4, {})
        runner.compute(step, (lambda layer: story.add(f"told of layer {layer}")) if rank == 0 else None)
        return pool

    with ThreadPoolExecutor(2) as threads:
        for pool in threads.map(compute, range(2)):
            assert all(pool[layer, block].any() for layer in range(NUM_LAYERS) for block in (2, 5))
    for layer in range(NUM_LAYERS):
        told = story.events.index(f"told of layer {layer}")
        for rank in range(2):
            assert story.events.index(f"rank {rank} has written layer {layer}") < told, story.events
