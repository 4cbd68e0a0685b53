"""What a device does before its first request: every kind of step once, without leaving anything behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.models.recurrent_shape import FEWEST_IN_SPANS
from engine.running.executor import Executor
from engine.running.warm_up import prompt_lengths, warm_up, warm_up_steps
from engine.scheduling.sequence import SchedulerOutput
from engine.step_input import StepInput

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

    def launch(output: SchedulerOutput, step: StepInput) -> Any:
        launched.append([(item.first, item.num_new_tokens) for item in output.scheduled])
        tokens = worker.runner.launch(output, step)
        nonzero.append(int(worker.kv_pool.count_nonzero()))
        return tokens

    runner: Any = SimpleNamespace(
        prepare=worker.runner.prepare, launch=launch, record_decode_steps=worker.runner.record_decode_steps
    )
    warm_up(config, runner, worker.kv_pool)
    *prompts, [decoding, prompt], shortest = launched
    longest, most = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    assert {first for step in prompts for first, _ in step} == {0}
    assert [sum(num_new for _, num_new in step) for step in prompts] == [
        min(num_tokens, longest * config.scheduler.max_num_seqs) for num_tokens in prompt_lengths(most)
    ]
    assert shortest == [(0, 1), prompt]
    assert decoding == (longest - 1, 1)
    assert prompt == (0, max(1, min(most - 1, longest, max(config.cache.block_size, FEWEST_IN_SPANS))))
    assert all(nonzero)
    assert worker.kv_pool.equal(torch.zeros_like(worker.kv_pool))


@pytest.mark.parametrize(("max_loras", "number"), [(0, 0), (2, 1)])
def test_steps_use_an_adapter_if_any_may_come(max_loras: int, number: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = EngineArgs(
        model=str(tmp_path), load_format="dummy", device="cpu", num_kv_blocks=20, block_size=4, max_loras=max_loras
    )
    steps = warm_up_steps(create_engine_config(args), 0, 1)
    assert {item.seq.lora_id for step in steps for item in step.scheduled} == {number}


def test_a_prompt_beside_a_decoding_sequence_is_computed_in_spans(tmp_path: Path) -> None:
    """However small blocks are: with an even number of sequences, the kernels' arguments have other alignments."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", num_kv_blocks=20, block_size=4)
    *_, beside, shortest = warm_up_steps(create_engine_config(args), 0, 1)
    for step in (beside, shortest):
        assert [item.num_new_tokens for item in step.scheduled] == [1, FEWEST_IN_SPANS]


def test_a_device_that_does_not_keep_batch_invariance_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = pytest.importorskip("engine.kernels.gpu.product")

    def disagree(device: str, dtype: torch.dtype) -> None:
        raise ValueError(f"rows of {dtype} on {device} disagree")

    monkeypatch.setattr(product, "check_rows_agree", disagree)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = create_engine_config(EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", num_kv_blocks=20))
    config = replace(config, device=replace(config.device, batch_invariant=True))
    never: Any = None
    with pytest.raises(ValueError, match=r"rows of torch\.float32 on cpu disagree"):
        warm_up(config, never, torch.zeros(1, 2))


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_with_a_step_ahead_two_are_under_way(tmp_path: Path, num_ahead: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = create_engine_config(EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", num_kv_blocks=20))
    kv_pool = Executor(config)._worker.kv_pool
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=num_ahead == 2))
    under_way: list[SchedulerOutput] = []
    most_under_way: list[int] = []

    def launch(output: SchedulerOutput, step: SchedulerOutput) -> Any:
        assert output is step
        assert all(other is step for other in under_way)
        under_way.append(step)
        most_under_way.append(len(under_way))
        return SimpleNamespace(wait=under_way.pop)

    runner: Any = SimpleNamespace(
        prepare=lambda output: output, launch=launch, record_decode_steps=lambda on_recorded: 0
    )
    warm_up(config, runner, kv_pool)
    assert most_under_way == list(range(1, num_ahead + 1)) * (len(most_under_way) // num_ahead)


def test_lengths_of_prompts() -> None:
    assert prompt_lengths(1) == [1]
    assert prompt_lengths(2) == [2, 1]
    assert prompt_lengths(16) == [16, 1]
    assert prompt_lengths(100) == [100, 64, 32, 16, 1]
    assert prompt_lengths(2048) == [2048, 1024, 512, 256, 128, 64, 32, 16, 1]
