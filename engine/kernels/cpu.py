"""A decoder's layer as one call of the CPU kernels. `load_cpu_kernels` comes first. bfloat16 only.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

import torch

from engine.attention.cpu_backend import CpuPlan
from engine.models.decoder import DecoderLayer


class FusedDecoderLayer:
    """Computes what `layer` computes. Takes over its weights."""

    def __init__(self, layer: DecoderLayer) -> None:
        heads = layer.heads
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        self._layer = torch.classes.tandem_cpu.DecoderLayer(
            [product.weight for product in products],
            [product.bias for product in products],
            layer.input_norm.weight,
            layer.post_attention_norm.weight,
            None if heads.q_norm is None else heads.q_norm.weight,
            None if heads.k_norm is None else heads.k_norm.weight,
            layer.input_norm.eps,
            heads.head_dim**-0.5,
            layer.sliding_window,
            layer.qkv.is_packed,
        )

    def __call__(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        kv: torch.Tensor,
        plan: CpuPlan,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.__call__`; `x_TD` is overwritten."""
        delta_TD = self._layer.forward(
            x_TD, delta_TD, kv, *cos_sin, plan.slot_mapping, plan.block_tables, plan.query_lens, plan.context_lens
        )
        return x_TD, delta_TD
