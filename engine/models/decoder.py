"""A whole decoder, as `DecoderConfig` describes it: embedding, layers, logits.

Owns the weights, in the shapes that it computes with (q, k, v fused; gate and up fused). Knows neither sequences nor
blocks: tokens are flattened, and the backend does attention.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention import AttentionBackend, LatentBackend, PagedBackend
from engine.layers import RotaryEmbedding
from engine.model_loader.weights import Weights
from engine.models.decoder_config import DecoderConfig
from engine.models.experts import ExpertsFeedForward
from engine.models.feed_forward import GatedFeedForward
from engine.models.head_attention import HeadAttention
from engine.models.latent_attention import LatentAttention
from engine.models.layer import Attention, DecoderLayer, Features, FeedForward, OnLayer
from engine.models.parts import Parts, PartsFactory
from engine.models.recurrent_states import RecurrentStates

HEAD = "lm_head.weight"


class Decoder:
    """A whole model. Raises `ValueError` at construction if the weights do not fit the config."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        backend: PagedBackend[Any],
        max_model_len: int,
        parts: Parts,
    ) -> None:
        self._rotary = RotaryEmbedding(config.rope, config.rotary_dim, max_model_len, weights.dtype, weights.device)
        self.embedding_VD = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        factory = PartsFactory(weights, parts, config.rms_norm_eps)
        layers = [make_layer(config, i, factory, backend) for i in range(config.num_layers)]
        experts = [each.feed_forward for each in layers if isinstance(each.feed_forward, ExpertsFeedForward)]
        self.reads_back = any(each.reads_back for each in experts)
        self._layers = parts.stack(layers)
        self.norm = parts.rms_norm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self.lm_head = parts.lm_head(self._head_weight(config, weights))
        self._features: Features | None = None
        weights.ignore("rotary_emb.inv_freq")
        for further in range(config.num_nextn_predict_layers):
            weights.ignore_layer(config.num_layers + further)
        weights.check_all_taken()
        self.states: RecurrentStates | None = None
        self.adapters = parts.adapters
        if parts.adapters is not None:
            parts.adapters.check_all_taken()

    def _head_weight(self, config: DecoderConfig, weights: Weights) -> torch.Tensor:
        """The embedding, if the configuration ties them, unless the files have a different `lm_head`: as in
        transformers."""
        if config.ties_embeddings and not weights.has(HEAD):
            return self.embedding_VD
        own = weights.take(HEAD, (config.vocab_size, config.hidden_size))
        return self.embedding_VD if config.ties_embeddings and torch.equal(own, self.embedding_VD) else own

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """See `Model.forward`: the last hidden states, before the final norm."""
        cos_sin = self._rotary.select(positions)
        return self._layers(self.embedding_VD[token_ids], kv_pool, plan, cos_sin, on_layer, self._features)

    def let_note(self, features: Features) -> None:
        """See `FeatureSource`."""
        self._features = features

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self.lm_head(self.norm(x_TD))


def make_layer(config: DecoderConfig, layer: int, factory: PartsFactory, backend: PagedBackend[Any]) -> DecoderLayer:
    D, name = config.hidden_size, f"model.layers.{layer}"
    attention: Attention
    if config.mla is not None:
        assert isinstance(backend, LatentBackend)
        attention = LatentAttention(config, config.mla, layer, factory, backend)
    else:
        assert isinstance(backend, AttentionBackend)
        attention = HeadAttention(config, layer, factory, backend)
    feed_forward: FeedForward
    if config.moe is not None and layer >= config.moe.first_layer:
        feed_forward = ExpertsFeedForward(config.moe, factory, f"{name}.{config.moe.module}", D, config.has_mlp_bias)
    else:
        feed_forward = GatedFeedForward(factory, f"{name}.mlp", D, config.intermediate_size, config.has_mlp_bias)
    return DecoderLayer(
        factory.rms_norm(f"{name}.input_layernorm", D),
        attention,
        factory.rms_norm(f"{name}.post_attention_layernorm", D),
        feed_forward,
    )
