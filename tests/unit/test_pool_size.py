"""How large a KV pool a GPU gets: the arithmetic, and the step that is measured, which can run on any device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepseek_cases import config_of
from pretend_gpu import pretend_gpu

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.kv_shape import KVCacheShape, kv_cache_shape
from engine.model_loader import create_engine_config
from engine.running import worker
from engine.running.executor import Executor
from engine.running.pool_size import (
    largest_step,
    longest_step,
    measure_num_blocks,
    measured_steps,
    num_blocks_left,
    spans_step,
    unfolding_step,
)
from engine.scheduling.sequence import SchedulerOutput

GIB = 1 << 30
DEVICE = {
    "total_bytes": 80 * GIB, "peak_bytes": 20 * GIB, "free_bytes": 59 * GIB, "utilization": 0.9,
    "block_bytes": 2 << 20, "num_needed": 100,
}  # fmt: skip


def test_the_pool_gets_its_share_less_weights_and_a_step() -> None:
    assert num_blocks_left(**DEVICE) == 52 * 512


def test_what_others_have_taken_is_not_given_away() -> None:
    assert num_blocks_left(**{**DEVICE, "free_bytes": 11 * GIB + 5}) == 10 * 512  # memory of others has grown, or ours
    small = {"total_bytes": 10 * GIB, "peak_bytes": GIB, "free_bytes": 4 * GIB}
    assert num_blocks_left(**{**DEVICE, **small}) == int(3.8 * 512)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"utilization": 0.25},
            r"0.25 leaves room for 0 KV blocks, .* has 80.0 GiB, 59.0 of them free; weights and a step take 20.0\)$",
        ),
        ({"utilization": 0.1}, "leaves room for 0 KV blocks"),
        ({"num_needed": 60_000}, "room for 26624 KV blocks, but a request of max_model_len tokens needs 60000"),
    ],
)
def test_too_little_is_said_in_numbers(change: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        num_blocks_left(**{**DEVICE, **change})  # type: ignore[arg-type]


def test_one_request_of_full_length_is_enough() -> None:
    assert num_blocks_left(**{**DEVICE, "num_needed": 52 * 512}) == 52 * 512


def small_config(folder: Path, **settings: Any) -> EngineConfig:
    """Of a model of at most 64 tokens, with blocks of 4."""
    model = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))
    sizes = {"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 51}
    return create_engine_config(EngineArgs(model=str(folder), load_format="dummy", device="cpu", **sizes | settings))


def test_the_largest_step_is_one_that_the_engine_can_compute(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    num_blocks, step = largest_step(config)
    assert num_blocks == 5 * 3
    assert [item.num_new_tokens for item in step.scheduled] == [10] * 5
    params = [item.seq.sampling_params for item in step.scheduled]
    asks_for_all = [p.top_k and p.top_p < 1 and p.min_p and p.has_penalties for p in params]
    assert all(asks_for_all), "a sampler may need more memory"
    executor = Executor(replace(config, cache=replace(config.cache, num_blocks=num_blocks)))
    assert all(len(token_ids) == 1 for token_ids in executor.launch(step).wait())


def test_the_longest_step_begins_behind_a_token(tmp_path: Path) -> None:
    config = small_config(tmp_path, max_num_batched_tokens=100, prefill_chunk_tokens=100)
    [item] = longest_step(config).scheduled
    assert (item.first, item.num_new_tokens) == (1, 63)


@pytest.mark.parametrize(("max_loras", "number"), [(0, 0), (2, 1)])
def test_adapters_that_may_come_are_in_the_largest_step(max_loras: int, number: int, tmp_path: Path) -> None:
    _, step = largest_step(small_config(tmp_path, max_loras=max_loras))
    assert {item.seq.lora_id for item in step.scheduled} == {number}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a pretended GPU")
def test_a_pool_leaves_room_for_weights_for_a_step_and_for_what_is_recorded(tmp_path: Path) -> None:
    """But not for what was freed before the measurement. A request also needs the blocks of its state."""
    mib, num_blocks = 1 << 20, list[int]()
    config = small_config(tmp_path)
    config = replace(config, cache=replace(config.cache, gpu_memory_utilization=1.0))
    shape = kv_cache_shape(config.model, num_blocks=0, block_size=4, kv_dtype=config.cache.kv_dtype)

    def run_steps(step_shape: KVCacheShape, steps: list[SchedulerOutput]) -> int:
        num_blocks.append(step_shape.num_blocks)
        torch.empty(step_shape.pool_bytes + 20 * mib, dtype=torch.uint8, device="cuda")
        return mib

    with pretend_gpu(total_bytes=64 * mib):
        weights = torch.empty(4 * mib, dtype=torch.uint8, device="cuda")
        torch.empty(50 * mib, dtype=torch.uint8, device="cuda")
        left = measure_num_blocks(config, shape, run_steps)
        assert num_blocks == [5 * 3]
        assert left == (64 * mib - 64 * mib // 50 - 25 * mib) // shape.all_layers_bytes
        with_state = replace(config.model, recurrent_bytes=3 * shape.all_layers_bytes + 1)
        crowded = replace(config.cache, gpu_memory_utilization=25.01 / 64)
        with pytest.raises(ValueError, match="a request of max_model_len tokens needs 20:"):
            measure_num_blocks(replace(config, model=with_state, cache=crowded), shape, run_steps)
        del weights


def test_ranks_have_pools_as_large_as_the_smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "measure_num_blocks", lambda config, shape, run_steps, bytes_beside: 100)
    config = small_config(tmp_path)
    config = replace(config, cache=replace(config.cache, num_blocks=0))
    others: Any = SimpleNamespace(smallest=lambda num_blocks: min(num_blocks, 70))
    never: Any = None
    assert [worker._shape_of_pool(config, never, None, group).num_blocks for group in (None, others)] == [100, 70]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # As many sequences as unfold their latents: with these sizes, that takes 21 new tokens each.
        ({"max_num_batched_tokens": 64}, [(21, 107)] * 3),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 2}, [(32, 96)] * 2),
        ({"max_num_batched_tokens": 500}, [(125, 3)] * 4),
        ({"max_num_batched_tokens": 64, "prefill_chunk_tokens": 20}, [(20, 108)] * 3),
    ],
)
def test_what_kernels_unfold_is_in_the_measurement(
    tmp_path: Path, settings: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    config = config_of(tmp_path, **{"max_num_seqs": 4} | settings)
    step = unfolding_step(config)
    assert step is not None
    assert [(item.num_new_tokens, item.seq.num_computed_tokens) for item in step.scheduled] == expected
    on_a_gpu = replace(config, device=replace(config.device, attention_backend="triton"))
    _, [unfolding, _] = measured_steps(on_a_gpu)
    assert len(unfolding.scheduled) == len(expected)
    invariant = replace(on_a_gpu, device=replace(on_a_gpu.device, batch_invariant=True))
    assert len(measured_steps(invariant)[1]) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_batched_tokens": 51}, [19, 16, 16]),
        ({"max_num_batched_tokens": 63, "max_num_seqs": 2}, [47, 16]),
        ({"max_num_batched_tokens": 200, "max_num_seqs": 3}, [64, 64, 64]),
        ({"max_num_batched_tokens": 200, "max_num_seqs": 3, "prefill_chunk_tokens": 40}, [40, 40, 40]),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 4, "prefill_chunk_tokens": 40}, [40, 28, 16, 16]),
        ({"max_num_batched_tokens": 15}, []),
        ({"max_num_batched_tokens": 200, "prefill_chunk_tokens": 15}, []),
    ],
)
def test_what_kernels_compute_in_spans_is_in_the_measurement(
    tmp_path: Path, settings: dict[str, int], expected: list[int]
) -> None:
    """The step with the most sequences may have too few tokens for each of them."""
    attends = small_config(tmp_path, **settings)
    assert spans_step(attends) is None
    config = replace(attends, model=replace(attends.model, recurrent_bytes=1))
    for backend in ("triton", "torch"):
        of_backend = replace(config, device=replace(config.device, attention_backend=backend))
        *_, spans, _ = (None, *measured_steps(of_backend)[1])
        if expected:
            assert spans is not None
            assert [(item.first, item.num_new_tokens) for item in spans.scheduled] == [(0, n) for n in expected]
        else:
            assert spans_step(of_backend) is None
