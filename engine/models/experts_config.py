"""Configuration of mixtures of experts, read from config.json, where each family has its own fields. No torch.

DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.2; "DeepSeek-V3 Technical Report", 2024
(arXiv 2412.19437), section 2.1.2. Fields and their defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.models.hf_fields import flag, integer, number, one_of

EXPERT_GRAIN = 8
"""Must divide the hidden size: `torch.nn.functional.grouped_mm` requires rows of whole 16 bytes."""
GROUPED_MAJORS = (9, 10)
"""Major compute capabilities for which torch has one kernel for all experts, in bfloat16. Elsewhere it loops over the
experts and reads their sizes back."""


def reads_groups_back(dtype: str, capability: tuple[int, int] | None) -> bool:
    """Whether `grouped_mm` waits for a GPU of this compute capability."""
    return not (dtype == "bfloat16" and capability is not None and capability[0] in GROUPED_MAJORS)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward, from some layer on."""

    first_layer: int
    """Earlier layers are dense."""
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    """Experts that every token uses, computed as one feed-forward of this many times the size."""
    intermediate_size: int
    num_groups: int
    """Groups of equally many experts."""
    num_chosen_groups: int
    """All experts of a token come from this many groups."""
    scoring: str
    """"softmax": over all experts; a group's merit is its best expert. "sigmoid": each expert on its own, chosen with a
    bias that does not affect the weights; a group's merit is the sum of its best two experts (DeepSeek-V3)."""
    norms_weights: bool
    """A token's weights are normalised to sum up to 1 before `scaling`."""
    scaling: float = 1.0
    module: str = "mlp"
    """Name of the layer's module in a checkpoint. `products`: names of each expert's gate, up and down."""
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def qwen_experts(hf_config: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Qwen3-MoE's experts; None if no layer has experts. Raises `ValueError` naming the field."""
    dense = hf_config.get("mlp_only_layers") or []
    one_of(hf_config, "decoder_sparse_step", (1,))
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(f"config.json: mlp_only_layers must be the first layers, from 0 on, is {dense!r}")
    if len(dense) >= num_layers:
        return None
    # Published checkpoints have the first name; transformers writes the second.
    field = "num_experts" if hf_config.get("num_experts") is not None else "num_local_experts"
    return _without_groups(
        hf_config, field, "moe_intermediate_size", flag(hf_config, "norm_topk_prob"), first_layer=len(dense)
    )


def mixtral_experts(hf_config: dict[str, Any], num_layers: int) -> ExpertsConfig:
    """Mixtral's experts. Raises `ValueError` naming the field."""
    del num_layers
    experts = _without_groups(hf_config, "num_local_experts", "intermediate_size", norms_weights=True, first_layer=0)
    return replace(experts, module="block_sparse_moe", products=("w1", "w3", "w2"))


def _without_groups(
    hf_config: dict[str, Any], num_experts: str, intermediate_size: str, norms_weights: bool, first_layer: int
) -> ExpertsConfig:
    """Experts without groups, with softmax scores. `num_experts`, `intermediate_size`: names of fields."""
    _check_hidden_size(hf_config)
    total, per_token = integer(hf_config, num_experts), integer(hf_config, "num_experts_per_tok")
    if per_token > total:
        raise ValueError(f"config.json: num_experts_per_tok must be at most {num_experts}={total}, is {per_token}")
    return ExpertsConfig(
        first_layer=first_layer,
        num_experts=total,
        num_experts_per_token=per_token,
        num_shared_experts=0,
        intermediate_size=integer(hf_config, intermediate_size),
        num_groups=1,
        num_chosen_groups=1,
        scoring="softmax",
        norms_weights=norms_weights,
    )


def deepseek_experts(hf_config: dict[str, Any], num_layers: int, scoring: str) -> ExpertsConfig | None:
    """DeepSeek's experts; None if no layer has experts. Raises `ValueError` naming the field."""
    first_layer = integer(hf_config, "first_k_dense_replace", least=0)
    if first_layer >= num_layers:
        return None
    one_of(hf_config, "scoring_func", (scoring,))
    one_of(hf_config, "moe_layer_freq", (1,))
    norms_weights = flag(hf_config, "norm_topk_prob")
    if scoring == "softmax" and norms_weights:
        # transformers ignores the field, the code that comes with the checkpoints does not.
        raise ValueError("config.json: norm_topk_prob is not supported with softmax scores")
    num_groups, num_chosen = _groups(hf_config, scoring)
    num_experts, per_token = integer(hf_config, "n_routed_experts"), integer(hf_config, "num_experts_per_tok")
    _check_groups(num_experts, per_token, num_groups, num_chosen, least=2 if scoring == "sigmoid" else 1)
    _check_hidden_size(hf_config)
    has_shared = hf_config.get("n_shared_experts") is not None
    return ExpertsConfig(
        first_layer=first_layer,
        num_experts=num_experts,
        num_experts_per_token=per_token,
        num_shared_experts=integer(hf_config, "n_shared_experts", least=0) if has_shared else 0,
        intermediate_size=integer(hf_config, "moe_intermediate_size"),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scoring=scoring,
        norms_weights=norms_weights,
        scaling=number(hf_config, "routed_scaling_factor"),
    )


def glm_lite_experts(hf_config: dict[str, Any], num_layers: int) -> ExpertsConfig | None:
    """GLM 4.7 Flash's experts, which are DeepSeek-V3's with another field for the dense layers. Raises `ValueError`
    naming the field."""
    default = ["dense", *["sparse"] * (num_layers - 1)]
    kinds = hf_config.get("mlp_layer_types") or default
    num_dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise ValueError(
            f'config.json: mlp_layer_types must have {num_layers} entries, first "dense" and then "sparse", '
            f"is {kinds!r:.200}"
        )
    one_of(hf_config, "first_k_dense_replace", (num_dense,))  # transformers does not read it
    return deepseek_experts(hf_config | {"first_k_dense_replace": num_dense}, num_layers, "sigmoid")


def _check_hidden_size(hf_config: dict[str, Any]) -> None:
    if integer(hf_config, "hidden_size") % EXPERT_GRAIN:
        raise ValueError(
            f"config.json: hidden_size must be a multiple of {EXPERT_GRAIN} where there are experts, "
            f"is {hf_config['hidden_size']}"
        )


def _groups(hf_config: dict[str, Any], scoring: str) -> tuple[int, int]:
    """(groups, how many of them are chosen)"""
    if scoring == "sigmoid":
        one_of(hf_config, "topk_method", ("noaux_tc",))
    elif one_of(hf_config, "topk_method", ("greedy", "group_limited_greedy")) == "greedy":
        return 1, 1
    return integer(hf_config, "n_group"), integer(hf_config, "topk_group")


def _check_groups(num_experts: int, per_token: int, num_groups: int, num_chosen: int, least: int) -> None:
    """`least`: minimum number of experts in a group."""
    if num_experts % num_groups or num_experts // num_groups < least:
        raise ValueError(
            f"config.json: n_routed_experts={num_experts} must be a multiple of n_group={num_groups}, "
            f"and a group must have at least {least}"
        )
    if num_chosen > num_groups:
        raise ValueError(f"config.json: topk_group must be at most n_group={num_groups}, is {num_chosen}")
    most = num_experts // num_groups * num_chosen
    if per_token > most:
        raise ValueError(
            f"config.json: num_experts_per_tok must be at most {most}, the experts of topk_group={num_chosen} groups, "
            f"is {per_token}"
        )
