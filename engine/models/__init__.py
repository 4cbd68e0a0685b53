"""Models: which architectures are known, and which implementation computes them (here).

model.py                  what the runner calls; model_shape.py: what the engine must know of any model
hf_fields.py              reads fields of config.json; stored_weights.py: how the checkpoint stores its weights

decoder.py                our own decoder, as decoder_config.py and rope_config.py read it from config.json
layer.py, parts.py        a layer, a stack of them; the classes that they are made of
head_attention.py         attention to keys and values: scores.py, head_shape.py
latent_attention.py       attention to latents: deepseek_config.py
feed_forward.py           dense
experts.py                a few of many: experts_config.py, expert_choice.py, chosen_experts.py, expert_products.py

draft_head.py             what guesses from a model's hidden states: an EAGLE-3 head (eagle_head.py, eagle_config.py),
                          or the head of its own checkpoint (mtp_head.py, mtp_config.py)

transformers_model.py     transformers' code over our attention, as transformers_config.py describes it, which
                          transformers_probe.py, mask_probe.py and product_probe.py find out;
                          transformers_attention.py: that attention, which also rotates (rotation_probe.py: where;
                          rotations.py: how); transformers_head.py: from hidden states to logits
transformers_products.py  our products in place of its linear layers (product_modules.py); gated_modules.py: which
                          have a gate
replaced_experts.py       our products in place of its experts; in MXFP4: transformers_experts.py,
                          four_bit_experts.py
split.py, share.py        how several ranks share such a model; expert_parts.py: its experts
replaced_norms.py         our norms in place of its RMS norms
recurrent_layers.py       our modules in place of its layers that keep a state (delta_net.py, mamba2.py,
                          short_convolution.py), which recurrent_probe.py finds
recurrent_states.py       these states; recurrent_shape.py: their sizes
recurrent_ops.py          what such layers compute; recurrent_reference.py: in plain torch
"""

from __future__ import annotations

from typing import Any

from engine.models.decoder_config import ARCHITECTURES, DecoderConfig
from engine.models.model_shape import ModelShape

__all__ = [
    "ARCHITECTURES",
    "DecoderConfig",
    "ModelShape",
    "is_for_our_decoder",
    "load_decoder_config",
    "load_model_shape",
]


def load_model_shape(hf_config: dict[str, Any], model_impl: str) -> ModelShape:
    """Read what the engine must know about a model from its Hugging Face config.json. `model_impl`: see `EngineArgs`.

    Raises `ValueError` that says what cannot be served.
    """
    names = _architectures(hf_config)
    if not names:
        _check_architecture_of(hf_config.get("model_type"))
    if is_for_our_decoder(hf_config, model_impl):
        return load_decoder_config(hf_config)
    from engine.models.transformers_config import TransformersConfig  # imports transformers, a second

    try:
        return TransformersConfig.from_hf(hf_config)
    except ValueError as error:
        if not any(name in ARCHITECTURES for name in names):
            raise
        raise ValueError(f"{error}; give model_impl auto: our own decoder computes it") from error


def is_for_our_decoder(hf_config: dict[str, Any], model_impl: str) -> bool:
    """Whether our own decoder is to compute the model, rather than transformers' code."""
    is_known = any(name in ARCHITECTURES for name in _architectures(hf_config))
    return model_impl == "tandem" or (model_impl == "auto" and is_known)


def _architectures(hf_config: dict[str, Any]) -> list[str]:
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of names, is {names!r}")
    return names


def _check_architecture_of(model_type: Any) -> None:
    """Raise `ValueError` that says what config.json must name, if its `model_type` is known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if name is not None:
        raise ValueError(
            f"config.json: architectures must name what the model is, and is missing or empty; "
            f'for model_type {model_type!r} put in "architectures": ["{name}"]'
        )


def load_decoder_config(hf_config: dict[str, Any]) -> DecoderConfig:
    """Read a Hugging Face config.json into its canonical form.

    Raises `ValueError` that lists the known architectures, or names the field that is missing or unsupported.
    """
    names = hf_config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise ValueError(
            f"config.json: architecture {', '.join(names) or '(none given)'} is not supported; "
            f"known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return DecoderConfig.from_hf(known[0], hf_config)
