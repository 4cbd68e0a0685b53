"""What a device does before its first request: every kind of step once, and nothing of it is left."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineArgs
from engine.executor import Executor
from engine.model_loader import create_engine_config
from engine.sequence import SchedulerOutput
from engine.warm_up import prompt_lengths, warm_up

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_kv_blocks": 1, "block_size": 64}, {"max_num_batched_tokens": 1, "max_num_seqs": 1},
     {"max_model_len": 2}],
    ids=["usual", "one-block", "one-token", "shortest-context"],
)  # fmt: skip
def test_prompts_and_decoding_steps_are_computed_and_the_pool_is_as_before(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sizes = {"num_kv_blocks": 20, "block_size": 4, **settings}
    config = create_engine_config(EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", **sizes))
    worker = Executor(config)._worker
    launched: list[list[tuple[int, int]]] = []
    nonzero: list[int] = []

    def launch(step: SchedulerOutput) -> Any:
        launched.append([(item.first, item.num_new_tokens) for item in step.scheduled])
        tokens = worker.launch(step)
        nonzero.append(int(worker.kv_pool.count_nonzero()))
        return tokens

    runner: Any = SimpleNamespace(launch=launch, record_decode_steps=worker._runner.record_decode_steps)
    warm_up(config, runner, worker.kv_pool)
    *prompts, shortest, [decoding, prompt] = launched
    longest, most = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    assert {first for step in prompts for first, _ in step} == {0}
    assert [sum(num_new for _, num_new in step) for step in prompts] == [
        min(num_tokens, longest * config.scheduler.max_num_seqs) for num_tokens in prompt_lengths(most)
    ]
    assert shortest == [(0, 1), prompt]
    assert decoding == (longest - 1, 1)
    assert prompt == (0, max(1, min(most - 1, longest, config.cache.block_size)))
    assert all(nonzero)
    assert worker.kv_pool.equal(torch.zeros_like(worker.kv_pool))


def test_lengths_of_prompts() -> None:
    assert prompt_lengths(1) == [1]
    assert prompt_lengths(2) == [1, 2]
    assert prompt_lengths(16) == [1, 16]
    assert prompt_lengths(100) == [1, 16, 32, 64, 100]
    assert prompt_lengths(2048) == [1, 16, 32, 64, 128, 256, 512, 1024, 2048]
