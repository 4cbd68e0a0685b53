"""Small models of gpt-oss' architecture whose experts' weights are in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from model_bench import SMALL, save_model
from safetensors.torch import load_file, save_file

EXPERTS = ("gate_up_proj", "down_proj")


def converted(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes seconds to import

    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def save_four_bits(folder: Path, *, intermediate_size: int = 64) -> transformers.PreTrainedModel:
    """Write a checkpoint to `folder`; return the model with the dequantized weights."""
    sizes = SMALL | {"hidden_size": 96, "intermediate_size": intermediate_size}
    config = transformers.GptOssConfig(
        **sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, pad_token_id=0
    )
    model = save_model(config, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        for weight in EXPERTS:
            name = f"model.layers.{layer}.mlp.experts.{weight}"
            num_experts, num_inputs, num_outputs = tensors.pop(name).shape
            blocks = random_bytes(num_experts, num_outputs, num_inputs // 32, 16)
            scales = random_bytes(num_experts, num_outputs, num_inputs // 32, low=120, high=125)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            model.get_parameter(name).data.copy_(converted(blocks, scales, torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return model


def with_all_experts(folder: Path) -> None:
    """Each token has all experts: with fewer, rounding of scores may choose others."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"num_experts_per_tok": fields["num_local_experts"]}))
