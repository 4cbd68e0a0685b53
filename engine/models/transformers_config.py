"""What the engine must know about a model that transformers' own code computes. No torch.

For architectures that our own decoder does not cover. The fields of config.json mean something else in every family, so
this does not rely on them: it observes transformers' code in a step (engine/models/transformers_probe.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from engine.models.model_shape import ModelShape
from engine.models.scores import AttentionModule
from engine.models.split import Split

NOT_OF_THE_COMPUTATION = frozenset({
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Fields of config.json that do not change KV, or that are in the compatibility digest anyway."""
ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotations that depend on the largest position of a step: beyond the original training length, a request's result
would depend on its batch."""


PARTS_VERSION = 3
"""Must be increased with every change that alters the bits of what we compute in place of transformers' code."""
MOST_POSITIONS = 1 << 20
"""The most positions for which masks are examined."""
POSITIONS_WITHOUT_BOUND = 2048
"""The same, for models that do not say how many positions they have."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelShape):
    """`attention` is in the order in which the modules are called, `recurrent_layers` in that of the model's layers."""

    attention: tuple[AttentionModule, ...]
    pool_layers: tuple[int, ...] = ()
    """For each of `attention`, the layer of the pool that it attends to; the first that does writes it. Empty: each has
    its own."""
    num_expert_tensors: int
    """Number of weights that hold one product of all experts."""
    num_fixed_expert_tensors: int
    """Of these, those of experts that only transformers' code can compute (engine/models/replaced_experts.py)."""
    expert_sizes: tuple[tuple[int, int], ...]
    """(hidden, intermediate) of the other experts, without repetitions."""
    products: tuple[tuple[int, int], ...]
    """(outputs, inputs) of the layers' products, without repetitions."""
    adaptable: tuple[str, ...]
    """Names of the products that adapters may change: each multiplies the tokens of a step, all of them in their order.
    """
    siblings: tuple[tuple[str, ...], ...]
    """Names of products that are given the very same input, one after the other."""
    splits: tuple[Split, ...]
    """How several ranks share the model; empty: they cannot."""
    body: str
    """Name of the module that computes hidden states from tokens; the rest of the causal language model computes logits
    from them."""
    computation: str
    """Digest of the rest of config.json, of transformers' version, and of ours."""

    @property
    def num_decoder_layers(self) -> int:
        """Right where no layer keeps a state."""
        return len(self.attention)

    @property
    def has_experts(self) -> bool:
        return self.num_expert_tensors > 0

    @property
    def has_soft_cap(self) -> bool:
        return any(module.scores.soft_cap for module in self.attention)

    @property
    def has_sinks(self) -> bool:
        return any(module.has_sinks for module in self.attention)

    @property
    def model_impl(self) -> str:
        return "transformers"

    @staticmethod
    def from_hf(hf_config: dict[str, Any]) -> TransformersConfig:
        """Raises `ValueError` if transformers does not know the architecture, or computes it in a way that this engine
        cannot serve."""
        import transformers

        from engine.models.transformers_probe import causal_lm_config, watch_a_step

        config = causal_lm_config(hf_config)
        _check_positions(config)
        _check_per_layer_inputs(config)
        _check_cap_of_logits(config)
        max_positions, why_no_more = _max_positions(config)
        step = watch_a_step(config, max_positions)
        fields = {k: v for k, v in config.to_dict().items() if k not in NOT_OF_THE_COMPUTATION}
        meaning = json.dumps([transformers.__version__, PARTS_VERSION, fields], sort_keys=True, default=str)
        return TransformersConfig(
            vocab_size=step.vocab_size,
            hidden_size=step.hidden_size,
            num_layers=max(step.pool_layers, default=len(step.attention) - 1) + 1,
            pool_layers=step.pool_layers,
            num_heads=step.heads.num_heads,
            num_kv_heads=step.heads.num_kv_heads,
            head_dim=step.heads.head_dim,
            head_shapes=step.head_shapes,
            max_positions=max_positions,
            attention=step.attention,
            recurrent_layers=step.recurrent_layers,
            num_expert_tensors=step.num_expert_tensors,
            num_fixed_expert_tensors=step.num_fixed_expert_tensors,
            expert_sizes=step.expert_sizes,
            products=step.products,
            adaptable=step.adaptable,
            siblings=step.siblings,
            splits=step.splits,
            body=step.body,
            why_no_more_positions=why_no_more,
            computation=hashlib.blake2b(meaning.encode(), digest_size=16).hexdigest(),
        )


def _check_positions(config: Any) -> None:
    """Raise `ValueError` if config.json does not give the number of positions. A reason why such a model cannot be
    served anyway takes precedence."""
    from engine.models.transformers_probe import watch_a_step

    if hasattr(config, "text_config"):
        raise ValueError("config.json: text_config: models of more than text are not supported")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and most >= 1:
        return
    if most is None:
        # Models without this field usually cannot be served for other reasons; report those first.
        watch_a_step(config, POSITIONS_WITHOUT_BOUND)
    raise ValueError(f"config.json: max_position_embeddings must be an integer of at least 1, is {most!r}")


def _check_per_layer_inputs(config: Any) -> None:
    """Raise `ValueError` if Gemma 4 would look up tokens in a second table of embeddings that lacks them. (Gemma 3n
    takes the first row for these.)"""
    if config.model_type != "gemma4_text" or not config.hidden_size_per_layer_input:
        return
    if config.vocab_size_per_layer_input < config.vocab_size:
        raise ValueError(
            f"config.json: vocab_size_per_layer_input must be at least vocab_size={config.vocab_size}, is "
            f"{config.vocab_size_per_layer_input}: transformers' code looks up every token there"
        )


def _check_cap_of_logits(config: Any) -> None:
    """Raise `ValueError` for a cap that would turn all logits into NaN, which a step without numbers does not show."""
    cap = getattr(config, "final_logit_softcapping", None)
    if isinstance(cap, (int, float)) and not 0 < cap < math.inf:
        raise ValueError(
            f"config.json: final_logit_softcapping must be null or a finite number more than 0, is {cap}: "
            "transformers' code divides logits by it"
        )


def _max_positions(config: Any) -> tuple[int, str]:
    """Return the most positions for which a sequence's result does not depend on its batch, and why not more, if
    config.json allows more."""
    most: int = config.max_position_embeddings
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        if kind in ROPE_TYPES_BY_LENGTH and isinstance(original, int) and 0 < original < most:
            return original, f"beyond which rope_type {kind} would compute a request by the longest one beside it"
    if most > MOST_POSITIONS:
        return MOST_POSITIONS, "as far as is looked for windows"
    return most, ""


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """The rope parameters: one set, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [each for each in parameters.values() if isinstance(each, dict)]
