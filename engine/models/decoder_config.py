"""A decoder's configuration, read from a Hugging Face config.json. Integers only, no torch.

Covers the Llama family, and models with latent attention, whose own fields are in deepseek_config.py; fields of experts
are in experts_config.py. The default of an absent field depends on the architecture, as in transformers' configuration
classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.models.deepseek_config import (
    GLM_DEFAULTS,
    GLM_LITE_DEFAULTS,
    V2_DEFAULTS,
    V3_DEFAULTS,
    YOUTU_DEFAULTS,
    LatentConfig,
)
from engine.models.experts_config import (
    ExpertsConfig,
    deepseek_experts,
    glm_lite_experts,
    mixtral_experts,
    qwen_experts,
)
from engine.models.hf_fields import flag, integer, number, one_of
from engine.models.model_shape import ModelShape
from engine.models.rope_config import RopeConfig, rotated_part

MOST_LAYERS = 1024
MOST_HEAD_DIM = 4096
"""Several times what any model has. A larger number is a mistake, which would otherwise show as a pool that fits
nowhere."""
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What distinguishes one architecture from the others and is not in config.json."""

    has_qkv_bias: bool = False
    """Regardless of `attention_bias`; the output projection then has no bias."""
    has_attention_bias_field: bool = False
    has_output_bias: bool = True
    """`attention_bias` also means the output projection."""
    has_mlp_bias_field: bool = False
    has_qk_norm: bool | None = False
    """None: `use_qk_norm` says so."""
    rotated_part: float = 1.0
    """Of a head, unless `partial_rotary_factor` says otherwise; 1: it must not."""
    head_dim: int | None = None
    """Default if config.json gives none; None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    sliding: str = "none"
    """"none"; "all": every layer, if there is a `sliding_window`; "if used": the same, if `use_sliding_window`; "late":
    like "if used", but only the layers of `layer_types`, or those from `max_window_layers` on."""
    max_positions: int = 2048
    has_latents: bool = False
    """Latent attention (deepseek_config.py)."""
    experts: Callable[[dict[str, Any], int], ExpertsConfig | None] | None = None
    """Reads the experts' fields of config.json, given the number of layers."""
    always_interleaves_rope: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of further fields."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(has_attention_bias_field=True, has_mlp_bias_field=True),
    "MistralForCausalLM": Architecture(num_kv_heads=8, sliding="all", max_positions=131072),
    "Qwen2ForCausalLM": Architecture(has_qkv_bias=True, sliding="late", max_positions=32768),
    "Qwen3ForCausalLM": Architecture(
        has_attention_bias_field=True, has_qk_norm=True, head_dim=128, sliding="late", max_positions=32768
    ),
    "Qwen3MoeForCausalLM": Architecture(
        has_attention_bias_field=True, has_qk_norm=True, num_kv_heads=4, sliding="if used", max_positions=32768,
        experts=qwen_experts,
        defaults={"moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "MixtralForCausalLM": Architecture(
        num_kv_heads=8, sliding="all", max_positions=131072, experts=mixtral_experts,
        defaults={
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
        },
    ),
    "DeepseekV2ForCausalLM": Architecture(
        has_attention_bias_field=True, has_mlp_bias_field=True, has_latents=True,
        experts=partial(deepseek_experts, scoring="softmax"), always_interleaves_rope=True,
        defaults=V2_DEFAULTS,
    ),
    "DeepseekV3ForCausalLM": Architecture(
        has_attention_bias_field=True, has_latents=True,
        experts=partial(deepseek_experts, scoring="sigmoid"), max_positions=4096, defaults=V3_DEFAULTS,
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        has_attention_bias_field=True, has_latents=True, experts=glm_lite_experts, max_positions=202752,
        defaults=GLM_LITE_DEFAULTS,
    ),
    "Glm4MoeForCausalLM": Architecture(
        has_attention_bias_field=True, has_output_bias=False, has_qk_norm=None, rotated_part=0.5, num_kv_heads=8,
        experts=partial(deepseek_experts, scoring="sigmoid"), max_positions=131072, defaults=GLM_DEFAULTS,
    ),
    "YoutuForCausalLM": Architecture(
        has_attention_bias_field=True, has_latents=True, max_positions=131072, defaults=YOUTU_DEFAULTS,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """The canonical form of config.json."""

    intermediate_size: int
    rms_norm_eps: float
    has_qkv_bias: bool
    """With latent attention: whether the products that yield latents have a bias."""
    has_output_bias: bool
    """Whether the attention's output projection has a bias."""
    has_mlp_bias: bool
    has_qk_norm: bool
    ties_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    """Per layer: a token sees itself and this many minus one before it; 0 means all."""
    num_unrotated: int = 0
    """Numbers at the end of a head that have no rotary positions. 0 with latent attention, which has its own fields."""
    num_nextn_predict_layers: int = 0
    """Further layers of the checkpoint, for multi-token prediction. They are not computed."""

    @property
    def product_inputs(self) -> tuple[int, ...]:
        return self.hidden_size, self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        return self.head_dim - self.num_unrotated if self.mla is None else self.mla.qk_rope_head_dim

    @staticmethod
    def from_hf(name: str, hf_config: dict[str, Any]) -> DecoderConfig:
        """Raises `ValueError` naming the field that is missing, contradictory or unsupported."""
        arch = ARCHITECTURES[name]
        hf_config = arch.defaults | hf_config
        hidden_size, num_heads = integer(hf_config, "hidden_size"), integer(hf_config, "num_attention_heads")
        num_layers = integer(hf_config, "num_hidden_layers", most=MOST_LAYERS)
        one_of(hf_config, "hidden_act", ("silu",))
        max_positions = integer(hf_config, "max_position_embeddings", default=arch.max_positions)
        rope = RopeConfig.from_hf(hf_config, max_positions)
        part = rotated_part(hf_config, arch.rotated_part)
        mla = moe = None
        if arch.has_latents:
            mla = LatentConfig.from_hf(hf_config, rope, always_interleaves=arch.always_interleaves_rope)
        if arch.experts is not None:
            moe = arch.experts(hf_config, num_layers)
        num_kv_heads, head_dim = (1, mla.latent_dim) if mla is not None else _heads(arch, hf_config)
        has_attention_bias = arch.has_attention_bias_field and flag(hf_config, "attention_bias")
        return DecoderConfig(
            vocab_size=integer(hf_config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(hf_config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(hf_config, "rms_norm_eps", least=0, default=1e-6),
            max_positions=max_positions,
            has_qkv_bias=arch.has_qkv_bias or has_attention_bias,
            has_output_bias=has_attention_bias and arch.has_output_bias,
            has_mlp_bias=arch.has_mlp_bias_field and flag(hf_config, "mlp_bias"),
            has_qk_norm=flag(hf_config, "use_qk_norm") if arch.has_qk_norm is None else arch.has_qk_norm,
            ties_embeddings=flag(hf_config, "tie_word_embeddings"),
            rope=rope,
            sliding_windows=_sliding_windows(arch, hf_config, num_layers),
            num_unrotated=0 if mla is not None else head_dim - _num_rotated(head_dim, part),
            mla=mla,
            moe=moe,
            num_nextn_predict_layers=_num_nextn_predict_layers(arch, hf_config),
        )


def _num_nextn_predict_layers(arch: Architecture, hf_config: dict[str, Any]) -> int:
    has_field = arch.has_latents or "num_nextn_predict_layers" in arch.defaults
    return integer(hf_config, "num_nextn_predict_layers", least=0, default=0, most=MOST_LAYERS) if has_field else 0


def _num_rotated(head_dim: int, part: float) -> int:
    num_rotated = int(head_dim * part)
    if num_rotated % 2 or not num_rotated:
        raise ValueError(
            f"config.json: partial_rotary_factor={part:g} must mean an even number of head_dim={head_dim}, "
            f"is {num_rotated}"
        )
    return num_rotated


def _heads(arch: Architecture, hf_config: dict[str, Any]) -> tuple[int, int]:
    """(key heads, head dim)"""
    hidden_size, num_heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    num_kv_heads = integer(hf_config, "num_key_value_heads", default=arch.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = integer(hf_config, "head_dim", default=arch.head_dim or hidden_size // num_heads, most=MOST_HEAD_DIM)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim must be even, is {head_dim}")
    return num_kv_heads, head_dim


def _sliding_windows(arch: Architecture, hf_config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    layer_types = _layer_types(hf_config, num_layers)
    # 4096 is what transformers assumes where config.json leaves the field out; a null turns the window off.
    window = hf_config.get("sliding_window", 4096) or 0
    if not isinstance(window, int) or not 0 <= window < 2**31:
        raise ValueError(f"config.json: sliding_window must be an integer in [0, 2**31), is {window!r}")
    if arch.sliding == "none" or not window:
        return (0,) * num_layers
    if arch.sliding != "all" and not flag(hf_config, "use_sliding_window"):
        return (0,) * num_layers
    if arch.sliding != "late":
        return (window,) * num_layers
    if layer_types is None:
        first_sliding = integer(hf_config, "max_window_layers", least=0, default=28)
        return tuple(window if layer >= first_sliding else 0 for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def _layer_types(hf_config: dict[str, Any], num_layers: int) -> list[str] | None:
    """None if config.json has none. They are checked even if they are not used: wrong ones mean another model."""
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        given = f"has {len(layer_types)}" if isinstance(layer_types, list) else f"is {layer_types!r:.80}"
        raise ValueError(f"config.json: layer_types must be a list of {num_layers}, one for each layer, {given}")
    if unknown := [each for each in layer_types if each not in LAYER_TYPES]:
        raise ValueError(
            f"config.json: layer_types {unknown[0]!r:.80} is not supported; known: {', '.join(LAYER_TYPES)}"
        )
    return layer_types
