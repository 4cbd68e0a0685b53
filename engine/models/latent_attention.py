"""Multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1 and appendix C.

A token's KV is one latent, from which products compute each head's key and value, and one rotated key for all heads.
For decoding sequences these products are absorbed: the key's product (`up_key`) is applied to a head's query instead,
and the value's product (`up_value`) to its output. So N query heads attend to one key of C + P numbers, of which the
first C are also the value. Long enough prompts attend to unfolded keys and values, which takes less arithmetic
(engine/attention/latent_forms.py). Only latents and rotated keys are stored.

With several ranks, each has some of the heads and all of the latents.

Shapes: T tokens, D hidden, N heads; C latent dim (kv_lora_rank), P rotated key dim, R = C + P; Q dim of a head's query
without positions, V dim of its value.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention import LatentBackend
from engine.layers import CosSin, LatentProjection
from engine.models.decoder_config import DecoderConfig
from engine.models.deepseek_config import LatentConfig
from engine.models.parts import PartsFactory, WeightAndBias

LATENT_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, regardless of `rms_norm_eps`: as in transformers and in the checkpoints' own code."""


class LatentAttention:
    """Products for q, latents and keys; the backend's attention; the output projection."""

    def __init__(
        self,
        config: DecoderConfig,
        mla: LatentConfig,
        layer: int,
        factory: PartsFactory,
        backend: LatentBackend[Any],
    ) -> None:
        self._backend, self.mla = backend, mla
        D, N = config.hidden_size, config.num_heads
        C, Q, P, V = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        at = f"model.layers.{layer}.self_attn"
        latent = factory.weight_and_bias(f"{at}.kv_a_proj_with_mqa", C + P, D, config.has_qkv_bias)
        down = [_rows_in_halves(latent, 1, mla)]
        if mla.q_lora_rank:
            down.insert(0, factory.weight_and_bias(f"{at}.q_a_proj", mla.q_lora_rank, D, config.has_qkv_bias))
        self.down = factory.fused(down)
        name, inputs = ("q_b_proj", mla.q_lora_rank) if mla.q_lora_rank else ("q_proj", D)
        query = factory.weight_and_bias(f"{at}.{name}", N * (Q + P), inputs, False)
        self.up_query = factory.fused([_rows_in_halves(query, N, mla)])
        self.query_norm = None
        if mla.q_lora_rank:
            self.query_norm = factory.rms_norm(f"{at}.q_a_layernorm", mla.q_lora_rank, LATENT_NORM_EPS)
        up, _ = factory.weight_and_bias(f"{at}.kv_b_proj", N * (Q + V), C, False)
        up_key, up_value = up.view(N, Q + V, C).split_with_sizes([Q, V], dim=1)
        self.heads = LatentProjection(
            factory.rms_norm(f"{at}.kv_a_layernorm", C, LATENT_NORM_EPS),
            factory.parts.head_products(up_key.contiguous()),
            factory.parts.head_products(up_value.transpose(1, 2).contiguous()),
        )
        self.output = factory.row_parallel_linear(f"{at}.o_proj", D, N * V, config.has_output_bias)

    def __call__(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> torch.Tensor:
        mla = self.mla
        query_latent, latent_TR = self._latents(h_TD)
        query = h_TD if self.query_norm is None else self.query_norm(query_latent)
        q_TX = self.up_query(query)
        o_TNV = self._backend.attend(q_TX, latent_TR, kv, plan, self.heads, cos_sin, mla.softmax_scale)
        return self.output(o_TNV.flatten(1))

    def write(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> None:
        """See `Attention.write`."""
        _, latent_TR = self._latents(h_TD)
        self._backend.write(latent_TR, kv, plan, self.heads, cos_sin)

    def _latents(self, h_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries' latent, [T, q_lora_rank], and [T, R]: latent and key."""
        query_latent, latent_TR = self.down(h_TD).split_with_sizes([self.mla.q_lora_rank, self.mla.latent_dim], dim=-1)
        return query_latent, latent_TR


def _rows_in_halves(product: WeightAndBias, num_heads: int, mla: LatentConfig) -> WeightAndBias:
    """Reorder each head's rotated outputs (its last ones) as `RotaryEmbedding` expects them: numbers of a pair are half
    the rotated part apart. Applied to queries and keys alike, so that their products do not change."""
    if not mla.interleaves_rope:
        return product

    def reordered(x: torch.Tensor) -> torch.Tensor:
        of_heads = x.view(num_heads, -1, *x.shape[1:])
        before, rotated = of_heads[:, : -mla.qk_rope_head_dim], of_heads[:, -mla.qk_rope_head_dim :]
        return torch.cat((before, rotated[:, 0::2], rotated[:, 1::2]), dim=1).view(x.shape)

    weight, bias = product
    return reordered(weight), None if bias is None else reordered(bias)
