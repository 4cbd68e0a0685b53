"""Which config.json of DeepSeek models are accepted, and which settings can serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from deepseek_cases import V2, V3, config_of

from engine.models import load_decoder_config, load_model_shape
from engine.models.rope_config import RopeConfig

GLM = {name: value for name, value in V3.items() if name != "first_k_dense_replace"} | {
    "architectures": ["Glm4MoeLiteForCausalLM"]
}
GLM_4_5 = V3 | {"architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (V2, {"kv_lora_rank": 0}, "kv_lora_rank must be an integer of at least 1, is 0"),
        (V2, {"q_lora_rank": "many"}, "q_lora_rank must be an integer of at least 1, is 'many'"),
        (V2, {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, is 7"),
        (V2, {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; known: 4"),
        (V2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported with latent"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok must be an integer of at least 1, is None"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8, .*, is 9"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; known: greedy, group_limited"),
        (V2, {"topk_method": "group_limited_greedy"}, "n_group must be an integer of at least 1, is None"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is not supported with softmax scores"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; known: softmax"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; known: 1"),
        (V2, {"hidden_size": 36}, "hidden_size must be a multiple of 8 where there are experts, is 36"),
        (V3, {"n_group": 3}, "n_routed_experts=8 must be a multiple of n_group=3"),
        (V3, {"n_group": 8}, "n_group=8, and a group must have at least 2"),
        (V3, {"routed_scaling_factor": None}, "routed_scaling_factor must be a number, is None"),
        (V3, {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers must be at most 1024"),
        (V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer of at least 0, is -1"),
        (V3, {"rope_scaling": {"type": "yarn", "factor": "8"}}, "factor must be a number, is '8'"),
        (V3, {"topk_group": 5}, "topk_group must be at most n_group=4, is 5"),
        (V3, {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most 4, the experts of topk_group=2 groups"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; known: noaux_tc"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0, is -1"),
        (GLM, {"mlp_layer_types": ["sparse", "dense", "sparse"]}, r"first \"dense\" and then \"sparse\", is \['sparse"),
        (GLM, {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must have 3 entries"),
        (GLM, {"mlp_layer_types": "dense"}, "mlp_layer_types must have 3 entries, .* is 'dense'"),
        (GLM, {"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not supported; known: 1"),
        (GLM, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; known: 1.0"),
        (GLM_4_5, {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1, is 1.5"),
        (GLM_4_5, {"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0, is 0"),
        (GLM_4_5, {"partial_rotary_factor": 0.4}, "factor=0.4 must mean an even number of head_dim=8, is 3"),
        (GLM_4_5, {"rope_scaling": {"type": "yarn", "factor": 2, "partial_rotary_factor": 0.1}}, "head_dim=8, is 0"),
        (GLM_4_5, {"use_qk_norm": "yes"}, "use_qk_norm must be true or false, is 'yes'"),
        (GLM_4_5, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer of at least 0"),
    ],
)
def test_config_json_that_cannot_be_served(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_decoder_config(base | changes)


def test_what_transformers_code_cannot_serve_our_own_decoder_can() -> None:
    with pytest.raises(ValueError, match=r"DeepseekV3.* not supported: .*; give model_impl auto: our own decoder"):
        load_model_shape(V3, "transformers")
    assert load_model_shape(V3, "auto") == load_decoder_config(V3)


def test_absent_fields_are_those_of_transformers() -> None:
    for name, kind in (
        ("DeepseekV2", transformers.DeepseekV2Config),
        ("DeepseekV3", transformers.DeepseekV3Config),
        ("Glm4MoeLite", transformers.Glm4MoeLiteConfig),
        ("Glm4Moe", transformers.Glm4MoeConfig),
        ("Youtu", transformers.YoutuConfig),
    ):
        given = {"num_experts_per_tok": 6} if name == "DeepseekV2" else {}
        whole = kind(**given, num_attention_heads=8, num_key_value_heads=8).to_dict()
        named = {"architectures": [f"{name}ForCausalLM"]}
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        least = named | given | {field: whole[field] for field in needed}
        assert load_decoder_config(least) == load_decoder_config(whole | named)


def test_a_checkpoint_of_glm_4_5_air() -> None:
    """The fields of its config.json that matter."""
    config = load_decoder_config({
        "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "hidden_act": "silu", "max_position_embeddings": 131072, "num_nextn_predict_layers": 1, "rope_theta": 1000000,
        "rope_scaling": None, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    })  # fmt: skip
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim, config.num_nextn_predict_layers) == (8, 128, 64, 1)
    assert (config.has_qkv_bias, config.has_output_bias, config.has_qk_norm) == (True, False, False)


def test_dense_layers_alone_need_no_experts() -> None:
    assert load_decoder_config(V3 | {"first_k_dense_replace": 3, "n_routed_experts": None}).moe is None


def test_a_checkpoint_of_deepseek_v3() -> None:
    """The fields of its config.json that matter, without `quantization_config`."""
    config = load_decoder_config({
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
        "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    })  # fmt: skip
    assert config.mla is not None
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim) == (1, 576, 64)
    assert config.rope.attention_factor == 1.0
    assert config.mla.softmax_scale == pytest.approx(192**-0.5 * 1.3688879**2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "int4"},
            r"quantization int4 .* must be multiples of 32, are \(32, 40, 20, .*; give int8 or none",
        ),
        (
            {"attention_backend": "cpu", "dtype": "bfloat16", "block_size": 16},
            "backend cpu .* must be multiples of 16, are 24 and 8; give auto",
        ),
        (
            {"attention_backend": "flash_attn"},
            "backend flash_attn cannot work here: it is called for keys and values of",
        ),
    ],
)
def test_settings_that_cannot_be_served(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **settings)


def test_auto_is_plain_torch_on_a_cpu(tmp_path: Path) -> None:
    assert config_of(tmp_path, dtype="bfloat16", block_size=16).device.attention_backend == "torch"


def test_rope_scaling_counts_before_rope_parameters() -> None:
    """As in transformers, wherever there are both."""
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    theirs = transformers.LlamaConfig.from_dict({"rope_theta": 500.0, **both}).rope_parameters
    ours = RopeConfig.from_hf({"rope_theta": 500.0, **both}, 128)
    assert (ours.rope_type, ours.factor, ours.theta) == ("linear", 2.0, 500.0)
    assert (theirs["type"], theirs["factor"], theirs["rope_theta"]) == ("linear", 2.0, 500.0)
