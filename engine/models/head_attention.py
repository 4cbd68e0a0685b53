"""Attention whose pool holds keys and values of heads: Llama, Mistral, Qwen.

Shapes: T tokens, D hidden, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention import AttentionBackend
from engine.layers import CosSin, HeadProjection
from engine.models.decoder_config import DecoderConfig
from engine.models.parts import PartsFactory
from engine.models.scores import Scores


class HeadAttention:
    """One product for q, k and v, and their rotation; the backend's attention; the output projection."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        factory: PartsFactory,
        backend: AttentionBackend[Any],
        *,
        num_inputs: int | None = None,
    ) -> None:
        """`num_inputs`: numbers of a token that q, k and v are computed from. Default: D."""
        self._backend = backend
        self.scores = Scores.of(config.head_dim, config.sliding_windows[layer])
        D, H = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * H, config.num_kv_heads * H
        at = f"model.layers.{layer}.self_attn"
        qkv = {f"{at}.q_proj": q_size, f"{at}.k_proj": kv_size, f"{at}.v_proj": kv_size}
        self.qkv = factory.linear(qkv, num_inputs or D, config.has_qkv_bias)
        self.output = factory.row_parallel_linear(f"{at}.o_proj", D, q_size, config.has_output_bias)
        self.heads = HeadProjection(
            config.num_heads,
            config.num_kv_heads,
            H,
            q_norm=factory.rms_norm(f"{at}.q_norm", H) if config.has_qk_norm else None,
            k_norm=factory.rms_norm(f"{at}.k_norm", H) if config.has_qk_norm else None,
        )

    def __call__(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> torch.Tensor:
        q_TNH = self._project(h_TD, kv, plan, cos_sin)
        return self.output(self._backend.attend(q_TNH, kv, plan, self.scores))

    def write(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> None:
        """See `Attention.write`."""
        self._project(h_TD, kv, plan, cos_sin)

    def _project(self, h_TD: torch.Tensor, kv: torch.Tensor, plan: Any, cos_sin: CosSin) -> torch.Tensor:
        """Write the step's keys and values to the pool. Returns its queries: [T, N, H]."""
        return self._backend.project(self.qkv(h_TD), kv, plan, self.heads, cos_sin)
