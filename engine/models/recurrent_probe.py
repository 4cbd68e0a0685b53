"""Finds the layers of a model in transformers' code that keep a state, which our own modules compute instead
(delta_net.py, mamba2.py, short_convolution.py)."""

from __future__ import annotations

import inspect
from collections import Counter
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
OURS = (
    "gated delta rules (Qwen3-Next, Qwen 3.5), Mamba-2 beside attention (Granite 4, Nemotron-H, Falcon-H1, Bamba) and "
    "short convolutions (LFM2)"
)
KINDS_WITH_STATES = frozenset({"linear_attention", "conv"})
"""Among transformers' kinds of layers."""
CACHES = frozenset({"past_key_values", "cache_params", "state"})
"""transformers' names of the argument in which a layer finds what it keeps of the tokens before."""


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
        model.set_submodule(name, _Passed())
    return tuple(found)


def why_not_its_states(model: Any) -> str:
    """Which layers keep a state that none of our modules computes, as a clause; empty if none seems to. For a model
    that is refused: to tell such layers it goes by names alone."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    # transformers' mark of models whose layers cannot be rolled back to an earlier token; some have their kinds alone.
    if not getattr(model, "_is_stateful", False) and not kinds & KINDS_WITH_STATES:
        return ""
    keeping = {name: module for name, module in model.named_modules() if name and _takes_a_cache(module)}
    innermost = [
        module for name, module in keeping.items() if not any(other.startswith(f"{name}.") for other in keeping)
    ]
    classes = Counter(type(module).__name__ for module in innermost if not _attends(module))
    if not classes:
        return ""
    which = ", ".join(f"{classes[name]} {name}" for name in sorted(classes))
    return (
        f"its layers keep a state (in transformers' code: {which}) that Tandem does not compute. Of layers that keep a "
        f"state, it computes {OURS}"
    )


def _takes_a_cache(module: nn.Module) -> bool:
    return not CACHES.isdisjoint(inspect.signature(module.forward).parameters)


def _attends(module: nn.Module) -> bool:
    """Whether it calls attention by transformers' interface."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


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
