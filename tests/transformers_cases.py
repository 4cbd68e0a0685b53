"""Small configurations (config.json) of models that run on transformers' code."""

from __future__ import annotations

from typing import Any

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "pad_token_id": 0,
    "dtype": "float32",
}  # fmt: skip

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 80, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "dtype": "float32",
}  # fmt: skip

QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96,
    "bos_token_id": 1, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Three of its four layers keep a state."""

LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 97, "hidden_size": 64,
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False, "max_position_embeddings": 128,
    "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "dtype": "float32",
}  # fmt: skip
"""Three of its four layers keep the last inputs of a convolution."""

GRANITE_H: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 97,
    "hidden_size": 64, "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "shared_intermediate_size": 96, "num_local_experts": 0,
    "num_experts_per_tok": 0, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32,
    "mamba_expand": 2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "position_embedding_type": "nope", "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96,
    "bos_token_id": 1, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Three of its four layers are Mamba-2."""

FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32,
    "ssm_in_multiplier": 0.7, "ssm_out_multiplier": 0.6, "max_position_embeddings": 128, "initializer_range": 0.3,
    "eos_token_id": 96, "bos_token_id": 1, "dtype": "float32",
}  # fmt: skip
"""Each of its layers attends, and is Mamba-2."""

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 1,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""Every other layer has heads of twice the size, and the last one has no keys and values of its own."""

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "pad_token_id": 0,
    "dtype": "float32",
}  # fmt: skip
