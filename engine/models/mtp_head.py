"""The head that a checkpoint brings along to guess the model's next tokens: DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024 (arXiv 2412.19437), section 2.2, multi-token prediction (MTP); GLM's are the same.

    the model's last hidden states, normed as for logits, are the features
    token t and the feature of the token before t ──norms, eh_proj──> one more layer of the model ──norm──> h
    h ──the model's lm_head──> logits of the token after t; h is also the feature of t, if t is a guess

A feature is normed twice: by the model's last norm (that of a guess by the head's last), and by the head's norm of
features. So do the code that comes with DeepSeek's checkpoints, transformers (`MtpModel`), SGLang, and vLLM since its
pull request 45895.

Its keys and values are one more layer of the model's pool, as those of an EAGLE-3 head are (eagle_head.py). The first
token of a sequence has no feature, which counts as zeros.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.attention import PagedBackend
from engine.layers import Linear, RotaryEmbedding
from engine.model_loader.weights import Weights
from engine.models.decoder import HEAD, Decoder, make_layer
from engine.models.experts import ExpertsFeedForward
from engine.models.layer import OnLayer
from engine.models.mtp_config import MtpConfig
from engine.models.parts import Parts, PartsFactory

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters
    from engine.models.recurrent_states import RecurrentStates


class MtpHead:
    """A `DraftHead`. Raises `ValueError` at construction if the weights do not fit the config."""

    def __init__(
        self,
        config: MtpConfig,
        weights: Weights,
        backend: PagedBackend[Any],
        parts: Parts,
        *,
        model: Decoder,
        max_model_len: int,
        max_rows: int,
    ) -> None:
        """`weights`: the model's, whole. `model`: whose embedding, last norm and logits the head shares. `max_rows`:
        the most rows of `forward`."""
        decoder, factory = config.layer, PartsFactory(weights, parts, config.layer.rms_norm_eps)
        D, name = decoder.hidden_size, f"model.layers.{config.number}"
        self._rotary = RotaryEmbedding(decoder.rope, decoder.rotary_dim, max_model_len, weights.dtype, weights.device)
        self._embedding_VD = _embedding(f"{name}.embed_tokens.weight", weights, model)
        self._norm_of_model = model.norm
        self._token_norm = factory.rms_norm(f"{name}.enorm", D)
        self._feature_norm = factory.rms_norm(f"{name}.hnorm", D)
        self._joined = factory.linear({f"{name}.eh_proj": D}, 2 * D, has_bias=False)
        self._layer = make_layer(decoder, config.number, factory, backend)
        self._stack = parts.stack([self._layer])
        self._norm = factory.rms_norm(f"{name}.shared_head.norm", D)
        self._lm_head = _lm_head(f"{name}.shared_head.head.weight", weights, parts, model)
        weights.ignore("rotary_emb.inv_freq")
        weights.check_layer_taken(config.number)
        self.features_TD = torch.zeros(max_rows, D, dtype=weights.dtype, device=weights.device)
        self.outputs_TD = torch.zeros_like(self.features_TD)
        self.adapters: Adapters | None = None
        self.states: RecurrentStates | None = None
        feed_forward = self._layer.feed_forward
        self.reads_back = isinstance(feed_forward, ExpertsFeedForward) and feed_forward.reads_back

    def fused(self, features_TF: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fused`: the norm of one hidden state, [T, D]."""
        return self._norm_of_model(features_TF)

    def read(
        self, token_ids: torch.Tensor, positions: torch.Tensor, features_TD: torch.Tensor, plan: Any, kv: torch.Tensor
    ) -> None:
        """See `DraftHead.read`."""
        h_TD = self._layer.input_norm(self._inputs(token_ids, features_TD))
        self._layer.attention.write(h_TD, kv, plan, self._rotary.select(positions))

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
        x_TD = self._inputs(token_ids, self.features_TD[:num_tokens])
        x_TD = self._stack(x_TD, kv_pool, plan, self._rotary.select(positions), on_layer, None)
        h_TD = self._norm(x_TD)
        self.outputs_TD[:num_tokens].copy_(h_TD)
        return h_TD

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self._lm_head(x_TD)

    def _inputs(self, token_ids: torch.Tensor, features_TD: torch.Tensor) -> torch.Tensor:
        """[T, D]: what the layer reads."""
        normed = self._token_norm(self._embedding_VD[token_ids]), self._feature_norm(features_TD)
        return self._joined(torch.cat(normed, dim=-1))


def _embedding(name: str, weights: Weights, model: Decoder) -> torch.Tensor:
    """The model's: checkpoints store it once more. Another one, if it differs."""
    if not weights.has(name):
        return model.embedding_VD
    own_VD = weights.take(name, tuple(model.embedding_VD.shape))
    return model.embedding_VD if torch.equal(own_VD, model.embedding_VD) else own_VD


def _lm_head(name: str, weights: Weights, parts: Parts, model: Decoder) -> Linear:
    """The same for the product of logits."""
    if not weights.has(name):
        return model.lm_head
    shape = tuple(model.embedding_VD.shape)
    own_VD = weights.take(name, shape)
    models_VD = weights.take(HEAD, shape) if weights.has(HEAD) else model.embedding_VD
    return model.lm_head if torch.equal(own_VD, models_VD) else parts.lm_head(own_VD)
