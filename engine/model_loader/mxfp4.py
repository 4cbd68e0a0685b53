"""Weights in MXFP4, as gpt-oss' checkpoints keep their experts: looked through, and widened where nobody computes with
them as they are (engine/models/four_bit_experts.py).

Four bits a number (sign, two of exponent, one of mantissa), and for 32 of them one power of two, in 8 bits (Open
Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023). Of a weight NAME [E experts,
I inputs, O outputs] a checkpoint holds

    NAME_blocks [E, O, I / 32, 16]   bytes: two numbers each, the lower half first
    NAME_scales [E, O, I / 32]       bytes: the power's exponent and 127
"""

from __future__ import annotations

import torch

from engine.models.four_bit_experts import BIAS, GROUP

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
NOT_A_NUMBER = 255


def check_all(tensors: dict[str, torch.Tensor]) -> None:
    """Raises `ValueError` naming a tensor that does not fit its other half, or has no numbers."""
    for weight in _weights_in_halves(tensors):
        _check(weight + BLOCKS, tensors[weight + BLOCKS], tensors[weight + SCALES])


def widen_all(tensors: dict[str, torch.Tensor], *, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """`tensors`, which have been checked, with each NAME_blocks and NAME_scales as NAME, on the device, one at a time;
    all others as they are."""
    in_halves = _weights_in_halves(tensors)
    halves = {weight + half for weight in in_halves for half in (BLOCKS, SCALES)}
    widened = {name: tensor for name, tensor in tensors.items() if name not in halves}
    for weight in in_halves:
        blocks, scales = (tensors[weight + half].to(device) for half in (BLOCKS, SCALES))
        widened[weight] = widen(blocks, scales, dtype)
    return widened


def _weights_in_halves(tensors: dict[str, torch.Tensor]) -> list[str]:
    names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    return [name for name in names if name + SCALES in tensors]


def widen(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, I, O], expert by expert: what is in between takes several times as much."""
    numbers = torch.tensor([*NUMBERS, *(-x for x in NUMBERS)], dtype=torch.float32, device=blocks.device)
    num_experts, num_outputs = scales.shape[:2]
    widened = torch.empty(num_experts, scales.shape[2] * GROUP, num_outputs, dtype=dtype, device=blocks.device)
    for weight, pairs, exponents in zip(widened, blocks, scales, strict=True):
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2).int()  # [O, I / 32, 32]
        powers = torch.exp2((exponents.int() - BIAS).float()).unsqueeze(-1)
        weight.copy_((numbers[codes] * powers).flatten(1).T)
    return widened


def _check(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"the weights hold {name} in {blocks.dtype}, its scales in {scales.dtype}: MXFP4 is in uint8")
    if blocks.ndim != 4 or list(blocks.shape) != [*scales.shape, 16]:
        raise ValueError(
            f"the weights hold {name} of shape {list(blocks.shape)} with scales of shape {list(scales.shape)}: they "
            "must be [experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32]"
        )
    if scales.numel() and int(scales.max()) == NOT_A_NUMBER:
        raise ValueError(f"the weights hold {name} with a scale that is not a number (255)")
