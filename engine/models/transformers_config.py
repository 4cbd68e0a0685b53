"""A model that transformers' own code computes: what the engine has to know of it. No torch.

For architectures that have no decoder of our own. Nothing here is believed of config.json, whose fields mean something
else in every family: all of it is seen while that code takes a step (engine/models/transformers_probe.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from engine.models.model_shape import ModelShape
from engine.models.scores import AttentionModule
from engine.models.stored_weights import is_mxfp4

NOT_OF_THE_COMPUTATION = frozenset({
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
"""Fields of config.json by which no KV differs, or which the compatibility digest has from elsewhere."""
ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")
"""Rotations that are chosen by the largest position of a step: beyond the length that a model was first trained for, a
request would be computed by what else is in its batch."""


MOST_POSITIONS = 1 << 20
"""That masks are looked at for."""
POSITIONS_WITHOUT_BOUND = 2048
"""The same, where nothing says how many there are."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelShape):
    """One layer of the pool for each of `attention`, in the order in which they are called."""

    attention: tuple[AttentionModule, ...]
    num_expert_tensors: int
    """Weights of several products at once, one for each expert."""
    body: str
    """Name of the module that makes hidden states of tokens; all else of the causal language model makes logits of
    them."""
    computation: str
    """Digest of the rest of config.json and of transformers' version."""

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
        """Raises `ValueError` where transformers does not know the architecture, or computes it in a way that this
        engine cannot serve."""
        import transformers

        from engine.models.transformers_probe import causal_lm_config, watch_a_step

        if (hf_config.get("quantization_config") or hf_config.get("compression_config")) and not is_mxfp4(hf_config):
            raise ValueError(
                "config.json: quantization_config, but for quant_method mxfp4, is supported in models of our own "
                f"decoders alone, and {hf_config.get('architectures')} is computed by transformers' code"
            )
        config = causal_lm_config(hf_config)
        _check_positions(config)
        max_positions, why_no_more = _max_positions(config)
        step = watch_a_step(config, max_positions)
        fields = {k: v for k, v in config.to_dict().items() if k not in NOT_OF_THE_COMPUTATION}
        meaning = json.dumps([transformers.__version__, fields], sort_keys=True, default=str)
        return TransformersConfig(
            vocab_size=step.vocab_size,
            hidden_size=step.hidden_size,
            num_layers=len(step.attention),
            num_heads=step.num_heads,
            num_kv_heads=step.num_kv_heads,
            head_dim=step.head_dim,
            max_positions=max_positions,
            attention=step.attention,
            num_expert_tensors=step.num_expert_tensors,
            body=step.body,
            why_no_more_positions=why_no_more,
            computation=hashlib.blake2b(meaning.encode(), digest_size=16).hexdigest(),
        )


def _check_positions(config: Any) -> None:
    """Raises `ValueError` where config.json does not say how many there are, or that for which it does not."""
    from engine.models.transformers_probe import watch_a_step

    if hasattr(config, "text_config"):
        raise ValueError("config.json: text_config: models of more than text are not supported")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and most >= 1:
        return
    if most is None:
        # Models that have no such field cannot be served for other reasons, as a rule; those come first.
        watch_a_step(config, POSITIONS_WITHOUT_BOUND)
    raise ValueError(f"config.json: max_position_embeddings must be an integer of at least 1, is {most!r}")


def _max_positions(config: Any) -> tuple[int, str]:
    """Of a sequence, as far as its tokens' numbers hang on nothing else; and why not more, if config.json allows it."""
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
    """One, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [parameters]
    return [each for each in parameters.values() if isinstance(each, dict)]
