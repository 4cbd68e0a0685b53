"""A decoder's layers as one call of the CPU kernels. `load_cpu_kernels` comes first. bfloat16 only.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.cpu_backend import CpuPlan
from engine.models.decoder import DecoderLayer, OnLayer


class FusedLayers:
    """Computes what `layers` compute. Takes over their weights."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self._layers = [fused(layer) for layer in layers]
        self._all = torch.classes.tandem_cpu.DecoderLayers()
        for layer in self._layers:
            self._all.add(layer)

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: CpuPlan,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        step = (*cos_sin, plan.slot_mapping, plan.block_tables, plan.query_lens, plan.context_lens)
        if on_layer is None:
            h_TD: torch.Tensor = self._all.forward(x_TD, kv_pool, *step)
            return h_TD
        delta_TD = None
        for i, layer in enumerate(self._layers):
            delta_TD = layer.forward(x_TD, delta_TD, kv_pool[i], *step)
            on_layer(i)
        assert isinstance(delta_TD, torch.Tensor)
        return x_TD + delta_TD


def fused(layer: DecoderLayer) -> Any:
    """torch.classes.tandem_cpu.DecoderLayer with the weights of `layer`."""
    heads = layer.heads
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return torch.classes.tandem_cpu.DecoderLayer(
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
