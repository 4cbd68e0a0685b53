"""Transformers' feed-forward modules that ours can stand in for: a gate, `up` and `down`, in nearly every family.

They are found by what they compute: a copy with small layers gets random rows; if it yields down(f(gate x) * up x), for
an f that our parts have, `gate` and `up` may become one product of ours.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from engine.layers import ACTIVATIONS, Activation

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
NUM_INPUTS, NUM_OUTPUTS = 8, 16


def activation_of(module: nn.Module) -> Activation | None:
    """The activation of a gate, if our parts have it. None: the module computes something else."""
    children = dict(module.named_children())
    layers = [children.pop(name, None) for name in (GATE, UP, DOWN)]
    has_own = len(children) > 1 or len(list(module.parameters(recurse=False))) > 0
    if has_own or any(type(layer) is not nn.Linear for layer in layers):
        return None
    tried: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(1)
    gate, up = (_linear(NUM_OUTPUTS, NUM_INPUTS, generator) for _ in range(2))
    down = _linear(NUM_INPUTS, NUM_OUTPUTS, generator)
    tried._modules = module._modules | {GATE: gate, UP: up, DOWN: down}
    x_1TD = torch.randn(1, 5, NUM_INPUTS, generator=generator)
    try:
        found = tried(x_1TD)
    except Exception:  # its code may raise anything with layers of another size
        return None
    for activation, of in ACTIVATIONS.items():
        expected = down(of(gate(x_1TD)) * up(x_1TD))
        if isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected, 1e-5):
            return activation
    return None


def activation_in(function: Any) -> Activation | None:
    """Which of our parts' activations a function of transformers' is. None: another one."""
    has_weights = isinstance(function, nn.Module) and len(list(function.parameters())) > 0
    if not callable(function) or has_weights:  # weights may be on torch's meta device
        return None
    x = torch.linspace(-12.0, 12.0, 241, device="cpu")
    for activation, of in ACTIVATIONS.items():
        if torch.allclose(function(x), of(x), rtol=1e-5, atol=1e-6):
            return activation
    return None


def _linear(outputs: int, inputs: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, dtype=torch.float32, device="cpu")
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return linear.requires_grad_(False)
