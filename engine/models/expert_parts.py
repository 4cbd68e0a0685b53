"""Parts of the experts in transformers' modules: of each expert, some numbers of the intermediate state, and what these
add to the outputs.

Shapes: E experts, D hidden, I intermediate, X = 2 I (gate and up).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.models.four_bit_experts import GROUP
from engine.models.transformers_experts import FourBitExperts
from engine.narrow_weight import cannot_cut


def intermediate_size_of(module: Any) -> int | None:
    """None: these are no experts, or they are stored in a way that is not known here."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or gate_up.ndim != 3:
        return None
    # What transformers' decorator `use_experts_implementation` says of them.
    if getattr(module, "has_gate", None) is not True or getattr(module, "has_post_expert_norm", None) is not False:
        return None
    E, *sizes = gate_up.shape
    X, D = reversed(sizes) if module.is_transposed else sizes
    intermediate_size = int(X) // 2
    down_sizes = (intermediate_size, D) if module.is_transposed else (D, intermediate_size)
    is_whole = down.shape == (E, *down_sizes) and len(list(module.parameters())) == (4 if module.has_bias else 2)
    return intermediate_size if is_whole else None


def keep_part(module: Any, part: range, *, has_output_bias: bool) -> None:
    """Keep only `part` of each expert's intermediate numbers. `has_output_bias`: whether this rank adds the outputs'
    biases; only one rank may. Raises `ValueError` if inputs that share a scale cannot be cut there."""
    if isinstance(module, FourBitExperts):
        _keep_part_in_four_bits(module, part, has_output_bias=has_output_bias)
        return
    axis = 2 if module.is_transposed else 1
    pairs = _pairs_side_by_side if module.is_concatenated else _pairs_in_turn
    _set(module, "gate_up_proj", pairs(module.gate_up_proj.data, axis, part))
    _set(module, "down_proj", module.down_proj.data.narrow(3 - axis, part.start, len(part)))
    if module.has_bias:
        _set(module, "gate_up_proj_bias", pairs(module.gate_up_proj_bias.data, 1, part))
        _keep_output_bias(module, has_output_bias)


def _keep_part_in_four_bits(module: FourBitExperts, part: range, *, has_output_bias: bool) -> None:
    if part.start % GROUP or part.stop % GROUP:
        raise cannot_cut(part, GROUP)
    groups = range(part.start // GROUP, part.stop // GROUP)
    for name in ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"):
        _set(module, name, _pairs_in_turn(getattr(module, name).data, 1, part))
    for name in ("down_proj_blocks", "down_proj_scales"):
        _set(module, name, getattr(module, name).data.narrow(2, groups.start, len(groups)))
    _keep_output_bias(module, has_output_bias)


def _pairs_side_by_side(x: torch.Tensor, axis: int, part: range) -> torch.Tensor:
    """All gates, then all ups."""
    return torch.cat([half.narrow(axis, part.start, len(part)) for half in x.chunk(2, dim=axis)], dim=axis)


def _pairs_in_turn(x: torch.Tensor, axis: int, part: range) -> torch.Tensor:
    """A gate, its up, the next gate, and so on."""
    return x.narrow(axis, 2 * part.start, 2 * len(part))


def _keep_output_bias(module: Any, has_output_bias: bool) -> None:
    if not has_output_bias:
        _set(module, "down_proj_bias", torch.zeros_like(module.down_proj_bias.data))


def _set(module: Any, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(value.clone(memory_format=torch.contiguous_format), requires_grad=False))
