"""The configuration of an EAGLE-3 head, read from its config.json. Integers only, no torch.

    config.json, in one of the forms in use ──as_llama──> that of a Llama of one layer, with the head's own fields
                                            ──EagleConfig.from_hf──> how the head is computed

Forms: `LlamaForCausalLMEagle3` (the authors', SGLang's, SpecForge's), `Eagle3LlamaForCausalLM` (vLLM's),
`Eagle3Speculator` and `Eagle3DraftModel` (speculators', with the layer's fields in `transformer_layer_config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.models.decoder_config import DecoderConfig
from engine.models.hf_fields import flag, integer, section

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields that say what else is normed; EAGLE 3.1's have the last two."""
LLAMA = "LlamaForCausalLM"
NOT_THE_LAYERS = ("transformer_layer_config", "eagle_config", "quantization_config")
"""A `quantization_config` is the model's, copied: heads are read in plain dtypes only."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    layer: DecoderConfig
    """Of a decoder of one layer: the head's."""
    draft_vocab_size: int
    """Tokens that the head can guess."""
    feature_layers: tuple[int, ...]
    """The head reads the model's hidden states before these layers; the number of all layers stands for after the
    last."""
    feature_size: int
    """Numbers of one of these hidden states."""
    norm_before_residual: bool
    """The layer's residual is the normed feature."""
    norm_before_fc: bool
    """All hidden states are normed together."""
    fc_norm: bool
    """Each hidden state is normed by itself."""
    norm_output: bool
    """What the next guess reads is normed as for logits."""

    @staticmethod
    def from_hf(hf_config: dict[str, Any], *, num_layers: int, feature_size: int) -> EagleConfig:
        """`hf_config`: from `as_llama`. `num_layers` and `feature_size`: the model's layers and hidden size. Raises
        `ValueError` naming the field that is missing, contradictory or unsupported."""
        layer = DecoderConfig.from_hf(LLAMA, hf_config)
        if layer.num_layers != 1:
            raise ValueError(f"config.json: num_hidden_layers must be 1 in an EAGLE-3 head, is {layer.num_layers}")
        norms = {name: flag(hf_config, name) for name in NORMS}
        if norms["norm_before_fc"] and norms["fc_norm"]:
            raise ValueError("config.json: norm_before_fc and fc_norm cannot both be true")
        return EagleConfig(
            layer=layer,
            draft_vocab_size=integer(
                hf_config, "draft_vocab_size", default=layer.vocab_size, most=layer.vocab_size
            ),
            feature_layers=_feature_layers(hf_config, num_layers),
            feature_size=feature_size,
            **norms,
        )  # fmt: skip


def as_llama(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Raises `ValueError` if it is not the config.json of an EAGLE-3 head that can be computed."""
    names = hf_config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json: architectures {names!r:.80} are not those of an EAGLE-3 head that can be computed; known "
            f"are {', '.join(ARCHITECTURES)}"
        )
    layer, eagle = section(hf_config, "transformer_layer_config"), section(hf_config, "eagle_config")
    if not flag(eagle, "use_aux_hidden_state", default=True):
        raise ValueError("config.json: use_aux_hidden_state must be true: an EAGLE-3 head reads several hidden states")
    if layer and layer.get("model_type") != "llama":
        raise ValueError(
            f"config.json: transformer_layer_config must be that of a llama, is {layer.get('model_type')!r:.80}"
        )
    own = {name: value for name, value in hf_config.items() if name not in NOT_THE_LAYERS}
    given = layer | own | {name: eagle[name] for name in NORMS if name in eagle}
    if not given.get(LAYER_IDS) and eagle.get(LAYER_IDS):
        # Those trained with SGLang count the layer after which a hidden state is taken, from 0.
        given[LAYER_IDS] = [each + 1 for each in _integers(eagle[LAYER_IDS])]
    return given | {"architectures": [LLAMA], "model_type": "llama"}


def _feature_layers(hf_config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """By default a low, a middle and a high layer, as where such heads are trained."""
    given = hf_config.get(LAYER_IDS)
    layers = _integers(given) if given else [2, num_layers // 2, num_layers - 3]
    if outside := [each for each in layers if not 0 <= each <= num_layers]:
        default = "" if given else " by default; give the field"
        raise ValueError(
            f"config.json: {LAYER_IDS} must be in [0, {num_layers}], the model's layers, has {outside[0]}{default}"
        )
    return tuple(layers)


def _integers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ValueError(f"config.json: {LAYER_IDS} must be a list of integers, is {value!r:.80}")
    return value
