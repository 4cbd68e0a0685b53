"""A head that guesses a model's next tokens from the model's own hidden states. After Y. Li et al., EAGLE-3: Scaling up
inference acceleration of large language models via training-time test (2025), without trees.

    the model's hidden states before three layers ──fc──> a feature of each token
    token t and the feature of the token before t ──one decoder layer──> hidden state ──> logits of the token after t
                                                                             └─> the feature of t, if t is a guess

Its keys and values are one more layer of the model's pool: at each token's slot, those of the token with the
feature of the token before it. So a block holds nothing of what comes after its own tokens, and may be shared. (The
authors' code stores the same keys and values one slot earlier. Attention sees differences of positions, so all that
differs is the first token, which has no feature; it counts as zeros.)

Shapes: T tokens, D hidden, F features: several hidden states of the model, V the model's vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.attention import AttentionBackend
from engine.layers import RotaryEmbedding
from engine.model_loader.weights import Weights
from engine.models.eagle_config import EagleConfig
from engine.models.feed_forward import GatedFeedForward
from engine.models.head_attention import HeadAttention
from engine.models.layer import OnLayer
from engine.models.parts import Parts, PartsFactory

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters
    from engine.models.recurrent_states import RecurrentStates

LAYER = "model.layers.0"


class EagleHead:
    """A `DraftHead`. Raises `ValueError` at construction if the weights do not fit the config."""

    def __init__(
        self,
        config: EagleConfig,
        weights: Weights,
        backend: AttentionBackend[Any],
        parts: Parts,
        *,
        embedding_VD: torch.Tensor,
        max_model_len: int,
        max_rows: int,
    ) -> None:
        """`embedding_VD`: the model's, unless the head has its own. `max_rows`: the most rows of `forward`."""
        layer, factory = config.layer, PartsFactory(weights, parts, config.layer.rms_norm_eps)
        D, V, num_features = layer.hidden_size, layer.vocab_size, len(config.feature_layers)
        self._config = config
        self._rotary = RotaryEmbedding(layer.rope, layer.rotary_dim, max_model_len, weights.dtype, weights.device)
        self._embedding_VD = _embedding(config, weights, embedding_VD)
        F = num_features * config.feature_size
        self._feature_norms = []
        if config.norm_before_fc:
            self._feature_norms = [factory.rms_norm("input_norm", F)]
        if config.fc_norm:
            self._feature_norms = [factory.rms_norm(f"fc_norm.{i}", config.feature_size) for i in range(num_features)]
        self._fc = factory.linear({"fc": D}, F, has_bias=False)
        self._token_norm = factory.rms_norm(f"{LAYER}.input_layernorm", D)
        self._feature_norm = factory.rms_norm(f"{LAYER}.hidden_norm", D)
        self._attention = HeadAttention(layer, 0, factory, backend, num_inputs=2 * D)
        self._post_attention_norm = factory.rms_norm(f"{LAYER}.post_attention_layernorm", D)
        self._feed_forward = GatedFeedForward(factory, f"{LAYER}.mlp", D, layer.intermediate_size, layer.has_mlp_bias)
        self._norm = factory.rms_norm("norm", D)
        self._lm_head = parts.lm_head(weights.take("lm_head.weight", (config.draft_vocab_size, D)))
        self._draft_ids = _draft_ids(weights, config.draft_vocab_size, V)
        weights.ignore("t2d")
        weights.check_all_taken()
        self.features_TD = torch.zeros(max_rows, D, dtype=weights.dtype, device=weights.device)
        self.outputs_TD = torch.zeros_like(self.features_TD)
        self.adapters: Adapters | None = None
        self.states: RecurrentStates | None = None
        self.reads_back = False

    def fused(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fused`."""
        norms = self._feature_norms
        if norms:
            chunks = features_TF.chunk(len(norms), dim=-1)
            features_TF = torch.cat([norm(x.contiguous()) for norm, x in zip(norms, chunks, strict=True)], dim=-1)
        return self._fc(features_TF)

    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, features_TD: torch.Tensor, plan: Any, kv: torch.Tensor
    ) -> None:
        """See `DraftHead.read`."""
        _, h_TX = self._inputs(token_ids, features_TD)
        self._attention.write(h_TX, kv, plan, self._rotary.select(positions))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """See `Model.forward`. Reads `features_TD`, and leaves what the tokens' own features are, if they are
        guesses."""
        num_tokens = len(token_ids)
        x_TD, h_TX = self._inputs(token_ids, self.features_TD[:num_tokens])
        attended_TD = self._attention(h_TX, kv_pool[0], plan, self._rotary.select(positions))
        x_TD, h_TD = self._post_attention_norm.add(x_TD, attended_TD)
        x_TD = x_TD + self._feed_forward(h_TD)
        self.outputs_TD[:num_tokens].copy_(self._norm(x_TD) if self._config.norm_output else x_TD)
        return x_TD

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`. Tokens that the head does not know are never guessed."""
        logits = self._lm_head(self._norm(x_TD))
        if self._draft_ids is None:
            return logits
        logits_TV = logits.new_full((len(logits), self._config.layer.vocab_size), float("-inf"))
        return logits_TV.index_copy_(1, self._draft_ids, logits)

    def _inputs(self, token_ids: torch.Tensor, features_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's residual, [T, D], and what its attention reads, [T, 2 * D]: token and feature."""
        normed_TD = self._feature_norm(features_TD)
        h_TX = torch.cat((self._token_norm(self._embedding_VD[token_ids]), normed_TD), dim=-1)
        return normed_TD if self._config.norm_before_residual else features_TD, h_TX


def _embedding(config: EagleConfig, weights: Weights, embedding_VD: torch.Tensor) -> torch.Tensor:
    name, shape = "model.embed_tokens.weight", (config.layer.vocab_size, config.layer.hidden_size)
    if weights.has(name):
        return weights.take(name, shape)
    if tuple(embedding_VD.shape) != shape:
        raise ValueError(
            f"the head is for models with a hidden_size of {shape[1]}, and the model's is {embedding_VD.shape[1]} (it "
            f"has no {name} of its own)"
        )
    return embedding_VD


def _draft_ids(weights: Weights, draft_vocab_size: int, vocab_size: int) -> torch.Tensor | None:
    """The model's id of each token that the head can guess; None if it can guess all, with equal ids."""
    if not weights.has("d2t"):
        ids = torch.arange(draft_vocab_size, device=weights.device)
        return None if draft_vocab_size == vocab_size else ids
    ids = weights.take_integers("d2t", (draft_vocab_size,)) + torch.arange(draft_vocab_size, device=weights.device)
    if len(set(ids.tolist())) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"d2t must give each of {draft_vocab_size} tokens a different id in [0, {vocab_size})")
    return ids
