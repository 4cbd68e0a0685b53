"""Compiles every kernel that engines and the GPU benchmark launch, for the pretended GPU; computes nothing.

    python -m pretend_gpu.compile_launches 12.0 101376     # compute capability, shared memory of a program in bytes

Prints a JSON object: per program, how many variants of each kernel it compiled at its start and later. A kernel that
cannot be compiled ends the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from lora_folders import products_of, write_adapter

from benchmarks.gpu_parts import (
    attention,
    digests,
    drafts,
    floors,
    gpt_oss,
    int4_experts,
    invariant,
    products,
    states,
    steps,
)
from benchmarks.gpu_parts.profiling import DeviceWork
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.llm_engine import LLMEngine
from engine.models.transformers_model import TransformersModel
from engine.sampling_params import SamplingParams
from pretend_gpu import pretend_gpu
from pretend_gpu.engines import make_engine
from pretend_gpu.triton import triton_compiles

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 500,
    "max_position_embeddings": 4096,
}  # fmt: skip
QWEN = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 16, "max_position_embeddings": 4096, "q_lora_rank": 64,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
STATES = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "eos_token_id": 2,
}  # fmt: skip
MAMBA_2 = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "position_embedding_type": "nope", "eos_token_id": 2,
}  # fmt: skip
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen": (QWEN, {"dtype": "float16"}),
    "int8": (LLAMA, {"quantization": "int8"}),
    "int4": (LLAMA, {"quantization": "int4"}),
    "fp8": (QWEN, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "blocks": (LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, {}),
    "deepseek": (DEEPSEEK, {}),
    "experts in blocks": (
        DEEPSEEK
        | {
            "moe_intermediate_size": 256,
            "n_routed_experts": 32,  # so many that prompts use tile sizes (two) that decoding does not
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        {},
    ),
    "experts in int4": (
        QWEN
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 192,
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
        },
        {},
    ),
    "states": (STATES, {}),
    "mamba-2": (MAMBA_2, {}),
    "batch invariant": (QWEN, {"batch_invariant": True, "kv_cache_dtype": "fp8"}),
    "batch invariant deepseek": (DEEPSEEK, {"batch_invariant": True}),
    "adapters": (LLAMA, {"lora_modules": "a", "enforce_eager": True}),
}
Measure = Callable[[Setting], Iterator[Row]]
PARTS: dict[str, Measure] = {
    "floors": floors.measure,
    "attention": attention.measure,
    "digests": digests.measure,
    "steps": steps.measure,
    "steps-drafts": drafts.measure,
    "products": products.measure,
    "gpt-oss": gpt_oss.measure,
    "int4-experts": int4_experts.measure,
    "states": states.measure,
    "steps-int4": steps.measure_int4,
    "steps-mixture": steps.measure_mixture,
    "invariant": invariant.measure,
}
PROMPTS = (1, 17, 300, 2500, 40, 100, 20, 600)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=4, ignore_eos=True, seed=1),
    SamplingParams(temperature=1, max_tokens=4, ignore_eos=True, seed=2, top_p=0.9, repetition_penalty=1.1),
)


Variants = Counter[str]


def serve(config: dict[str, Any], settings: dict[str, Any], compiled: Variants) -> Variants:
    """Serves prompts and answers of several lengths, with contexts of one piece and of many. Returns what was compiled
    at the start."""
    with TemporaryDirectory() as folder:
        if "lora_modules" in settings:
            write_adapter(Path(folder) / "a", products=products_of(config))
            settings = settings | {"lora_modules": f"a={folder}/a"}
        engine = make_engine(
            Path(folder), config, attention_backend="triton", max_num_seqs=4, num_kv_blocks=400,
            **{"block_size": 16, "dtype": "bfloat16"} | settings,
        )  # fmt: skip
        at_start = compiled.copy()
        for number, length in enumerate(PROMPTS):
            lora_name = "a" if engine.config.lora_modules and number % 4 else ""
            engine.add_request(str(number), [5] * length, PARAMS[number % len(PARAMS)], lora_name=lora_name)
            if number % 2:
                finish(engine)
        return at_start


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def measure(part: Measure, compiled: Variants) -> Variants:
    with TemporaryDirectory() as folder:
        list(part(Setting(device="cuda", is_tiny=True, results=Path(folder))))
    return compiled


def main(capability: str, shared_bytes: str) -> None:
    major, minor = capability.split(".")
    kind = GpuKind((int(major), int(minor)), int(shared_bytes))
    torch.set_num_threads(1)
    steps.profiled = lambda *args, **kwargs: DeviceWork(1.0, [])  # CUDA's profiler is not pretended
    TransformersModel._check_tokens_are_apart = lambda *_: None  # type: ignore[method-assign]  # nothing is computed
    programs: dict[str, Callable[[Variants], Variants]] = {}
    for name, (config, settings) in ENGINES.items():
        programs[name] = partial(serve, config, settings)
    for name, part in PARTS.items():
        programs[f"benchmark: {name}"] = partial(measure, part)
    found: dict[str, dict[str, Variants]] = {}
    for name, program in programs.items():
        variants: Variants = Counter()
        with pretend_gpu(has_triton=True, kind=kind) as gpu, triton_compiles(gpu, variants):
            at_start = program(variants)
        found[name] = {"at start": at_start, "later": variants - at_start}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
