"""A decoder's parts, computed by the CPU kernels (products: cpu_products.py; experts: cpu_experts.py). Call
`load_cpu_kernels` first. bfloat16, except weights in int8 or int4.

    Decoder(…, KERNEL_PARTS): each part computes what its base class does, to bfloat16's precision, and a token's
    numbers do not depend on what else the step computes. QUANTIZED_KERNEL_PARTS quantise the weights of layers'
    products first. All parts accept weights that are in int8 or int4 already

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.attention.cpu_backend import CpuPlan
from engine.kernels.cpu_experts import (
    PanelChosenExperts,
    PanelClampedExperts,
    PanelExperts,
    PanelFourBitExperts,
    mixture_of,
)
from engine.kernels.cpu_products import PanelGatedLinear, PanelHeadProducts, PanelLinear, PanelLogits
from engine.kernels.cpu_recurrent import CPU_OPS
from engine.layers import Activation, CosSin, GatedLinear, Linear, RMSNorm
from engine.models.experts import ExpertsFeedForward
from engine.models.feed_forward import GatedFeedForward
from engine.models.head_attention import HeadAttention
from engine.models.latent_attention import LatentAttention
from engine.models.layer import DecoderLayer, Features, LayerStack, OnLayer, PlainLayers
from engine.models.parts import Parts
from engine.quantization import as_int8
from engine.weight import Quantise, Weight, as_int4


class KernelRMSNorm(RMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.tandem_cpu.add_rms_norm(x.contiguous(), None, self.weight, self.eps)
        return y


class FusedLayers:
    """Computes all layers in one call, or in one call per layer if `on_layer` is given."""

    def __init__(self, layers: list[DecoderLayer], adapter_ids: Callable[[], torch.Tensor | None]) -> None:
        """`adapter_ids` returns the step's adapter per row, [T] int32, or None if no row uses one."""
        self._adapter_ids = adapter_ids
        self._layers = [fused(layer) for layer in layers]
        self._all = torch.classes.tandem_cpu.DecoderLayers()
        for layer in self._layers:
            self._all.add(layer)

    def __call__(
        self,
        x_TD: torch.Tensor,
        kv_pool: torch.Tensor,
        plan: CpuPlan,
        cos_sin: CosSin,
        on_layer: OnLayer | None,
        features: Features | None,
    ) -> torch.Tensor:
        step = (*cos_sin, plan.slot_mapping, plan.block_tables, plan.query_lens, plan.context_lens, self._adapter_ids())
        if on_layer is None:
            of_step = (None, []) if features is None else (features.of_step(len(x_TD)), list(features.layers))
            h_TD: torch.Tensor = self._all.forward(x_TD, kv_pool, *step, *of_step)
            return h_TD
        delta_TD = None
        for i, layer in enumerate(self._layers):
            if features is not None:
                features.take(i, x_TD, delta_TD)
            delta_TD = layer.forward(x_TD, delta_TD, kv_pool[i], *step)
            on_layer(i)
        if features is not None:
            features.take(len(self._layers), x_TD, delta_TD)
        assert isinstance(delta_TD, torch.Tensor)
        return x_TD + delta_TD


def fastest_stack(
    layers: list[DecoderLayer], adapter_ids: Callable[[], torch.Tensor | None] = lambda: None
) -> LayerStack:
    """`FusedLayers` with these arguments; `PlainLayers` if it does not know a layer's parts."""
    return FusedLayers(layers, adapter_ids) if all(map(_can_fuse, layers)) else PlainLayers(layers)


def _can_fuse(layer: DecoderLayer) -> bool:
    return isinstance(layer.attention, HeadAttention | LatentAttention) and isinstance(
        layer.feed_forward, GatedFeedForward | ExpertsFeedForward
    )


def fused(layer: DecoderLayer) -> Any:
    """Make a torch.classes.tandem_cpu.DecoderLayer with the weights of `layer`."""
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(attention, HeadAttention | LatentAttention)
    heads = attention if isinstance(attention, HeadAttention) else None
    first = attention.qkv if isinstance(attention, HeadAttention) else attention.down
    gated = feed_forward.shared if isinstance(feed_forward, ExpertsFeedForward) else feed_forward
    assert isinstance(first, PanelLinear)
    assert isinstance(attention.output, PanelLinear)
    products: list[PanelLinear | PanelGatedLinear] = [first, attention.output]
    if gated is not None:
        assert isinstance(gated, GatedFeedForward)
        assert isinstance(gated.gated, PanelGatedLinear)
        assert isinstance(gated.down, PanelLinear)
        products += [gated.gated, gated.down]
    made = torch.classes.tandem_cpu.DecoderLayer(
        [product.panels for product in products],
        [product.scale for product in products],
        [product.bias for product in products],
        [product.num_outputs for product in products],
        layer.input_norm.weight,
        layer.post_attention_norm.weight,
        None if heads is None or heads.heads.q_norm is None else heads.heads.q_norm.weight,
        None if heads is None or heads.heads.k_norm is None else heads.heads.k_norm.weight,
        layer.input_norm.eps,
        0.0 if heads is None else heads.scores.scale,
        0 if heads is None else heads.scores.sliding_window,
    )
    for number, product in enumerate(products):
        if product.added is not None:
            made.adapt(number, product.added)
    if isinstance(attention, LatentAttention):
        made.attend_to_latents(_latent_heads(attention))
    if isinstance(feed_forward, ExpertsFeedForward):
        made.mix(_mixture(feed_forward))
    return made


def _latent_heads(attention: LatentAttention) -> Any:
    """A torch.classes.tandem_cpu.LatentHeads."""
    heads, up_query = attention.heads, attention.up_query
    assert isinstance(up_query, PanelLinear)
    assert isinstance(heads.up_key, PanelHeadProducts)
    assert isinstance(heads.up_value, PanelHeadProducts)
    num_heads, _, value_dim = heads.up_value.shape
    return torch.classes.tandem_cpu.LatentHeads(
        None if attention.query_norm is None else attention.query_norm.weight,
        up_query.panels,
        up_query.scale,
        up_query.num_outputs,
        heads.norm.weight,
        heads.norm.eps,
        heads.up_key.panels,
        heads.up_key.scale,
        heads.up_value.panels,
        heads.up_value.scale,
        num_heads,
        value_dim,
        attention.mla.softmax_scale,
    )


def _mixture(feed_forward: ExpertsFeedForward) -> Any:
    router, chosen = feed_forward.router, feed_forward.experts
    assert isinstance(router.logits, PanelLogits)
    assert isinstance(chosen, PanelChosenExperts)
    return mixture_of(chosen.products, router.logits, router.bias_E, router.config)


KERNEL_PARTS = Parts(
    PanelLinear,
    PanelGatedLinear,
    PanelLogits,
    KernelRMSNorm,
    fastest_stack,
    expert_scores=PanelLogits,
    each_expert=PanelExperts,
    chosen_experts=PanelChosenExperts,
    four_bit_experts=PanelFourBitExperts,
    clamped_experts=PanelClampedExperts,
    head_products=PanelHeadProducts,
    recurrent_ops=CPU_OPS,
)


def _quantising(quantise: Quantise) -> Parts:
    """Kernel parts that quantise the weights of layers' products first, unless they are already."""

    def linear(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        return PanelLinear(quantise(weight), bias)

    def gated_linear(
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = "silu",
    ) -> GatedLinear:
        return PanelGatedLinear(quantise(gate), quantise(up), gate_bias, up_bias, activation)

    return replace(
        KERNEL_PARTS,
        linear=linear,
        gated_linear=gated_linear,
        lm_head=int8_logits,
        head_products=partial(PanelHeadProducts, quantise=as_int8),
        quantise_expert=quantise,
    )


def int8_logits(weight: Weight) -> Linear:
    """In int8 also beside layers in int4: of a model with a large vocabulary, a step would otherwise read as many bytes
    for the logits as for all layers."""
    return PanelLogits(as_int8(weight))


QUANTIZED_KERNEL_PARTS = {"int8": _quantising(as_int8), "int4": _quantising(as_int4)}
"""In int8 there are half the bytes to read, in int4 a third or less."""
