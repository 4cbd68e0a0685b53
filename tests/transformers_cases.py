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

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": 96, "bos_token_id": 1, "pad_token_id": 0,
    "dtype": "float32",
}  # fmt: skip
