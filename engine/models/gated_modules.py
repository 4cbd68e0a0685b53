"""Transformers' feed-forward modules that ours can stand in for: a gate, `up` and `down`, in nearly every family.

They are found by what they compute: a copy with small layers gets random rows; if it yields down(f(gate x) * up x), for
an f that our parts have, `gate` and `up` may become one product of ours.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from engine.layers import ACTIVATIONS, Activation

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SIZE = 16
SIZES_OF_ROWS = (0.1, 1.0, 5.0, 30.0, 1e3, 1e6)
"""A limit of what is given to the activation, or of what is multiplied, shows in numbers beyond it alone."""
ROWS_OF_SIZE = 8
ROUNDING = 1e-6


def activation_of(module: nn.Module) -> Activation | None:
    """The activation of a gate, if our parts have it. None: the module computes something else."""
    children = dict(module.named_children())
    layers = [children.pop(name, None) for name in (GATE, UP, DOWN)]
    has_own = len(children) > 1 or len(list(module.parameters(recurse=False))) > 0
    if has_own or any(type(layer) is not nn.Linear for layer in layers):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    tried: Any = copy.copy(module)
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (_linear(generator) for _ in layers)
    tried._modules = module._modules | {GATE: gate, UP: up, DOWN: down}
    sizes_T = torch.tensor(SIZES_OF_ROWS, dtype=torch.float32, device="cpu").repeat_interleave(ROWS_OF_SIZE)
    x_1TD = torch.randn(1, len(sizes_T), SIZE, generator=generator, dtype=torch.float32) * sizes_T[:, None]
    try:
        found = tried(x_1TD)
    except Exception:  # its code may raise anything with layers of another size
        return None
    g, u = gate(x_1TD), up(x_1TD)
    tolerance = ROUNDING * F.linear((g * u).abs(), down.weight.abs(), down.bias.abs())
    for activation, of in ACTIVATIONS.items():
        expected = down(of(g) * u)
        is_alike = isinstance(found, torch.Tensor) and found.shape == expected.shape
        if is_alike and bool(((found - expected).abs() <= tolerance).all()):
            return activation
    return None


def activation_in(function: Any) -> Activation | None:
    """Which of our parts' activations a function of transformers' is. None: another one."""
    has_weights = isinstance(function, nn.Module) and len(list(function.parameters())) > 0
    if not callable(function) or has_weights:  # weights may be on torch's meta device
        return None
    far = torch.logspace(1.0, 6.0, 51, dtype=torch.float32, device="cpu")
    x = torch.cat((torch.linspace(-12.0, 12.0, 241, dtype=torch.float32, device="cpu"), far, -far))
    for activation, of in ACTIVATIONS.items():
        if torch.allclose(function(x), of(x), rtol=1e-5, atol=1e-6):
            return activation
    return None


def _linear(generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(SIZE, SIZE, dtype=torch.float32, device="cpu")
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    return linear.requires_grad_(False)
