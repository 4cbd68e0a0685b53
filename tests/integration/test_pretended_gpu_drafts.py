"""Guesses on a pretended GPU with the Triton kernels, interpreted: they are rows of recorded steps, and a draft model
has recordings of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_cases import GREEDY
from eagle_cases import write_ring, write_ring_head
from grammar_cases import params_of, write_model
from handover import alone
from pretend_gpu import PretendGpu, pretend_gpu
from pretend_gpu.engines import GUESSING, IN_TURN, REPEATING, SMALL, make_engine
from pretend_gpu.triton import triton_interprets
from quantized_on_gpu import EXPERTS, WIDE
from transformers_cases import GEMMA2
from triton_device import DEVICE

from engine.models.eagle_config import LAYER_IDS
from engine.models.eagle_head import EagleHead
from engine.running.decode_graphs import DecodeGraphs
from engine.running.model_runner import ModelRunner
from engine.sampling.sampled_tokens import SampledTokens
from engine.scheduling.sequence import SchedulerOutput
from engine.scheduling.speculation import DraftHistory
from engine.step_input import StepInput

pytestmark = [pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU"), pytest.mark.slow]


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu(total_bytes=8 << 30, has_triton=True) as pretended, triton_interprets(pretended):
        yield pretended


@pytest.fixture
def nums_replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of rows of each replay."""
    nums = list[int]()
    run = DecodeGraphs.run
    monkeypatch.setattr(
        DecodeGraphs, "run", lambda self, step, batch: nums.append(len(step.token_ids)) or run(self, step, batch)
    )
    return nums


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Collects what is launched, replayed or not."""
    collected = list[SchedulerOutput]()
    launch = ModelRunner.launch

    def collecting(self: ModelRunner, output: SchedulerOutput, step: StepInput) -> SampledTokens:
        collected.append(output)
        return launch(self, output, step)

    monkeypatch.setattr(ModelRunner, "launch", collecting)
    return collected


@pytest.mark.parametrize(
    ("config", "settings", "other"),
    [
        (WIDE, {}, {"attention_backend": "torch"}),
        (WIDE, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, IN_TURN),
        (EXPERTS, {"dtype": "bfloat16"}, IN_TURN),
        (GEMMA2, {}, {"attention_backend": "torch"}),
    ],
    ids=["float32", "fp8", "deepseek", "gemma2"],
)
def test_drafts_in_recorded_steps(
    gpu: PretendGpu,
    nums_replayed: list[int],
    tmp_path: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    other: dict[str, Any],
) -> None:
    """Every step after the prompt is a replay, with a row for each draft: more rows than there may be sequences."""
    settings = SMALL | {"max_num_seqs": 1} | settings
    drafting = make_engine(tmp_path, config, **settings | GUESSING)
    assert drafting.config.device.uses_graphs
    nums_replayed.clear()
    prompt = [7, 9, 11] * 4
    answer = alone(drafting, prompt, REPEATING)
    stats = drafting.stats
    assert stats.num_accepted_tokens
    assert max(nums_replayed) == 5
    assert len(nums_replayed) == REPEATING.max_tokens - 1 - stats.num_accepted_tokens
    assert sum(nums_replayed) == len(nums_replayed) + stats.num_draft_tokens
    assert answer == alone(make_engine(tmp_path, config, **settings | other), prompt, REPEATING)


def test_the_rounds_of_a_draft_model_are_replays(
    gpu: PretendGpu, nums_replayed: list[int], launches: list[SchedulerOutput], tmp_path: Path
) -> None:
    """Whether it reads one token or two: only where it catches up, as with a prompt, is anything launched by itself."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(WIDE))
    guessing = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    drafting = make_engine(tmp_path, WIDE, speculative_config=guessing, **SMALL | {"max_num_seqs": 4})
    launches.clear()
    nums_replayed.clear()
    prompt, params = [7, 9, 11] * 4, replace(GREEDY, max_tokens=14, repetition_penalty=1.2)
    answer = alone(drafting, prompt, params)
    assert len(nums_replayed) == len(launches) - 2, "the prompt, and the prompt in the draft model"
    assert drafting.stats.num_accepted_tokens == drafting.stats.num_draft_tokens > 6
    assert answer == alone(make_engine(tmp_path, WIDE, **SMALL | {"attention_backend": "torch"}), prompt, params)


@pytest.mark.parametrize("number", [1, 3])
def test_a_draft_model_keeps_to_a_grammar(gpu: PretendGpu, tmp_path: Path, number: int) -> None:
    """The same answer as without guesses. It is right each time, so that after each step it lacks two tokens."""
    config = json.loads((write_model(tmp_path) / "config.json").read_text())
    guessing = json.dumps({"model": str(write_model(tmp_path / "draft")), "num_speculative_tokens": 3})
    settings = SMALL | {"max_num_seqs": 4}
    drafting = make_engine(tmp_path, config, speculative_config=guessing, **settings)
    assert drafting.config.device.uses_graphs
    prompt, params = [5, 6, 7], replace(params_of(number), max_tokens=24)
    answer = alone(drafting, prompt, params)
    assert drafting.stats.num_accepted_tokens
    assert answer == alone(make_engine(tmp_path, config, **settings | {"attention_backend": "torch"}), prompt, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rounds_of_an_eagle_head_are_replays(
    gpu: PretendGpu, nums_replayed: list[int], launches: list[SchedulerOutput], tmp_path: Path, dtype: str
) -> None:
    """And so are the steps whose hidden states it reads: only the prompt is launched kernel by kernel."""
    ring, head = write_ring(tmp_path / "ring"), write_ring_head(tmp_path / "head")
    guessing = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    config = json.loads((ring / "config.json").read_text())
    settings = SMALL | {"load_format": "auto", "dtype": dtype, "max_num_seqs": 4, "block_size": 16}
    drafting = make_engine(ring, config, speculative_config=guessing, **settings)
    assert drafting.config.device.uses_graphs
    launches.clear()
    nums_replayed.clear()
    assert alone(drafting, [3, 4, 5], replace(GREEDY, max_tokens=14)) == list(range(6, 20))
    assert len(nums_replayed) == len(launches) - 1
    assert drafting.stats.num_accepted_tokens == drafting.stats.num_draft_tokens > 6


def test_the_rounds_of_the_models_own_head_are_replays(
    gpu: PretendGpu,
    nums_replayed: list[int],
    launches: list[SchedulerOutput],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer with experts over latents."""
    monkeypatch.setattr(DraftHistory, "num_wanted", lambda self, length: 3)
    config = EXPERTS | {"num_nextn_predict_layers": 1}
    guessing = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    settings = SMALL | {"dtype": "bfloat16", "max_num_seqs": 1}
    drafting = make_engine(tmp_path, config, speculative_config=guessing, **settings)
    assert drafting.config.device.uses_graphs
    launches.clear()
    nums_replayed.clear()
    prompt, params = [7, 9, 11] * 4, replace(GREEDY, max_tokens=8)
    answer = alone(drafting, prompt, params)
    assert drafting.stats.num_draft_tokens >= 12
    assert len(nums_replayed) == len(launches) - 1
    assert answer == alone(make_engine(tmp_path, config, **settings | IN_TURN), prompt, params)


def test_an_eagle_head_over_transformers_code(
    gpu: PretendGpu, nums_replayed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads between layers is in the recordings."""
    (tmp_path / "head").mkdir()
    layer = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    head = {name: value for name, value in GEMMA2.items() if name != "sliding_window"} | layer
    (tmp_path / "head" / "config.json").write_text(json.dumps(head | {LAYER_IDS: [0, 2, 3]}))
    guessing = json.dumps({"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3})
    monkeypatch.setattr(DraftHistory, "num_wanted", lambda self, length: 3)
    features = list[torch.Tensor]()
    fused = EagleHead.fused
    monkeypatch.setattr(
        EagleHead, "fused", lambda self, features_TF: features.append(features_TF.clone()) or fused(self, features_TF)
    )
    prompt, params = [7, 9, 11] * 4, replace(GREEDY, max_tokens=6)
    answers, noted = list[list[int]](), list[torch.Tensor]()
    for settings in ({}, {"attention_backend": "torch", "enforce_eager": True}):
        engine = make_engine(tmp_path, GEMMA2, speculative_config=guessing, **SMALL | {"max_num_seqs": 1} | settings)
        nums_replayed.clear()
        features.clear()
        answers.append(alone(engine, prompt, params))
        noted.append(torch.cat([each[:1] for each in features]))
        assert engine.stats.num_draft_tokens >= 9
        stats = engine.stats
        assert len(nums_replayed) == (0 if settings else stats.num_draft_tokens + stats.num_steps - 1)
    assert answers[0] == answers[1]
    torch.testing.assert_close(noted[0], noted[1], atol=1e-3, rtol=1e-3)


def test_drafts_with_long_contexts_stay_with_their_sequence(
    gpu: PretendGpu, nums_replayed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention would read each context once for every draft."""
    monkeypatch.setattr("engine.running.model_runner.MAX_TOKENS_READ_AGAIN", 30)
    settings = SMALL | {"max_num_seqs": 1}
    drafting = make_engine(tmp_path, WIDE, **settings | GUESSING)
    nums_replayed.clear()
    prompt = [7, 9, 11] * 4
    answer = alone(drafting, prompt, REPEATING)
    assert drafting.stats.num_accepted_tokens > 0
    assert sum(nums_replayed) < len(nums_replayed) + drafting.stats.num_draft_tokens
    assert answer == alone(make_engine(tmp_path, WIDE, **settings | {"attention_backend": "torch"}), prompt, REPEATING)
