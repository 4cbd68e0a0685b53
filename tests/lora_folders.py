"""Writes folders of small adapters, in PEFT's layout, and of a model for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 307, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "attention_bias": True,
}  # fmt: skip


def products_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the number of outputs and inputs of each product."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


PRODUCTS = products_of(CONFIG)
ALPHA = 8


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(
    folder: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    products: Mapping[str, tuple[int, int]] = PRODUCTS,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """Write an adapter with random weights. `tensors` adds or replaces tensors; the value None removes one."""
    of_all_layers = {
        f"model.layers.{layer}.{product}": size
        for layer in range(CONFIG["num_hidden_layers"])
        for product, size in products.items()
    }
    write_adapter_of(folder, of_all_layers, rank=rank, seed=seed, config=config, tensors=tensors)


def write_adapter_of(
    folder: Path,
    products: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    seed: int,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """Like `write_adapter`. `products`: outputs and inputs by their names in the model."""
    folder.mkdir(parents=True, exist_ok=True)
    meaning = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(meaning | (config or {})))
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Any] = {}
    for product, (outputs, inputs) in products.items():
        name = f"base_model.model.{product}"
        drawn[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
        drawn[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    drawn |= tensors or {}
    save_file({name: value for name, value in drawn.items() if value is not None}, folder / "adapter_model.safetensors")


def merge(weights: Path, adapter: Path, scale: float, folder: Path, *, is_transposed: bool = False) -> None:
    """Write the model's weights with the adapter merged in: W + s B A, in float32. `is_transposed`: the weights are
    stored as [inputs, outputs]."""
    merged, added = load_file(weights), load_file(adapter / "adapter_model.safetensors")
    for name, down in added.items():
        if ".lora_A." in name:
            product = name.removeprefix("base_model.model.").replace(".lora_A", "")
            up = added[name.replace("lora_A", "lora_B")]
            change = scale * (up.float() @ down.float())
            merged[product] = merged[product].float() + (change.T if is_transposed else change)
    save_file(merged, folder / "model.safetensors")
