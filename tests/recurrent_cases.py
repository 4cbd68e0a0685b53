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

MAMBA_2 = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
GRANITE = SMALL | MAMBA_2 | {
    "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 80,
    "num_local_experts": 0, "num_experts_per_tok": 0, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "logits_scaling": 2.0, "attention_multiplier": 0.2, "position_embedding_type": "nope",
}  # fmt: skip
FALCON = SMALL | MAMBA_2 | {
    "num_hidden_layers": 2, "mamba_d_ssm": 96, "head_dim": 8, "ssm_in_multiplier": 0.7, "ssm_out_multiplier": 0.6,
    "attention_out_multiplier": 0.9, "key_multiplier": 1.2, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
    "ssm_multipliers": [0.5, 0.8, 1.1, 0.9, 1.3], "mlp_multipliers": [0.9, 0.7],
}  # fmt: skip
NEMOTRON = SMALL | {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"], "head_dim": 8, "mamba_num_heads": 6,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4, "chunk_size": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip

BAMBA = {"num_hidden_layers": 3, "attn_layer_indices": [1]}

CONFIGS: dict[str, Callable[..., Any]] = {
    "bamba": lambda **more: transformers.BambaConfig(**SMALL | MAMBA_2 | BAMBA | more),
    "falcon-h1": lambda **more: transformers.FalconH1Config(**FALCON | more),
    "falcon-h1-normed": lambda **more: transformers.FalconH1Config(**FALCON | {"mamba_rms_norm": True} | more),
    "granite-h": lambda **more: transformers.GraniteMoeHybridConfig(**GRANITE | more),
    "granite-h-moe": lambda **more: transformers.GraniteMoeHybridConfig(
        **GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24} | more
    ),
    "nemotron-h": lambda **more: transformers.NemotronHConfig(**NEMOTRON | more),
    "lfm2": lambda **more: transformers.Lfm2Config(**CONVOLUTIONS | more),
    "lfm2-moe": lambda **more: transformers.Lfm2MoeConfig(**CONVOLUTIONS | FEW_EXPERTS | more),
    "qwen3-next": lambda **more: transformers.Qwen3NextConfig(**LAYERS | DELTA | EXPERTS | more),
    "qwen3.5": lambda **more: transformers.Qwen3_5TextConfig(**LAYERS | DELTA | more),
    "qwen3.5-moe": lambda **more: transformers.Qwen3_5MoeTextConfig(**LAYERS | DELTA | EXPERTS | more),
}
