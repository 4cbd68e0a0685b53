"""Loads the head that guesses for a model, of whichever kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.attention import AttentionBackend, PagedBackend
from engine.config import EngineConfig, HeadConfig
from engine.model_loader.eagle_weights import load_eagle_head
from engine.model_loader.loading import parts_of, weights_of
from engine.models.decoder import Decoder
from engine.models.draft_head import DraftHead
from engine.models.layer import Features
from engine.models.model import FeatureSource
from engine.models.mtp_config import MtpConfig
from engine.models.mtp_head import MtpHead

if TYPE_CHECKING:
    from engine.tensor_parallel.group import RankGroup


def load_head(
    config: EngineConfig,
    model: FeatureSource,
    head_config: HeadConfig,
    backend: PagedBackend[Any],
    max_tokens: int,
    group: RankGroup | None,
) -> tuple[DraftHead, Features]:
    """Load the head that `config` and `head_config` describe, and let `model` note the hidden states that it reads.
    `max_tokens`: the most tokens of a step of the model. `group`: load this rank's share only. Raises `ValueError` if
    the head's weights do not fit."""
    head: DraftHead
    if isinstance(head_config, MtpConfig):
        assert isinstance(model, Decoder)
        head = _load_mtp_head(config, model, head_config, backend, group)
    else:
        assert isinstance(backend, AttentionBackend)
        head = load_eagle_head(config, model, head_config, backend, group)
    layers = head_config.feature_layers
    num_features = len(layers) * head_config.feature_size
    features = Features(layers, model.embedding_VD.new_zeros(max_tokens, num_features))
    model.let_note(features)
    return head, features


def _load_mtp_head(
    config: EngineConfig, model: Decoder, mtp: MtpConfig, backend: PagedBackend[Any], group: RankGroup | None
) -> MtpHead:
    """The head's tensors are in the model's checkpoint."""
    weights, parts = weights_of(config, config.device.device), parts_of(config, config.model.quantization)
    if group is not None:
        from engine.tensor_parallel.sharing import shared_out

        layer, weights, parts = shared_out(mtp.layer, weights, parts, group)
        mtp = MtpConfig(layer=layer)
    return MtpHead(
        mtp,
        weights,
        backend,
        parts,
        model=model,
        max_model_len=config.model.max_model_len,
        max_rows=config.scheduler.max_num_batched_tokens,
    )
