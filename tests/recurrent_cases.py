"""Small configurations of models of which three of four layers keep a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from model_bench import SMALL

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
LAYERS = SMALL | {"num_hidden_layers": 4, "head_dim": 16}

CONVOLUTIONS = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "block_ff_dim": 64,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}

CONFIGS: dict[str, Callable[..., Any]] = {
    "lfm2": lambda **more: transformers.Lfm2Config(**CONVOLUTIONS | more),
    "lfm2-moe": lambda **more: transformers.Lfm2MoeConfig(**CONVOLUTIONS | FEW_EXPERTS | more),
    "qwen3-next": lambda **more: transformers.Qwen3NextConfig(**LAYERS | DELTA | EXPERTS | more),
    "qwen3.5": lambda **more: transformers.Qwen3_5TextConfig(**LAYERS | DELTA | more),
    "qwen3.5-moe": lambda **more: transformers.Qwen3_5MoeTextConfig(**LAYERS | DELTA | EXPERTS | more),
}
