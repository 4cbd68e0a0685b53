"""Finds the layers of a model in transformers' code that keep a state, which our own modules compute instead
(delta_net.py, mamba2.py, short_convolution.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.models.recurrent_shape import ConvolutionLayer, DeltaLayer, Mamba2Layer, RecurrentLayer

DELTA_NETS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""transformers' classes of layers of gated delta rules."""
MAMBA_2S = frozenset({"NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer", "BambaMixer"})
"""transformers' classes of Mamba-2 layers."""
CONVOLUTIONS = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})
"""transformers' classes of layers of short convolutions."""


class CannotServeError(Exception):
    """The message is a clause."""


def take_recurrent_layers(model: Any) -> tuple[RecurrentLayer, ...]:
    """Describe the layers that keep a state, and replace them by modules that compute nothing. Raises
    `CannotServeError` for those that compute something else than ours."""
    found: list[RecurrentLayer] = []
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if kind in DELTA_NETS:
            found.append(_delta_layer(name, module))
        elif kind in MAMBA_2S:
            found.append(_mamba2_layer(name, module))
        elif kind in CONVOLUTIONS:
            found.append(_convolution_layer(name, module))
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _Passed())
    return tuple(found)


def _delta_layer(name: str, module: Any) -> DeltaLayer:
    if module.activation not in ("silu", "swish"):
        raise CannotServeError(f"its layers of delta rules have hidden_act {module.activation!r}, in place of silu")
    if module.num_v_heads % module.num_k_heads:
        raise CannotServeError(
            f"its layers of delta rules have {module.num_v_heads} value heads for {module.num_k_heads} key heads"
        )
    return DeltaLayer(
        name=name,
        num_key_heads=module.num_k_heads,
        num_value_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        num_taps=module.conv_kernel_size,
    )


def _mamba2_layer(name: str, module: Any) -> Mamba2Layer:
    if module.activation not in ("silu", "swish"):
        raise CannotServeError(f"its Mamba-2 layers have the activation {module.activation!r}, in place of silu")
    num_heads, head_dim, num_groups = module.num_heads, module.head_dim, module.n_groups
    if num_heads * head_dim != module.intermediate_size or num_heads % num_groups:
        raise CannotServeError(
            f"its Mamba-2 layers have {num_heads} heads of size {head_dim} in {num_groups} groups, for "
            f"{module.intermediate_size} channels"
        )
    if min(module.ssm_state_size, module.conv_kernel_size) < 1:
        raise CannotServeError(
            f"its Mamba-2 layers have states of {module.ssm_state_size} numbers and convolutions of "
            f"{module.conv_kernel_size} taps"
        )
    limits = module.time_step_limit
    if limits is None or limits[0] > limits[1]:
        raise CannotServeError(f"its Mamba-2 layers have the time_step_limit {limits}, not the least and the most")
    return Mamba2Layer(
        name=name,
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=module.ssm_state_size,
        num_groups=num_groups,
        num_taps=module.conv_kernel_size,
    )


def _convolution_layer(name: str, module: Any) -> ConvolutionLayer:
    if module.conv.bias is not None:
        raise CannotServeError("its convolutions have a bias")
    return ConvolutionLayer(name=name, hidden_size=module.conv.in_channels, num_taps=module.conv_kernel_size)


class _Passed(nn.Module):
    """Returns what it gets."""

    def forward(self, hidden_states: torch.Tensor, **_further: object) -> torch.Tensor:
        return hidden_states
