"""Engines of DeepSeek models: what the pool holds, checkpoints, answers. That a step computes what transformers does is
tested in tests/unit/test_models_match_transformers.py."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deepseek_cases import (
    BLOCK_SIZE,
    FOR_CPU_KERNELS,
    GREEDY,
    ON_CPU_KERNELS,
    PROMPT,
    UNFOLDS_EARLY,
    V3,
    alone,
    config_of,
)
from model_bench import Bench
from quantized_checkpoints import FORMS, deepseek_tensors, quantized, save_checkpoint
from safetensors.torch import load_file, save_file

from engine.attention.torch_unfolded import UnfoldedHeads
from engine.llm_engine import LLMEngine
from engine.models.stored_weights import AS_STORED
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams

# -- the pool -------------------------------------------------------------------------------------------------------


def test_a_token_has_a_latent_and_a_key_in_the_pool_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    executor = Executor(config)
    assert executor.kv_pool.shape == (3, 40, 1, 1, BLOCK_SIZE, 24 + 8)
    assert executor.kv_shape.pool_bytes == executor.kv_pool.nbytes == 3 * 40 * BLOCK_SIZE * 32 * 4
    gib = executor.kv_pool.nbytes / 2**30
    assert config_of(tmp_path, num_kv_blocks=0, kv_cache_gib=gib).cache.num_blocks == 40


# -- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model as transformers saves it, and its greedy answer to `PROMPT`."""
    return save_v3(tmp_path_factory.mktemp("deepseek"), {})


def save_v3(folder: Path, sizes: dict[str, int]) -> tuple[Path, list[int]]:
    torch.manual_seed(5)
    fields = {name: value for name, value in (V3 | sizes).items() if name not in ("architectures", "dtype")}
    config = transformers.DeepseekV3Config(**fields, num_key_value_heads=4, initializer_range=0.3, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return folder, tokens[0, len(PROMPT) :].tolist()


def test_an_engine_answers_as_transformers_does(saved: tuple[Path, list[int]]) -> None:
    folder, expected = saved
    assert alone(LLMEngine(config_of(folder, None))) == expected
    assert alone(LLMEngine(config_of(folder, None, prefill_chunk_tokens=5, max_num_seqs=4))) == expected


@pytest.mark.parametrize(
    ("settings", "num_unfolded"),
    [({}, 3), ({"prefill_chunk_tokens": 5}, 0), ({"prefill_chunk_tokens": 6}, 9), ({"prefill_chunk_tokens": 10}, 6)],
    ids=str,
)
def test_the_same_tokens_from_prompts_unfolded_and_absorbed(
    tmp_path: Path, settings: dict[str, int], num_unfolded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 23 tokens in three layers, where 6 tokens suffice to unfold what they attend to: the whole prompt,
    chunks that are all too short, and chunks of which the last is too short."""
    folder, expected = save_v3(tmp_path, UNFOLDS_EARLY)
    calls: list[int] = []
    attend = UnfoldedHeads.attend
    monkeypatch.setattr(UnfoldedHeads, "attend", lambda *args: calls.append(1) or attend(*args))
    assert alone(LLMEngine(config_of(folder, None, **settings))) == expected
    assert len(calls) == num_unfolded


def changed_copy(saved: Path, folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """A copy of the checkpoint with changed tensors. None removes a tensor."""
    tensors = load_file(saved / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text((saved / "config.json").read_text())
    return folder


def test_layers_that_predict_ahead_are_passed_over(saved: tuple[Path, list[int]], tmp_path: Path) -> None:
    ahead = {"model.layers.3.eh_proj.weight": torch.ones(2), "model.layers.3.mlp.gate.weight": torch.ones(2)}
    assert alone(LLMEngine(config_of(changed_copy(saved[0], tmp_path, ahead), None))) == saved[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.4.mlp.gate.weight": torch.ones(2)}, "does not use: model.layers.4.mlp.gate.weight"),
        ({"model.layers.2.mlp.experts.7.up_proj.weight": None}, "lack the tensor model.layers.2.mlp.experts.7.up_proj"),
        ({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(2)}, "does not use: model.layers.1.mlp.experts.8"),
        (
            {"model.layers.0.self_attn.kv_b_proj.weight": torch.ones(88, 23)},
            r"\(88, 23\), expected \(88, 24\)",
        ),
    ],
)
def test_weights_that_do_not_fit(
    saved: tuple[Path, list[int]], tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Executor(config_of(changed_copy(saved[0], tmp_path, changes), None))


def test_the_bias_of_the_choice_keeps_float32(saved: tuple[Path, list[int]]) -> None:
    """Also in a 16-bit model: the bias' steps are smaller than what bfloat16 can resolve near 1."""
    executor = Executor(config_of(saved[0], None, dtype="bfloat16"))
    layer = executor._worker.runner._model._layers._layers[1]
    assert layer.feed_forward.router.bias_E.dtype == torch.float32


# -- the CPU kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_same_tokens_however_the_work_is_divided(quantization: str, tmp_path: Path) -> None:
    """Alone, beside others, in chunks, after preemptions, from cached prefixes, and with guesses."""
    config = V3 | FOR_CPU_KERNELS | {"max_position_embeddings": 256}
    settings = ON_CPU_KERNELS | {"quantization": quantization, "num_kv_blocks": 64}
    prompts = [[(7 * i + 3 * j) % 90 + 5 for i in range(30 + 9 * j)] for j in range(6)]
    params = [SamplingParams(temperature=0.9 * (j % 2), seed=j, max_tokens=40, ignore_eos=True) for j in range(6)]

    def answers(at_once: int, **changes: Any) -> tuple[list[list[int]], LLMEngine]:
        engine, found = LLMEngine(config_of(tmp_path, config, **settings | changes)), []
        for first in range(0, 6, at_once):
            some = range(first, first + at_once)
            for j in some:
                engine.add_request(str(j), prompts[j], params[j])
            tokens: dict[str, list[int]] = {str(j): [] for j in some}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens[output.request_id] += output.token_ids
            found += tokens.values()
        return found, engine

    alone, _ = answers(1, enable_prefix_caching=False)
    assert len({tuple(tokens) for tokens in alone}) == 6
    assert answers(6)[0] == alone
    assert answers(3, prefill_chunk_tokens=7, num_threads=2)[0] == alone
    tokens, engine = answers(6, num_kv_blocks=16)
    assert tokens == alone
    assert engine.stats.num_preemptions > 0
    tokens, engine = answers(6, speculative_config='{"num_speculative_tokens": 4, "prompt_lookup_min": 1}')
    assert tokens == alone
    assert engine.stats.num_accepted_tokens > 0
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_same_tokens_from_ranks_whatever_the_chunks(tmp_path: Path) -> None:
    """Their layers are not one call. A prompt is computed as a whole, then beside others, in steps that have room for a
    part of it."""
    settings = ON_CPU_KERNELS | {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_prefix_caching": False}
    config = config_of(tmp_path, V3 | FOR_CPU_KERNELS, tensor_parallel_size=2, **settings)
    with closing(LLMEngine(config)) as engine:
        expected = alone(engine)
        for number in range(3):
            engine.add_request(str(number), PROMPT[number:] if number < 2 else PROMPT, GREEDY)
        num_steps, tokens = 0, list[int]()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            num_steps += not tokens
            tokens += [token for output in outputs if output.request_id == "2" for token in output.token_ids]
    assert num_steps > 2, "in chunks"
    assert tokens == expected


@pytest.mark.parametrize("form", ["int channel", "int tensor"])
def test_a_checkpoint_in_8_bits_stays_in_8_bits(form: str, tmp_path: Path) -> None:
    """Except the products that make latents, and keys and values of them."""
    config = V3 | FOR_CPU_KERNELS | {"dtype": "bfloat16"}
    stored, plain = quantized(deepseek_tensors(config, torch.bfloat16), FORMS[form])
    kept = save_checkpoint(tmp_path / "kept", config | {"quantization_config": FORMS[form].quantization_config}, stored)
    rounded = save_checkpoint(tmp_path / "plain", config, plain)
    found = []
    for folder in (kept, rounded):
        engine_config = config_of(folder, None, **ON_CPU_KERNELS)
        bench = Bench(engine_config)
        logits = bench.logits((bench.sequence(PROMPT), len(PROMPT)))
        assert logits is not None
        found.append(logits)
        assert engine_config.model.quantization == (AS_STORED if folder == kept else "none")
    assert (found[0] - found[1]).norm() < 0.1 * found[1].norm()


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"kv_lora_rank": 40}, {}, "kv_lora_rank and qk_rope_head_dim must be multiples of 16, are 40 and 16"),
        ({"qk_rope_head_dim": 8}, {}, "are 32 and 8"),
        ({"qk_nope_head_dim": 13}, {}, "the model's sizes must be even, and qk_nope_head_dim=13"),
        ({"q_lora_rank": 21}, {}, "q_lora_rank=21"),
        ({"num_attention_heads": 5, "v_head_dim": 11}, {}, r"num_attention_heads \* v_head_dim=55"),
        ({"moe_intermediate_size": 17}, {}, r"n_shared_experts \* moe_intermediate_size=17"),
        ({}, {"dtype": "float32"}, "it computes bfloat16, and dtype is float32"),
        ({}, {"kv_cache_dtype": "fp8"}, "its pool holds bfloat16"),
        ({}, {"block_size": 8}, "block_size must be a multiple of 16, is 8"),
    ],
)
def test_what_the_cpu_kernels_do_not_serve(
    changes: dict[str, int], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"attention_backend cpu cannot work here: .*{message}"):
        config_of(tmp_path, V3 | FOR_CPU_KERNELS | changes, **ON_CPU_KERNELS | settings)
    auto = config_of(
        tmp_path, V3 | FOR_CPU_KERNELS | changes, **ON_CPU_KERNELS | settings | {"attention_backend": "auto"}
    )
    assert auto.device.attention_backend == "torch"


# -- 8 bits in the pool ---------------------------------------------------------------------------------------------


def test_a_pool_of_8_bit_floats_is_near_one_of_float32(saved: tuple[Path, list[int]]) -> None:
    eight = LLMEngine(config_of(saved[0], None, kv_cache_dtype="fp8"))
    assert eight.executor.kv_pool.dtype == torch.float8_e4m3fn
    exact_one, prompt_alone = LLMEngine(config_of(saved[0], None)), replace(GREEDY, max_tokens=1)
    assert len(alone(eight, prompt_alone)) == len(alone(exact_one, prompt_alone)) == 1
    # Layer 0's latents come from the same numbers, so they differ only by their rounding.
    ours, exact = eight.executor.kv_pool[0].float(), exact_one.executor.kv_pool[0]
    error = (ours - exact).norm() / exact.norm()
    assert 0.01 < error < 0.04
