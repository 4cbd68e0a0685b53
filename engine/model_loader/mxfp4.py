"""Weights in MXFP4, as gpt-oss' checkpoints keep their experts: widened when they are loaded, and never computed with.

Four bits a number (sign, two of exponent, one of mantissa), and for 32 of them one power of two, in 8 bits (Open
Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023). Of a weight NAME [E experts,
I inputs, O outputs] a checkpoint holds

    NAME_blocks [E, O, I / 32, 16]   bytes: two numbers each, the lower half first
    NAME_scales [E, O, I / 32]       bytes: the power's exponent and 127
"""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits; the fourth is the sign."""
BIAS, NOT_A_NUMBER = 127, 255


def widen_all(tensors: dict[str, torch.Tensor], *, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """`tensors` with each NAME_blocks and NAME_scales as NAME, on the device, one at a time; all others as they are.

    Raises `ValueError` naming a tensor that does not fit its other half, or has no numbers.
    """
    widened: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        weight, other = name.removesuffix(BLOCKS), name.removesuffix(BLOCKS) + SCALES
        if name.endswith(BLOCKS) and other in tensors:
            scales = tensors[other]
            _check(name, tensor, scales)
            widened[weight] = widen(tensor.to(device), scales.to(device), dtype)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors):
            widened[name] = tensor
    return widened


def widen(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, I, O], expert by expert: what is in between takes several times as much."""
    numbers = torch.tensor([*NUMBERS, *(-x for x in NUMBERS)], dtype=torch.float32, device=blocks.device)
    num_experts, num_outputs = scales.shape[:2]
    widened = torch.empty(num_experts, scales.shape[2] * 32, num_outputs, dtype=dtype, device=blocks.device)
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
        raise ValueError(f"the weights hold {name} with a scale that is no number (255)")
