"""Engines on a pretended GPU with the Triton kernels: interpreted, and compiled as their launches ask for.

Decode steps are recorded and replayed like CUDA graphs (`tests/pretend_gpu/streams.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flash_reference
import pytest
import torch
from deepseek_cases import GREEDY
from gpu_kinds import GPU_KINDS
from handover import alone, bytes_of, handed_over
from int4_checkpoints import WIDENED
from lora_folders import CONFIG as LORA_CONFIG
from lora_folders import write_adapter
from many_endings import CONFIG, answers_of, prompt_of
from pretend_gpu import PretendGpu, pretend_gpu
from pretend_gpu.engines import GUESSING, IN_TURN, REPEATING, SMALL, make_engine
from pretend_gpu.flash import launched
from pretend_gpu.triton import triton_interprets
from quantized_checkpoints import FORMS, deepseek_tensors, quantized, save_checkpoint
from quantized_on_gpu import EXPERTS, WIDE, check_checkpoint, check_experts, check_int4_checkpoint, check_int4_experts
from transformers_cases import FALCON_H1, GEMMA2, GEMMA4, GPT_OSS, GRANITE_H, LFM2, QWEN3_5, QWEN3_MOE
from triton_device import DEVICE

from engine import attention
from engine.attention import choice
from engine.attention.flash_calls import flash_attn_3_calls
from engine.llm_engine import LLMEngine
from engine.running.decode_graphs import RECORDING_BYTES, DecodeGraphs
from engine.running.pool_size import largest_step, measured_steps
from engine.step_input import StepInput

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = range(5)
BLOCKS = WIDE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 32]}}
IN_GROUPS = EXPERTS | {
    "hidden_size": 32, "v_head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32,
}  # fmt: skip
"""All inputs of products come in groups of 32."""
EXPERTS_IN_BLOCKS = EXPERTS | {"v_head_dim": 12, "quantization_config": BLOCKS["quantization_config"]}

pytestmark = [pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU"), pytest.mark.slow]


@pytest.fixture
def gpu() -> Iterator[PretendGpu]:
    # When transformers loads a model, it leaves more than a gigabyte free.
    with pretend_gpu(total_bytes=8 << 30, has_triton=True) as pretended, triton_interprets(pretended):
        yield pretended


@pytest.mark.parametrize(
    ("config", "settings", "other"),
    [
        (CONFIG, {}, {"attention_backend": "torch"}),
        (WIDE, {"dtype": "float16", "block_size": 16}, {"attention_backend": "torch"}),
        (WIDE, {"dtype": "bfloat16", "quantization": "int8"}, IN_TURN),
        (WIDE, {"dtype": "bfloat16", "quantization": "int4"}, IN_TURN),
        (WIDE, {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"}, IN_TURN),
        (BLOCKS, {"dtype": "bfloat16"}, IN_TURN),
        (EXPERTS, {"dtype": "bfloat16"}, IN_TURN),
        (EXPERTS_IN_BLOCKS, {"dtype": "bfloat16"}, IN_TURN),
        (GEMMA2, {}, {"attention_backend": "torch"}),
        (QWEN3_MOE, {"dtype": "bfloat16", "model_impl": "transformers"}, IN_TURN),
        (QWEN3_MOE, {"dtype": "bfloat16"}, IN_TURN),
        (GPT_OSS, {"dtype": "bfloat16"}, IN_TURN),
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, {"dtype": "bfloat16"}, IN_TURN),
        (QWEN3_5, {}, {"attention_backend": "torch"}),
        (QWEN3_5, {"dtype": "bfloat16"}, IN_TURN),
        (LFM2, {}, {"attention_backend": "torch"}),
        (GRANITE_H, {}, {"attention_backend": "torch"}),
        (FALCON_H1, {"dtype": "bfloat16"}, IN_TURN),
        (GEMMA4 | {"vocab_size": 60, "eos_token_id": 59}, {}, {"attention_backend": "torch"}),
        (GRANITE_H | {"shared_intermediate_size": 160}, {"quantization": "int4"}, {"attention_backend": "torch"}),
        (QWEN3_5 | {"intermediate_size": 160}, {"dtype": "bfloat16", "quantization": "fp8"}, IN_TURN),
        (QWEN3_5 | {"quantization_config": BLOCKS["quantization_config"]}, {"dtype": "bfloat16"}, IN_TURN),
        (
            QWEN3_MOE,
            {"dtype": "bfloat16", "model_impl": "transformers", "quantization": "int8"},
            IN_TURN,
        ),
        (QWEN3_MOE, {"dtype": "bfloat16", "quantization": "int8"}, IN_TURN),
        (IN_GROUPS, {"dtype": "bfloat16", "quantization": "int4"}, IN_TURN),
        (IN_GROUPS, {"dtype": "bfloat16", "quantization": "fp8"}, IN_TURN),
    ],
    ids=[
        "float32",
        "float16",
        "int8",
        "int4",
        "fp8",
        "blocks",
        "deepseek",
        "experts-in-blocks",
        "gemma2",
        "qwen3-moe by transformers",
        "qwen3-moe",
        "gpt-oss",
        "gpt-oss in 4 bits",
        "states",
        "states in bfloat16",
        "states of convolutions",
        "states of mamba-2",
        "states beside attention in bfloat16",
        "gemma4",
        "int4 by transformers",
        "fp8 by transformers",
        "blocks by transformers",
        "experts in int8 by transformers",
        "experts in int8 by name",
        "deepseek in int4 by name",
        "deepseek in fp8 by name",
    ],
)
def test_recorded_steps_a_step_ahead(
    gpu: PretendGpu, tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], other: dict[str, Any]
) -> None:
    """The answers equal those of plain torch; or, where rounding could decide near ties differently, those of the same
    kernels launched one by one, without async scheduling."""
    settings = SMALL | {"max_num_seqs": 4} | settings
    engine = make_engine(tmp_path, config, **settings)
    assert engine.config.device.uses_graphs
    plain = make_engine(tmp_path, config, **settings | other)
    assert not plain.config.device.uses_graphs
    assert answers_of(engine, NUMBERS) == answers_of(plain, NUMBERS)


FLASH: dict[str, Any] = {"attention_backend": "flash_attn", "dtype": "float16"}
WINDOW = WIDE | {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 1,
}  # fmt: skip


@pytest.fixture
def nums_queries(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let engines find FlashAttention. Collects the number of queries of each call."""
    call, nums = launched(gpu, flash_reference.flash_attn_3_with_kvcache), list[int]()

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nums.append(len(q))
        return call(q, *args, **kwargs)

    for module in (attention, choice):
        monkeypatch.setattr(module, "load_flash_calls", lambda **_: flash_attn_3_calls(counted))
    return nums


@pytest.mark.parametrize(
    ("config", "settings", "other"),
    [
        (WINDOW, {"max_num_batched_tokens": 8}, {"attention_backend": "torch"}),
        (QWEN3_MOE, {"dtype": "bfloat16", "model_impl": "transformers"}, IN_TURN),
    ],
    ids=["chunks, a window", "by transformers"],
)
def test_prompts_by_flash_attention(
    gpu: PretendGpu,
    nums_queries: list[int],
    tmp_path: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    other: dict[str, Any],
) -> None:
    """FlashAttention computes prompts only, without a wait for its calls, in an engine that records its decode
    steps."""
    asked, settings = settings, SMALL | FLASH | {"max_num_seqs": 4} | settings
    engine = make_engine(tmp_path, config, **settings)
    assert engine.config.device.uses_graphs
    nums_queries.clear()
    answers = answers_of(engine, NUMBERS)
    # A prompt of one token is computed as a decode, and so is a last chunk of one, which one prompt has.
    num_tokens = sum(len(prompt_of(number)) for number in NUMBERS if number) - ("max_num_batched_tokens" in asked)
    assert sum(nums_queries) == config["num_hidden_layers"] * num_tokens
    assert answers == answers_of(make_engine(tmp_path, config, **settings | other), NUMBERS)


def test_drafts_are_not_checked_by_flash_attention(gpu: PretendGpu, nums_queries: list[int], tmp_path: Path) -> None:
    """It computes prompts; drafts are rows that decode."""
    settings = SMALL | FLASH | {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    drafting = make_engine(tmp_path, WIDE, **settings | GUESSING)
    nums_queries.clear()
    prompt = [7, 9, 11] * 4
    answer = alone(drafting, prompt, REPEATING)
    assert drafting.stats.num_accepted_tokens
    assert sum(nums_queries) == WIDE["num_hidden_layers"] * len(prompt)
    assert answer == alone(make_engine(tmp_path, WIDE, **settings | {"attention_backend": "torch"}), prompt, REPEATING)


@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
def test_adapters_in_recorded_steps(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_impl: str
) -> None:
    """The answers equal those of plain torch, which launches steps one by one. Decode steps are replayed whichever
    adapters their rows use; steps without adapters launch no adapter kernels."""
    for seed, (name, rank) in enumerate({"a": 4, "b": 20}.items()):
        write_adapter(tmp_path / name, rank=rank, seed=seed)
    settings = SMALL | {
        "lora_modules": f"a={tmp_path / 'a'},b={tmp_path / 'b'}", "max_num_seqs": 2, "model_impl": model_impl,
    }  # fmt: skip
    config = LORA_CONFIG | {"eos_token_id": 1}
    replayed: list[bool] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(
        DecodeGraphs,
        "run",
        lambda self, step, batch: replayed.append(bool(len(step.adapter_ids))) or run(self, step, batch),
    )

    def answers(engine: LLMEngine) -> dict[str, list[int]]:
        for number, name in enumerate(("a", "b", "", "")):
            prompt = [5 + (7 * number + 3 * i) % 300 for i in range(3 + 3 * number)]
            engine.add_request(str(number), prompt, GREEDY, lora_name=name)
        told: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                told.setdefault(output.request_id, []).extend(output.token_ids)
        return told

    engine = make_engine(tmp_path, config, **settings)
    told = answers(engine)
    assert set(replayed) == {True, False}
    assert told == answers(make_engine(tmp_path, config, **settings | {"attention_backend": "torch"}))


@pytest.mark.parametrize("model_impl", ["tandem", "transformers"])
def test_adapters_that_come_and_go_beside_recorded_steps(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_impl: str
) -> None:
    """Steps recorded before an adapter was added compute with whichever adapter is in its place."""
    for seed, (name, rank) in enumerate({"a": 4, "b": 20, "c": 7}.items()):
        write_adapter(tmp_path / name, rank=rank, seed=seed)
    settings = SMALL | {"max_loras": 2, "max_lora_rank": 24, "max_num_seqs": 2, "model_impl": model_impl}
    config, prompt = LORA_CONFIG | {"eos_token_id": 1}, [5 + 3 * i for i in range(9)]
    num_replayed = 0
    run = DecodeGraphs.run

    def replay(self: DecodeGraphs, step: StepInput, batch: Any) -> Any:
        nonlocal num_replayed
        num_replayed += bool(len(step.adapter_ids))
        return run(self, step, batch)

    monkeypatch.setattr(DecodeGraphs, "run", replay)

    def answers(engine: LLMEngine) -> list[list[int]]:
        told = []
        for name, gone in (("a", ""), ("b", ""), ("c", "a"), ("a", "b")):
            if gone:
                engine.remove_lora(gone)
                assert engine.free_loras(engine.loras.leaving) == []
            module = engine.find_lora(name, tmp_path / name)
            engine.add_lora(module, engine.read_lora(module))
            told += [alone(engine, prompt, GREEDY, lora_name=each.name) for each in engine.loras.served]
        return [*told, alone(engine, prompt, GREEDY)]

    told = answers(make_engine(tmp_path, config, **settings))
    assert num_replayed > len(told)
    assert told == answers(make_engine(tmp_path, config, **settings | {"attention_backend": "torch"}))
    assert len({tuple(each) for each in told}) == 4


def test_steps_that_cannot_be_recorded_say_what_to_do(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' code cannot be recorded if it moves numbers between host and device in a step."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    forward = Gemma2DecoderLayer.forward

    def moving(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = forward(self, x, *args, **kwargs)
        return y + torch.zeros(1).to(x.device)

    monkeypatch.setattr(Gemma2DecoderLayer, "forward", moving)
    settings = SMALL | {"max_num_seqs": 2}
    with pytest.raises(ValueError, match="could not be recorded as a CUDA graph: give enforce_eager"):
        make_engine(tmp_path, GEMMA2, **settings)


@pytest.mark.parametrize("form", ["int channel", "fp8 blocks, powers of two", "fp8 blocks", "float block"])
def test_a_checkpoint_in_8_bits_stays_as_it_is(gpu: PretendGpu, tmp_path: Path, form: str) -> None:
    """Its weights are widened only if no kernel takes its groups."""
    settings = SMALL | {"max_num_seqs": 2, "max_model_len": 64}
    check_checkpoint(tmp_path, form, is_kept=form in ("int channel", "fp8 blocks, powers of two"), **settings)


def test_a_checkpoint_in_4_bits_stays_as_it_is(gpu: PretendGpu, tmp_path: Path) -> None:
    check_int4_checkpoint(tmp_path, **SMALL, max_num_seqs=2, max_model_len=64)


@pytest.mark.parametrize(
    ("form", "dtype", "error"),
    [
        ("fp8 blocks, powers of two", "bfloat16", 0.02),
        ("float channel", "bfloat16", 0.4),  # other products have 8-bit activations, so other experts are chosen
        ("int channel", "float32", 1e-5),
    ],
)
def test_experts_in_8_bits_stay_as_they_are(
    gpu: PretendGpu, tmp_path: Path, form: str, dtype: str, error: float
) -> None:
    check_experts(tmp_path, EXPERTS | {"v_head_dim": 12}, form, dtype, error=error)


@pytest.mark.parametrize(
    "form", ["gptq", "gptq, v2", "awq", "packed, zero points", "packed, channels", "gptq, by activations"]
)
def test_experts_in_4_bits_stay_as_they_are(
    gpu: PretendGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """If they do not, the log says how many weights are widened: 48, three for each of 8 experts in two layers."""
    check_int4_experts(tmp_path, EXPERTS, form, is_kept=form not in WIDENED)
    said = capsys.readouterr().err
    assert ("48 weights in 4 bits are widened" in said) == (form in WIDENED)
    assert "experts in int4" not in said


@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_steps_with_experts_in_8_bits_are_recorded_where_those_of_plain_ones_are_not(
    tmp_path: Path, capability: tuple[int, int]
) -> None:
    with pretend_gpu(has_triton=True, kind=GPU_KINDS[capability]) as gpu, triton_interprets(gpu):
        settings = SMALL | {"dtype": "bfloat16", "max_num_seqs": 1, "max_num_batched_tokens": 8}
        engine = make_engine(tmp_path, EXPERTS_IN_BLOCKS, **settings)
        assert engine.config.device.uses_graphs
        assert len(alone(engine, prompt_of(4), GREEDY)) == GREEDY.max_tokens
        assert not make_engine(tmp_path, EXPERTS, **settings).config.device.uses_graphs


def test_steps_with_plain_experts_in_a_checkpoint_of_8_bits_are_not_recorded_where_torch_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which experts a checkpoint has left plain is known only when it is read."""
    form = FORMS["int channel"]
    tensors = deepseek_tensors(EXPERTS, torch.bfloat16)
    stored, _ = quantized({name: x for name, x in tensors.items() if ".experts." not in name}, form)
    config = EXPERTS | {"quantization_config": form.quantization_config}
    save_checkpoint(tmp_path, config, tensors | stored)
    settings = SMALL | {"dtype": "bfloat16", "max_num_seqs": 1, "max_num_batched_tokens": 8, "load_format": "auto"}
    with pretend_gpu(has_triton=True, kind=GPU_KINDS[8, 0]) as gpu, triton_interprets(gpu):
        engine = make_engine(tmp_path, config, **settings)
        assert engine.config.model.quantization == "stored"
        assert len(alone(engine, prompt_of(4), GREEDY)) == GREEDY.max_tokens
    assert "are not captured as CUDA graphs: the checkpoint's experts are not quantised" in capsys.readouterr().err


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])  # fp8 blocks are too small for the digest kernel
def test_one_prefills_and_another_decodes(gpu: PretendGpu, tmp_path: Path, kv_cache_dtype: str) -> None:
    settings = SMALL | {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_dtype": kv_cache_dtype}
    one, prefill, decode = (make_engine(tmp_path, CONFIG, **settings) for _ in range(3))
    prompt = prompt_of(16)
    assert handed_over(prefill, decode, prompt, GREEDY) == alone(one, prompt, GREEDY)
    assert bytes_of(prefill).memory == "VRAM"
    for engine in (one, prefill, decode):
        assert engine.audit()[1] == []


def test_the_pool_leaves_room_for_recordings(tmp_path: Path) -> None:
    """It leaves room for the recordings' logits, here much of a step's memory, and for the driver's data for each."""
    total_bytes, settings = 256 << 20, {"attention_backend": "triton", "num_kv_blocks": 0, "max_num_seqs": 4}
    config = CONFIG | {"vocab_size": 50_000}
    with pretend_gpu(total_bytes=total_bytes, has_triton=True) as gpu, triton_interprets(gpu):
        engine = make_engine(tmp_path, config, gpu_memory_utilization=0.5, max_num_batched_tokens=8, **settings)
        _, step = largest_step(engine.config)
        torch.cuda.reset_peak_memory_stats()
        engine.executor.launch(step).wait()
        at_most = 0.5 * total_bytes - 3 * RECORDING_BYTES
        # RECORDING_BYTES covers the arrays of the smaller recordings.
        assert 0.98 * at_most < torch.cuda.max_memory_allocated() <= at_most + 4096


def test_the_pool_leaves_room_for_what_prompts_unfold(tmp_path: Path) -> None:
    """Prompts at the end of long contexts unfold the most; the step with the most sequences has no such prompt."""
    total_bytes, settings = 256 << 20, {"attention_backend": "triton", "num_kv_blocks": 0, "max_num_seqs": 4}
    config = EXPERTS | {"max_position_embeddings": 512}
    with pretend_gpu(total_bytes=total_bytes, has_triton=True) as gpu, triton_interprets(gpu):
        engine = make_engine(tmp_path, config, gpu_memory_utilization=0.3, max_num_batched_tokens=64, **settings)
        peaks = []
        for step in measured_steps(engine.config)[1]:
            torch.cuda.reset_peak_memory_stats()
            engine.executor.launch(step).wait()
            peaks.append(torch.cuda.max_memory_allocated())
        unfolding, of_most_sequences = peaks
        assert of_most_sequences < 0.995 * unfolding
        assert 0.98 * 0.3 * total_bytes < unfolding <= 0.3 * total_bytes


def test_the_pool_leaves_room_for_spans(tmp_path: Path) -> None:
    """Layers that keep a state hold memory for each span; in the step with the most sequences, these are too short."""
    total_bytes, settings = 256 << 20, {"attention_backend": "triton", "num_kv_blocks": 0, "max_num_seqs": 8}
    with pretend_gpu(total_bytes=total_bytes, has_triton=True) as gpu, triton_interprets(gpu):
        sizes = {"gpu_memory_utilization": 0.3, "max_num_batched_tokens": 64, "dtype": "bfloat16"}
        engine = make_engine(tmp_path, QWEN3_5, **settings | sizes)
        peaks = []
        for step in measured_steps(engine.config)[1]:
            torch.cuda.reset_peak_memory_stats()
            engine.executor.launch(step).wait()
            peaks.append(torch.cuda.max_memory_allocated())
        in_spans, of_most_sequences = peaks
        at_most = 0.3 * total_bytes - 4 * RECORDING_BYTES
        assert of_most_sequences < 0.995 * in_spans
        assert 0.98 * at_most < in_spans <= at_most + 4096


def launches_compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Compile all launches; Triton asks a pretended driver. This needs a process of its own, because Triton cannot
    compile in a process in which it interprets."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pretend_gpu.compile_launches", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)


def test_a_gpu_with_too_little_shared_memory_ends_in_a_sentence(tmp_path: Path) -> None:
    done = launches_compiled(tmp_path, "9.0", str(48 << 10))
    assert done.returncode == 1
    advice = "ValueError: the Triton kernels do not fit this GPU: give attention_backend torch"
    assert re.search(rf"^{advice} \(out of resource: shared memory, .* limit: 49152", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(("capability", "shared_bytes"), [("9.0", 227 << 10), ("12.0", 99 << 10)])
def test_every_launch_can_be_compiled(tmp_path: Path, capability: str, shared_bytes: int) -> None:
    """Every compiled kernel also fits the GPU."""
    done = launches_compiled(tmp_path, capability, str(shared_bytes))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout)
    engines = "llama", "qwen", "int8", "int4", "fp8", "blocks", "deepseek", "experts in blocks", "experts in int4"
    for name in (*engines, "states", "mamba-2", "adapters", "batch invariant", "batch invariant deepseek"):
        assert found[name]["at start"]
        assert found[name]["later"] == {}, "requests would wait for the compiler"
    assert {kernel for program in found.values() for part in program.values() for kernel in part} == {
        "_split_kernel", "reduce_kernel", "_prefill_kernel", "_rotate_kernel", "_norm_kernel", "_activation_kernel",
        "_digest_kernel", "_product_kernel", "_widen_kernel", "_quantize_kernel", "_latent_decode_kernel",
        "_latent_prefill_kernel", "_latent_project_kernel", "_unfolded_kernel", "_bounds_kernel", "_race_kernel",
        "_one_row_kernel", "_shrink_kernel", "_expand_kernel", "_tiles_kernel", "_expert_kernel", "_row_product_kernel",
        "_expert_row_product_kernel", "_sum_kernel", "_sum_pieces_kernel", "_choose_kernel", "_pieces_kernel",
        "_reduce_pieces_kernel", "_int4_kernel", "_widen_int4_kernel", "_int4_expert_kernel", "_four_bit_kernel",
        "_gate_kernel", "_convolve_kernel", "_delta_kernel", "_scan_kernel",
        "_solve_kernel", "_delta_spans_kernel", "_scan_spans_kernel",
    }  # fmt: skip
