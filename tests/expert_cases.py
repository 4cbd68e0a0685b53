"""Experts' weights in 8 and in 4 bits, and the exact products of each expert's rows with them, in float64."""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.int4_weight import Int4Weight
from engine.scaled_weight import ScaledWeight

UNIT = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
FORMS = [torch.float8_e4m3fn, torch.int8]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def stack_of(
    shape: tuple[int, int, int], group_size: int, form: torch.dtype, dtype: torch.dtype, device: str = "cpu"
) -> ScaledWeight:
    """Weights of several experts, one's outputs below another's. Groups' scales differ by up to a hundred times.
    `shape`: experts, outputs, inputs. `group_size` 0: one scale for each output."""
    numbers = randn(*shape, dtype=torch.float32, seed=shape[1]) * 30
    stored = numbers.round().clamp(-127, 127).to(form) if form == torch.int8 else numbers.to(form)
    num_groups = -(-shape[2] // group_size) if group_size else 1
    scale = torch.logspace(-4, -2, shape[0] * shape[1] * num_groups).view(*shape[:2], num_groups)
    scale = scale.flip(0, 1).flatten(0, 1).to(device)
    return ScaledWeight(stored.flatten(0, 1).to(device), scale, group_size or shape[2], dtype)


def int4_weight_of(
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Int4Weight:
    """Return a weight whose groups' scales differ by factors of up to a thousand."""
    generator = torch.Generator().manual_seed(num_inputs)
    integers = torch.randint(16, (num_outputs, num_inputs), generator=generator)
    shape = num_outputs, num_inputs // group_size
    size = torch.logspace(-3, 0, num_outputs * shape[1]).view(shape).flip(0)
    scale, offset = (size * torch.rand(2, *shape, generator=generator)).to(scale_dtype).float()
    return Int4Weight.of_integers(integers.to(device), scale.to(device), -8 * offset.to(device), dtype)


def ends_of(counts: list[int], device: str = "cpu") -> torch.Tensor:
    """Return where each expert's rows end, if the experts have `counts` rows."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def exact_product(x_RK: torch.Tensor, stack: ScaledWeight, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product and the sum of its terms' absolute values, both in float64."""
    groups = torch.arange(x_RK.shape[1], device=x_RK.device) // stack.group_size
    weight = (stack.weight.double() * stack.scale.double()[:, groups]).unflatten(0, (len(counts), -1))
    experts = torch.repeat_interleave(torch.tensor(counts)).to(x_RK.device)
    terms = x_RK.double()[:, None, :] * weight[experts]
    return terms.sum(dim=2), terms.abs().sum(dim=2)
