"""Latent attention, as DeepSeek-V2 and V3, GLM 4.7 Flash and Youtu-LLM have it, read from config.json; and defaults of
models that have something of these. No torch.

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1; "DeepSeek-V3 Technical Report", 2024
(arXiv 2412.19437), section 2.1. Fields and their defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.models.hf_fields import flag, integer, one_of
from engine.models.rope_config import RopeConfig, yarn_scale

V2_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0, "norm_topk_prob": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
V3_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
}  # fmt: skip
GLM_LITE_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
}  # fmt: skip
GLM_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Of GLM 4.5 to 4.7, which have DeepSeek-V3's experts, but attention to keys and values of heads."""
YOUTU_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention. A token's KV is one latent for all heads, and one rotated key for all heads."""

    q_lora_rank: int
    """Dim of the queries' own latent; 0: one product computes queries from the hidden state."""
    kv_lora_rank: int
    """Dim of a latent."""
    qk_nope_head_dim: int
    """Dim of the part of a query or key without positions."""
    qk_rope_head_dim: int
    """Dim of the part of a query or key with rotary positions."""
    v_head_dim: int
    interleaves_rope: bool
    """Rotations turn pairs of adjacent numbers, not of numbers half a head apart."""
    softmax_scale: float
    """Factor of the products of queries and keys."""

    @property
    def latent_dim(self) -> int:
        """Dim of a token in the pool."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @staticmethod
    def from_hf(hf_config: dict[str, Any], rope: RopeConfig, *, always_interleaves: bool) -> LatentConfig:
        """Raises `ValueError` naming the field."""
        if rope.rope_type not in ("default", "yarn"):
            raise ValueError(
                f"config.json: rope type {rope.rope_type!r} is not supported with latent attention; "
                "known are default, yarn"
            )
        num_heads = integer(hf_config, "num_attention_heads")
        one_of(hf_config, "num_key_value_heads", (num_heads,))
        nope, rotated = integer(hf_config, "qk_nope_head_dim"), integer(hf_config, "qk_rope_head_dim")
        if rotated % 2:
            raise ValueError(f"config.json: qk_rope_head_dim must be even, is {rotated}")
        has_query_latent = hf_config.get("q_lora_rank") is not None
        mscale = yarn_scale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
        return LatentConfig(
            q_lora_rank=integer(hf_config, "q_lora_rank") if has_query_latent else 0,
            kv_lora_rank=integer(hf_config, "kv_lora_rank"),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rotated,
            v_head_dim=integer(hf_config, "v_head_dim"),
            interleaves_rope=always_interleaves or flag(hf_config, "rope_interleave", default=True),
            softmax_scale=(nope + rotated) ** -0.5 * mscale**2,
        )
