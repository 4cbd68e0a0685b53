"""Our module for each layer that keeps a state, in place of transformers' own."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.models.delta_net import SIBLINGS, DeltaNet
from engine.models.mamba2 import Mamba2
from engine.models.recurrent_ops import RecurrentOps
from engine.models.recurrent_reference import TORCH_OPS
from engine.models.recurrent_shape import ConvolutionLayer, DeltaLayer, Mamba2Layer, RecurrentLayer
from engine.models.recurrent_states import RecurrentStates
from engine.models.short_convolution import ShortConvolution


def siblings_in(layer: RecurrentLayer) -> tuple[tuple[str, ...], ...]:
    """Names of products, some of which the layer has, that its module gives the very same input."""
    if not isinstance(layer, DeltaLayer):
        return ()
    return tuple(tuple(f"{layer.name}.{name}" for name in names) for names in SIBLINGS)


def module_of(module: Any, layer: RecurrentLayer, number: int, states: RecurrentStates, ops: RecurrentOps) -> nn.Module:
    """`module`: transformers', whose parts ours takes over. `number`: the layer's among those that keep a state. Plain
    torch computes a layer that `ops` cannot."""
    ops = ops if ops.fit(layer) else TORCH_OPS
    if isinstance(layer, DeltaLayer):
        return DeltaNet(module, layer, number, states, ops)
    if isinstance(layer, Mamba2Layer):
        return Mamba2(module, layer, number, states, ops)
    assert isinstance(layer, ConvolutionLayer)
    return ShortConvolution(module, number, states, ops)
