"""Engines on a pretended GPU (`tests/pretend_gpu`), with plain torch: the host's part of serving with a GPU.

Steps are scheduled ahead, arrays go through pinned memory, tokens are sampled on the device. The answers must be those
of an engine on the CPU, and the host must never wait between two launches. For the Triton kernels see
test_pretended_gpu_kernels.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepseek_cases import GREEDY, V3
from handover import alone, bytes_of, handed_over
from lora_folders import CONFIG as LORA_CONFIG
from lora_folders import write_adapter
from many_endings import CONFIG, Answers, answers_alone, answers_of, prompt_of
from pretend_gpu import PretendGpu, pretend_gpu
from pretend_gpu.engines import make_engine
from quantized_on_gpu import check_checkpoint
from transformers_cases import GEMMA2, QWEN3_5

from engine.llm_engine import LLMEngine
from engine.running.pool_size import longest_step, measured_steps
from engine.running.worker import _saying_what_cannot_be_recorded, _saying_what_does_not_fit, _saying_what_is_too_large
from engine.scheduling import snapshots

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NUMBERS = range(5)
TOTAL_BYTES = 64 << 20
UTILIZATION = 0.5


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    with pretend_gpu(total_bytes=TOTAL_BYTES) as pretended:
        yield pretended


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of an engine on the CPU, to each request alone."""
    return answers_alone(make_engine(tmp_path_factory.mktemp("model"), CONFIG, device="cpu"), NUMBERS)


def test_the_answers_of_a_cpu(gpu: PretendGpu, tmp_path: Path, expected: Answers) -> None:
    engine = make_engine(tmp_path, CONFIG, prefill_chunk_tokens=8)
    assert engine.config.scheduler.async_scheduling
    assert answers_of(engine, NUMBERS) == expected


@pytest.mark.slow
def test_the_answers_of_a_cpu_when_memory_is_short(gpu: PretendGpu, tmp_path: Path) -> None:
    numbers = range(12)
    expected = answers_alone(make_engine(tmp_path, CONFIG, device="cpu"), numbers)
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=24, max_model_len=64, enable_prefix_caching=False)
    assert answers_of(engine, numbers) == expected
    assert engine.stats.num_preemptions > 0


def test_the_pool_is_what_the_largest_step_leaves(gpu: PretendGpu, tmp_path: Path, expected: Answers) -> None:
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=0, gpu_memory_utilization=UTILIZATION, max_num_seqs=16)
    assert answers_of(engine, NUMBERS) == expected
    _, steps = measured_steps(engine.config)
    torch.cuda.reset_peak_memory_stats()
    for step in steps:
        engine.executor.launch(step).wait()
    assert 0.98 * UTILIZATION * TOTAL_BYTES < torch.cuda.max_memory_allocated() <= UTILIZATION * TOTAL_BYTES


def guessing_with(folder: Path, config: dict[str, Any]) -> str:
    """The setting for a draft model with this configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return json.dumps({"model": str(folder), "num_speculative_tokens": 3})


@pytest.mark.slow
def test_a_draft_model_changes_no_answer(gpu: PretendGpu, tmp_path: Path, expected: Answers) -> None:
    guessing = guessing_with(tmp_path / "draft", CONFIG)
    engine = make_engine(tmp_path, CONFIG, speculative_config=guessing, prefill_chunk_tokens=8)
    assert answers_of(engine, NUMBERS) == expected
    assert engine.stats.num_accepted_tokens > 10


@pytest.mark.slow
def test_the_pool_leaves_room_for_the_draft_models(gpu: PretendGpu, tmp_path: Path, expected: Answers) -> None:
    """It has as many blocks; each takes memory in both pools."""
    guessing = guessing_with(tmp_path / "draft", CONFIG | {"num_hidden_layers": 5, "vocab_size": 70})
    sizes = {"num_kv_blocks": 0, "gpu_memory_utilization": UTILIZATION, "max_num_seqs": 16}
    engine = make_engine(tmp_path, CONFIG, speculative_config=guessing, **sizes)
    draft_model = engine.executor._worker.drafter
    assert draft_model is not None
    assert draft_model._runner is not None
    assert draft_model._runner._kv_pool.shape[1] == engine.executor.kv_shape.num_blocks
    assert answers_of(engine, NUMBERS) == expected
    torch.cuda.reset_peak_memory_stats()
    for config, runner in ((engine.config, engine.executor._worker.runner), (draft_model._config, draft_model._runner)):
        for step in measured_steps(config)[1]:
            runner.launch(step, runner.prepare(step)).wait()
    # The steps were measured beside a small pool for the draft model.
    assert 0.95 * UTILIZATION * TOTAL_BYTES < torch.cuda.max_memory_allocated() <= UTILIZATION * TOTAL_BYTES


@pytest.mark.slow
def test_an_eagle_head_beside_the_model(gpu: PretendGpu, tmp_path: Path, expected: Answers) -> None:
    """The pool has one more layer, and what the head needs in a step is measured."""
    head = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40}
    head |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(head))
    guessing = json.dumps({"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3})
    sizes = {"num_kv_blocks": 0, "gpu_memory_utilization": UTILIZATION, "max_num_seqs": 16, "prefill_chunk_tokens": 8}
    engine = make_engine(tmp_path, CONFIG, speculative_config=guessing, **sizes)
    assert engine.executor.kv_shape.num_layers == CONFIG["num_hidden_layers"] + 1
    assert answers_of(engine, NUMBERS) == expected
    assert engine.stats.num_drafts > 10
    torch.cuda.reset_peak_memory_stats()
    runner = engine.executor._worker.runner
    for step in measured_steps(engine.config)[1]:
        runner.launch(step, runner.prepare(step)).wait()
    assert 0.95 * UTILIZATION * TOTAL_BYTES < torch.cuda.max_memory_allocated() <= UTILIZATION * TOTAL_BYTES


def test_a_long_context_is_in_the_measurement(gpu: PretendGpu, tmp_path: Path) -> None:
    """Plain torch gathers the context's KV, which takes more memory than anything else in a step of few tokens."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 8192, "num_kv_blocks": 0}
    config = CONFIG | {"max_position_embeddings": 8192}
    engine = make_engine(tmp_path, config, gpu_memory_utilization=UTILIZATION, **settings)
    torch.cuda.reset_peak_memory_stats()
    engine.executor.launch(longest_step(engine.config)).wait()
    assert torch.cuda.max_memory_allocated() <= UTILIZATION * TOTAL_BYTES


@pytest.mark.slow
def test_no_scores_of_a_chunk_are_kept(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Answers
) -> None:
    """On a GPU torch would keep all scores if heads that share keys came with a mask, or in float32."""
    attend, with_mask = torch.nn.functional.scaled_dot_product_attention, []

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **settings: Any) -> torch.Tensor:
        assert q.shape[1] == k.shape[1]
        assert not settings.get("enable_gqa")
        with_mask.append(settings["attn_mask"] is not None and q.shape[2] > 2)
        return attend(q, k, v, **settings)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    assert answers_of(make_engine(tmp_path, CONFIG, prefill_chunk_tokens=8), NUMBERS) == expected
    assert set(with_mask) == {True, False}


def test_pinned_memory_of_weights_is_given_back(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch, which caches pinned memory, has a function for that."""
    given_back: list[int] = []
    monkeypatch.setattr(
        torch._C, "_host_emptyCache", lambda: given_back.append(torch.cuda.memory_allocated()), raising=False
    )
    make_engine(tmp_path, CONFIG)
    [with_weights] = given_back
    assert with_weights > 0


def test_a_kernel_that_cannot_be_loaded_for_want_of_memory_is_said_to_be(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr("engine.running.worker.warm_up", fail)
    with pytest.raises(ValueError, match=r"the GPU has not enough memory: lower .*Triton Error"):
        make_engine(tmp_path, CONFIG)


def test_want_of_memory_is_no_fault_of_recording() -> None:
    """Also when transformers' code is recorded, where other errors are reported as faults of recording."""
    device, model = SimpleNamespace(uses_graphs=True), SimpleNamespace(model_impl="transformers")
    config: Any = SimpleNamespace(device=device, model=model)
    with (
        pytest.raises(ValueError, match="not enough memory"),
        _saying_what_is_too_large("cuda"),
        _saying_what_cannot_be_recorded(config),
    ):
        raise RuntimeError("CUDA error: out of memory")


def test_kernels_that_ask_for_more_than_a_gpu_has_are_said_to() -> None:
    """test_pretended_gpu_kernels.py tests what Triton raises for such kernels."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed")
    config: Any = SimpleNamespace(device=SimpleNamespace(uses_triton=True))
    for error, why in (
        (errors.OutOfResources(106_496, 101_376, "shared memory"), "shared memory, Required: 106496"),
        (errors.PTXASError("`ptxas` failed\nlog"), r"PTXAS error: `ptxas` failed\)$"),
    ):
        expected = pytest.raises(ValueError, match=f"do not fit this GPU: give attention_backend torch .*{why}")
        with expected, _saying_what_does_not_fit(config):
            raise error


def test_another_error_of_the_driver_stays_what_it_is(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr("engine.running.worker.warm_up", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        make_engine(tmp_path, CONFIG)


def test_too_large_a_pool_is_said_to_be(gpu: PretendGpu, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the GPU has not enough memory: lower kv_cache_gib, .*Tried to allocate"):
        make_engine(tmp_path, CONFIG, num_kv_blocks=TOTAL_BYTES // 1024 - 10)


def test_too_large_a_model_is_said_to_be(tmp_path: Path) -> None:
    with pretend_gpu(total_bytes=50_000), pytest.raises(ValueError, match=r"not enough memory: .*a smaller model"):
        make_engine(tmp_path, CONFIG, num_kv_blocks=4, max_model_len=8)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        pytest.param(CONFIG, {}, id="llama"),
        pytest.param(CONFIG, {"kv_cache_dtype": "fp8", "quantization": "int8"}, id="8 bits", marks=pytest.mark.slow),
        pytest.param(V3, {}, id="deepseek", marks=pytest.mark.slow),
        pytest.param(GEMMA2, {}, id="by transformers' code", marks=pytest.mark.slow),  # blocks as llama's
        pytest.param(QWEN3_5, {"max_num_batched_tokens": 64}, id="states", marks=pytest.mark.slow),
    ],
)
def test_one_prefills_and_another_decodes(
    gpu: PretendGpu, tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Blocks go from one device's memory through the host's pinned memory into another's."""
    one, prefill, decode = (make_engine(tmp_path, config, **settings) for _ in range(3))
    prompt = prompt_of(16)
    tokens = handed_over(prefill, decode, prompt, GREEDY)
    assert bytes_of(prefill).memory == "VRAM"
    assert (
        tokens
        == alone(one, prompt, GREEDY)
        == alone(make_engine(tmp_path, config, device="cpu", **settings), prompt, GREEDY)
    )
    for engine in (one, prefill, decode):
        assert engine.audit()[1] == []


@pytest.mark.slow
def test_prompts_go_on_from_snapshots_a_step_ahead(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after the one that saves a state is launched before the state is known to be saved."""
    monkeypatch.setattr(snapshots, "MIN_TOKENS", 8)
    monkeypatch.setattr(snapshots, "WORTH", 1000)
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    engine = make_engine(tmp_path, QWEN3_5, **settings)
    assert engine.config.scheduler.async_scheduling
    plain = make_engine(tmp_path, QWEN3_5, device="cpu", enable_prefix_caching=False, **settings)
    prompts = [[*([3 + i % 50 for i in range(length)]), 20 + length] for length in (40, 60, 50, 70, 20, 60)]

    def answers(engine: LLMEngine) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
            for output in engine.step() + engine.step():
                told.setdefault(output.request_id, []).extend(output.token_ids)
        while engine.has_unfinished_requests():
            for output in engine.step():
                told.setdefault(output.request_id, []).extend(output.token_ids)
        return told

    expected = answers(plain)
    assert answers(engine) == expected
    assert answers(engine) == expected
    assert engine.stats.num_prefix_hits_tokens > sum(map(len, prompts))
    assert engine.audit()[1] == []


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("float channel", marks=pytest.mark.slow),
        pytest.param("int channel", marks=pytest.mark.slow),
        pytest.param("fp8 blocks, powers of two", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_in_8_bits_stays_as_it_is(gpu: PretendGpu, tmp_path: Path, form: str) -> None:
    """It is kept as stored if plain torch has a product for its form on a GPU, otherwise widened."""
    check_checkpoint(tmp_path, form, is_kept=form == "float channel")


@pytest.mark.slow
def test_adapters(gpu: PretendGpu, tmp_path: Path) -> None:
    """Adapters' rows go to the device without a wait, and the memory that adapters need is measured."""
    write_adapter(tmp_path / "a", seed=1)
    write_adapter(tmp_path / "b", rank=40, seed=2)
    settings = {"lora_modules": f"a={tmp_path / 'a'},b={tmp_path / 'b'}", "max_num_seqs": 16}
    config = LORA_CONFIG | {"eos_token_id": 1}

    def answers(engine: LLMEngine) -> dict[str, list[int]]:
        for number in range(9):
            prompt = [5 + (7 * number + 3 * i) % 300 for i in range(3 + 5 * number)]
            engine.add_request(str(number), prompt, GREEDY, lora_name=("", "a", "b")[number % 3])
        told: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                told.setdefault(output.request_id, []).extend(output.token_ids)
        return told

    engine = make_engine(tmp_path, config, num_kv_blocks=0, gpu_memory_utilization=UTILIZATION, **settings)
    assert engine.config.scheduler.async_scheduling
    assert answers(engine) == answers(make_engine(tmp_path, config, device="cpu", **settings))
    _, steps = measured_steps(engine.config)
    torch.cuda.reset_peak_memory_stats()
    for step in steps:
        engine.executor.launch(step).wait()
    assert 0.98 * UTILIZATION * TOTAL_BYTES < torch.cuda.max_memory_allocated() <= UTILIZATION * TOTAL_BYTES
    assert all(item.seq.lora_id == 2 for step in steps for item in step.scheduled)
