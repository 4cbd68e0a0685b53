"""Small DeepSeek models and engines that run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import handover

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams

V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128, "q_lora_rank": None,
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "dtype": "float32",
}  # fmt: skip
V3 = V2 | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 20, "n_group": 4, "topk_group": 2}
UNFOLDS_EARLY = {"kv_lora_rank": 40, "qk_nope_head_dim": 6, "v_head_dim": 4}
"""Sizes with which a chunk of 6 new tokens is computed with unfolded keys and values."""
FOR_CPU_KERNELS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
ON_CPU_KERNELS = {"dtype": "bfloat16", "attention_backend": "cpu", "block_size": 16}
BLOCK_SIZE = 4
PROMPT = [(37 * i + 11) % 90 + 5 for i in range(23)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def config_of(folder: Path, hf_config: dict[str, Any] | None = V3, **settings: Any) -> EngineConfig:
    """`hf_config`: None if `folder` has a config.json already."""
    if hf_config is not None:
        (folder / "config.json").write_text(json.dumps(hf_config))
        settings = {"load_format": "dummy"} | settings
    defaults = {"num_kv_blocks": 40, "block_size": BLOCK_SIZE, "num_threads": 1, "device": "cpu"}
    return create_engine_config(EngineArgs(model=str(folder), **defaults | settings))


def alone(engine: LLMEngine, params: SamplingParams = GREEDY) -> list[int]:
    return handover.alone(engine, PROMPT, params)
