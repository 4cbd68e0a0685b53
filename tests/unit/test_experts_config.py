"""What config.json says of the experts of Qwen3-MoE and Mixtral. For DeepSeek's, see test_deepseek_config.py."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.models import load_decoder_config

PLAIN: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN = PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
}  # fmt: skip
MIXTRAL = PLAIN | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN, {"num_experts": 2}, "num_experts_per_tok must be at most num_experts=2, is 3"),
        (QWEN, {"num_experts": None}, "num_local_experts must be an integer of at least 1, is None"),
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; known: 1"),
        (QWEN, {"mlp_only_layers": [1]}, r"mlp_only_layers must be the first layers, from 0 on, is \[1\]"),
        (QWEN, {"mlp_only_layers": 1}, "mlp_only_layers must be the first layers, from 0 on, is 1"),
        (QWEN, {"hidden_size": 36}, "hidden_size must be a multiple of 8 where there are experts, is 36"),
        (QWEN, {"moe_intermediate_size": 0}, "moe_intermediate_size must be an integer of at least 1, is 0"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts must be an integer of at least 1, is '8'"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts=8, is 9"),
    ],
)
def test_config_json_that_cannot_be_served(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_decoder_config(base | changes)


@pytest.mark.parametrize(
    ("name", "kind"), [("Qwen3Moe", transformers.Qwen3MoeConfig), ("Mixtral", transformers.MixtralConfig)]
)
def test_absent_fields_are_those_of_transformers(name: str, kind: Any) -> None:
    """Except the number of experts, which every checkpoint states."""
    whole = kind(num_local_experts=16).to_dict()
    named = {"architectures": [f"{name}ForCausalLM"]}
    needed = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_local_experts",
    )  # fmt: skip
    least = named | {field: whole[field] for field in needed}
    assert load_decoder_config(least) == load_decoder_config(whole | named)


def test_a_checkpoint_of_qwen3_30b_a3b() -> None:
    config = load_decoder_config({
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 40960, "max_window_layers": 48,
        "sliding_window": None, "use_sliding_window": False, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
    })  # fmt: skip
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_token, config.moe.intermediate_size) == (128, 8, 768)
    assert (config.moe.first_layer, config.moe.scoring, config.moe.norms_weights) == (0, "softmax", True)
    assert (config.num_kv_heads, config.head_dim, config.has_qk_norm) == (4, 128, True)
    assert config.sliding_windows == (0,) * 48


def test_layers_that_all_are_dense_have_no_experts() -> None:
    assert load_decoder_config(QWEN | {"mlp_only_layers": [0, 1, 2, 3]}).moe is None
