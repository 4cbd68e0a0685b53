"""What config.json says of an EAGLE-3 head, in the forms in use, and what the head's tensors are called."""

from __future__ import annotations

from typing import Any

import pytest
from eagle_cases import HEAD, MODEL

from engine.model_loader.eagle_weights import own_name
from engine.models.eagle_config import LAYER_IDS, NORMS, EagleConfig, as_llama

LAYER = {name: value for name, value in MODEL.items() if name != "architectures"} | {
    "model_type": "llama", "num_hidden_layers": 1,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "model_type": "speculators", "speculators_model_type": "eagle3",
    "draft_vocab_size": 40, "norm_before_residual": True, "transformer_layer_config": LAYER,
}  # fmt: skip


def read(hf_config: dict[str, Any], *, num_layers: int = 32) -> EagleConfig:
    return EagleConfig.from_hf(as_llama(hf_config), num_layers=num_layers, feature_size=64)


def test_the_authors_form() -> None:
    config = read(HEAD)
    assert config.feature_layers == (2, 16, 29)
    assert (config.draft_vocab_size, config.layer.vocab_size, config.layer.num_layers) == (40, 60, 1)
    assert not any(getattr(config, name) for name in NORMS)
    assert read({**HEAD, "draft_vocab_size": None}).draft_vocab_size == 60


def test_the_form_of_speculators() -> None:
    """The layer's fields are apart."""
    config = read(SPECULATORS)
    assert config.layer == read(HEAD).layer
    assert config.norm_before_residual
    assert config.draft_vocab_size == 40
    assert read({**SPECULATORS, LAYER_IDS: [2, 16, 29]}).feature_layers == (2, 16, 29)


def test_layers_that_are_counted_from_0() -> None:
    """Heads trained with SGLang name, in `eagle_config`, the layers after which a hidden state is taken."""
    assert read({**HEAD, "eagle_config": {LAYER_IDS: [1, 15, 28]}}).feature_layers == (2, 16, 29)
    assert read({**HEAD, "eagle_config": {LAYER_IDS: []}}).feature_layers == (2, 16, 29)
    assert read({**HEAD, "eagle_config": {"norm_before_fc": True}}).norm_before_fc


@pytest.mark.parametrize(
    ("hf_config", "says"),
    [
        ({**HEAD, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, ".* known are LlamaForCausalLMEagle3"),
        ({**HEAD, "architectures": None}, "architectures None are not those of an EAGLE-3 head"),
        ({**HEAD, "num_hidden_layers": 2}, "num_hidden_layers must be 1 in an EAGLE-3 head, is 2"),
        ({**HEAD, "draft_vocab_size": 61}, "draft_vocab_size must be at most 60, is 61"),
        ({**HEAD, LAYER_IDS: [2, 33]}, r"must be in \[0, 32\], the model's layers, has 33$"),
        ({**HEAD, LAYER_IDS: "2"}, f"{LAYER_IDS} must be a list of integers, is '2'"),
        ({**HEAD, "fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm cannot both be true"),
        ({**HEAD, "norm_output": 1}, "norm_output must be true or false, is 1"),
        ({**HEAD, "eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state must be true"),
        (SPECULATORS | {"transformer_layer_config": {**LAYER, "model_type": "qwen3"}}, "that of a llama, is 'qwen3'"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_computed(hf_config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: .*{says}"):
        read(hf_config)


def test_a_model_with_too_few_layers_for_the_default() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 2\], the model's layers, has -1 by default; give the field"):
        read(HEAD, num_layers=2)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("midlayer.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.hidden_norm.weight", "model.layers.0.hidden_norm.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.fc_norm.1.weight", "fc_norm.1.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("d2t", "d2t"),
    ],
)
def test_names_of_tensors(stored: str, own: str) -> None:
    assert own_name(stored) == own
