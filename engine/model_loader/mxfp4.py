"""Weights in MXFP4, as in the experts of gpt-oss' checkpoints: checks them, and dequantises them if no kernel can use
them as they are (engine/models/four_bit_experts.py).

A number has four bits (sign, two of exponent, one of mantissa), and 32 numbers share a power of two in 8 bits (Open
Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023). For a weight NAME [E experts,
I inputs, O outputs] a checkpoint holds

    NAME_blocks [E, O, I / 32, 16]   bytes: two numbers each, the lower half first
    NAME_scales [E, O, I / 32]       bytes: the power's exponent + 127
"""

from __future__ import annotations

import torch

from engine.models.four_bit_experts import BIAS, GROUP

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers that the lower three bits stand for; the fourth bit is the sign."""
NOT_A_NUMBER = 255


def check_all(tensors: dict[str, torch.Tensor]) -> None:
    """Raise `ValueError` naming a tensor whose blocks and scales do not fit, or whose scales are not numbers."""
    for weight in _weights_in_halves(tensors):
        _check(weight + BLOCKS, tensors[weight + BLOCKS], tensors[weight + SCALES])


def widen_all(tensors: dict[str, torch.Tensor], *, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Replace each pair NAME_blocks and NAME_scales of the checked `tensors` by a dequantised NAME on the device, one
    at a time; other tensors stay."""
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
    """Dequantise to [E, I, O], expert by expert, since intermediate results take several times the memory."""
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
