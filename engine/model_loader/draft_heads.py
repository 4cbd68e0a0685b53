"""Loads the head that guesses for a model, of whichever kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.attention import AttentionBackend, PagedBackend
from engine.config import EngineConfig
from engine.model_loader.eagle_weights import load_eagle_head
from engine.models.draft_head import DraftHead
from engine.models.eagle_config import EagleConfig
from engine.models.layer import Features
from engine.models.model import FeatureSource

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup


def load_head(
    config: EngineConfig,
    model: FeatureSource,
    head_config: EagleConfig,
    backend: PagedBackend[Any],
    max_tokens: int,
    group: RankGroup | None,
) -> tuple[DraftHead, Features]:
    """Load the head that `config` and `head_config` describe, and let `model` note the hidden states that it reads.
    `max_tokens`: the most tokens of a step of the model. `group`: load this rank's share only. Raises `ValueError` if
    the head's weights do not fit."""
    assert isinstance(backend, AttentionBackend)
    head = load_eagle_head(config, model, head_config, backend, group)
    layers = head_config.feature_layers
    num_features = len(layers) * head_config.feature_size
    features = Features(layers, model.embedding_VD.new_zeros(max_tokens, num_features))
    model.let_note(features)
    return head, features
