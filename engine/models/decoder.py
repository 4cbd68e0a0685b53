"""The decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, as `DecoderConfig` describes them.

Owns the weights (in the shapes it computes with: q, k, v fused; gate and up fused). Knows neither sequences nor blocks:
tokens come flat, and attention is the backend's.

Shapes: T tokens, D hidden, F intermediate, N query heads, K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from engine.attention import AttentionBackend
from engine.layers import GatedLinear, HeadProjection, Linear, RMSNorm, RotaryEmbedding
from engine.model_loader.weights import Weights
from engine.models.decoder_config import DecoderConfig

OnLayer = Callable[[int], None]


class DecoderLayer:
    """Attention and feed-forward of one layer."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        weights: Weights,
        backend: AttentionBackend[Any],
        rotary: RotaryEmbedding,
        parts: Parts,
    ) -> None:
        self._backend = backend
        self.sliding_window = config.sliding_windows[layer]
        D, H, I = config.hidden_size, config.head_dim, config.intermediate_size  # noqa: E741
        q_size, kv_size = config.num_heads * H, config.num_kv_heads * H
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        norm = f"model.layers.{layer}"

        def weight_and_bias(
            name: str, outputs: int, inputs: int, has_bias: bool
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight = weights.take(f"{name}.weight", (outputs, inputs))
            return weight, weights.take(f"{name}.bias", (outputs,)) if has_bias else None

        def linear(outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
            pairs = [weight_and_bias(name, size, inputs, has_bias) for name, size in outputs.items()]
            biases = [bias for _, bias in pairs if bias is not None]
            return parts.linear(torch.cat([weight for weight, _ in pairs]), torch.cat(biases) if biases else None)

        def rms_norm(name: str, size: int) -> RMSNorm:
            return parts.rms_norm(weights.take(f"{name}.weight", (size,)), config.rms_norm_eps)

        qkv = {f"{at}.q_proj": q_size, f"{at}.k_proj": kv_size, f"{at}.v_proj": kv_size}
        self.qkv = linear(qkv, D, config.has_qkv_bias)
        self.output = linear({f"{at}.o_proj": D}, q_size, config.has_output_bias)
        gate, gate_bias = weight_and_bias(f"{mlp}.gate_proj", I, D, config.has_mlp_bias)
        up, up_bias = weight_and_bias(f"{mlp}.up_proj", I, D, config.has_mlp_bias)
        self.gated = parts.gated_linear(gate, up, gate_bias, up_bias)
        self.down = linear({f"{mlp}.down_proj": D}, I, config.has_mlp_bias)
        self.input_norm = rms_norm(f"{norm}.input_layernorm", D)
        self.post_attention_norm = rms_norm(f"{norm}.post_attention_layernorm", D)
        self.heads = HeadProjection(
            config.num_heads,
            config.num_kv_heads,
            H,
            rotary,
            q_norm=rms_norm(f"{at}.q_norm", H) if config.has_qk_norm else None,
            k_norm=rms_norm(f"{at}.k_norm", H) if config.has_qk_norm else None,
        )

    def __call__(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        kv: torch.Tensor,
        plan: Any,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the hidden state in two parts, whose sum is due: the next norm makes it on its way."""
        x_TD, h_TD = self.input_norm.add(x_TD, delta_TD)
        q_TNH = self._backend.project(self.qkv(h_TD), kv, plan, self.heads, cos_sin)
        attended = self._backend.attend(q_TNH, kv, plan, self.sliding_window)
        x_TD, h_TD = self.post_attention_norm.add(x_TD, self.output(attended))
        return x_TD, self.down(self.gated(h_TD))


class LayerStack(Protocol):
    """All layers of a decoder."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: Any,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """The hidden state after the last layer: [T, D]. `x_TD` may be overwritten."""


class PlainLayers:
    """One layer after the other."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self._layers = layers

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: Any,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        delta_TD = None
        for i, layer in enumerate(self._layers):
            x_TD, delta_TD = layer(x_TD, delta_TD, kv_pool[i], plan, cos_sin)
            if on_layer is not None:
                on_layer(i)
        return x_TD if delta_TD is None else x_TD + delta_TD


@dataclass(frozen=True, slots=True)
class Parts:
    """What a decoder is made of: plain torch, or what computes the same faster on some device."""

    linear: type[Linear] = Linear
    gated_linear: Callable[..., GatedLinear] = GatedLinear
    """Called as `GatedLinear` is, without its last argument."""
    lm_head: type[Linear] = Linear
    rms_norm: type[RMSNorm] = RMSNorm
    stack: Callable[[list[DecoderLayer]], LayerStack] = PlainLayers
    """Makes of the layers what computes them one after the other."""

    def with_products(self, linear: type[Linear]) -> Parts:
        """The same parts, but for the products of layers: not that of the logits. Of parts whose `gated_linear` takes
        a `linear`."""
        return replace(self, linear=linear, gated_linear=partial(self.gated_linear, linear=linear))


PLAIN_PARTS = Parts()


class Decoder:
    """A whole model. Raises `ValueError` at construction where the weights do not fit the config."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        backend: AttentionBackend[Any],
        max_model_len: int,
        parts: Parts = PLAIN_PARTS,
    ) -> None:
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, weights.dtype, weights.device)
        self._embedding_VD = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        layers = range(config.num_layers)
        self._layers = parts.stack([DecoderLayer(config, i, weights, backend, self._rotary, parts) for i in layers])
        self._norm = parts.rms_norm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        if config.ties_embeddings:
            self._lm_head = parts.lm_head(self._embedding_VD)
            weights.ignore("lm_head.weight")
        else:
            self._lm_head = parts.lm_head(weights.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        weights.ignore("rotary_emb.inv_freq")
        weights.check_all_taken()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """The last hidden state of each token, before the final norm: [T, D].

        `on_layer(i)` is called when layer i's KV of this step is in the pool.
        """
        return self._layers(self._embedding_VD[token_ids], kv_pool, plan, self._rotary.select(positions), on_layer)

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, V], in the model's dtype or wider."""
        return self._lm_head(self._norm(x_TD))
