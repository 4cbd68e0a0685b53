"""Folders of a tiny Llama for tests (config.json and weights), and the tokens that an engine computes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "dtype": "float32",
}


def folder_with(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"load_format": "dummy", "num_kv_blocks": 16, "block_size": 4, "num_threads": 1}
    return create_engine_config(EngineArgs(model=str(folder), **defaults | settings))


def write_weights(folder: Path, *, seed: int = 1, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """Write random weights of LLAMA's shapes to one file."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,), "lm_head.weight": (64, 16)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (s, 16) for n, s in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (24, 16) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{at}.{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def greedy(config: EngineConfig, num_tokens: int = 6) -> list[int]:
    executor = Executor(config)
    seq = Sequence(0, "r", [5, 6, 7], 3, SamplingParams(temperature=0), block_table=[3, 1, 2])
    for _ in range(num_tokens):
        num_new_tokens = seq.num_uncomputed_tokens
        [[token_id]] = executor.launch(SchedulerOutput([ScheduledSequence(seq, num_new_tokens)], [])).wait()
        seq.num_computed_tokens += num_new_tokens
        seq.token_ids.append(token_id)
    return list(seq.token_ids)
