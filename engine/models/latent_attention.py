"""Multi-head latent attention: DeepSeek-AI, "DeepSeek-V2", 2024 (arXiv 2405.04434), section 2.1 and appendix C.

A token's KV is one latent, from which each head's key and value are products, and one rotated key for all heads.
While a sequence decodes the products are absorbed: a head's query goes through the key's product instead (`up_key`),
its output through the value's (`up_value`). So attention is that of N query heads to one key of C + P numbers, of which
the first C are also the value. Prompts that are long enough attend to keys and values unfolded for them, which takes
less arithmetic (engine/attention/latent_forms.py). Nothing but latents is ever kept.

Of several ranks each has some of the heads, and all of the latents.

Shapes: T tokens, D hidden, N heads; C numbers of a latent (kv_lora_rank), P of a rotated key, R = C + P; Q numbers of a
head's query without positions, V of its value.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention import LatentBackend
from engine.layers import LatentProjection, RotaryEmbedding
from engine.models.decoder_config import DecoderConfig
from engine.models.deepseek_config import LatentConfig
from engine.models.layer import CosSin
from engine.models.parts import PartsFactory, WeightAndBias

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says: as in transformers and in the code beside the checkpoints."""


class LatentAttention:
    """q, latents and keys by products; the backend's attention; the product of all heads' outputs."""

    def __init__(
        self,
        config: DecoderConfig,
        mla: LatentConfig,
        layer: int,
        factory: PartsFactory,
        backend: LatentBackend[Any],
        rotary: RotaryEmbedding,
    ) -> None:
        self._backend, self._mla = backend, mla
        D, N = config.hidden_size, config.num_heads
        C, Q, P, V = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        at = f"model.layers.{layer}.self_attn"
        latent = factory.weight_and_bias(f"{at}.kv_a_proj_with_mqa", C + P, D, config.has_qkv_bias)
        down = [_rows_in_halves(latent, 1, mla)]
        if mla.q_lora_rank:
            down.insert(0, factory.weight_and_bias(f"{at}.q_a_proj", mla.q_lora_rank, D, config.has_qkv_bias))
        self._down = factory.fused(down)
        name, inputs = ("q_b_proj", mla.q_lora_rank) if mla.q_lora_rank else ("q_proj", D)
        query = factory.weight_and_bias(f"{at}.{name}", N * (Q + P), inputs, False)
        self._up_query = factory.fused([_rows_in_halves(query, N, mla)])
        self._query_norm = None
        if mla.q_lora_rank:
            self._query_norm = factory.rms_norm(f"{at}.q_a_layernorm", mla.q_lora_rank, LATENT_NORM_EPS)
        up, _ = factory.weight_and_bias(f"{at}.kv_b_proj", N * (Q + V), C, False)
        up_key, up_value = up.view(N, Q + V, C).split_with_sizes([Q, V], dim=1)
        self._heads = LatentProjection(
            rotary,
            factory.rms_norm(f"{at}.kv_a_layernorm", C, LATENT_NORM_EPS),
            factory.parts.head_products(up_key.contiguous()),
            factory.parts.head_products(up_value.transpose(1, 2).contiguous()),
        )
        self._output = factory.row_parallel_linear(f"{at}.o_proj", D, N * V, config.has_output_bias)

    def __call__(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> torch.Tensor:
        mla = self._mla
        query_latent, latent_TR = self._down(h_TD).split_with_sizes([mla.q_lora_rank, mla.latent_dim], dim=-1)
        query = h_TD if self._query_norm is None else self._query_norm(query_latent)
        q_TX = self._up_query(query)
        o_TNV = self._backend.attend(q_TX, latent_TR, kv, plan, self._heads, cos_sin, mla.softmax_scale)
        return self._output(o_TNV.flatten(1))


def _rows_in_halves(product: WeightAndBias, num_heads: int, mla: LatentConfig) -> WeightAndBias:
    """The product with its last outputs of each head, which rotations turn, in the order of `RotaryEmbedding`: numbers
    that are turned together half a head apart. Queries and keys alike, so that their products stay what they are."""
    if not mla.interleaves_rope:
        return product

    def reordered(x: torch.Tensor) -> torch.Tensor:
        of_heads = x.view(num_heads, -1, *x.shape[1:])
        before, rotated = of_heads[:, : -mla.qk_rope_head_dim], of_heads[:, -mla.qk_rope_head_dim :]
        return torch.cat((before, rotated[:, 0::2], rotated[:, 1::2]), dim=1).view(x.shape)

    weight, bias = product
    return reordered(weight), None if bias is None else reordered(bias)
