"""Measures experts in int4 alone: 4-bit weights as in a mixture's checkpoint, with a float16 scale for each 128 inputs.

A whole layer of Qwen3-30B-A3B, with the same number of rows for each expert, as in gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_parts.gpt_oss import dtype_of, expert_row, random_rows
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import FourBitSizes
from engine.int4_weight import Int4Weight
from engine.kernels.gpu import why_no_triton
from engine.models.expert_products import ExpertProducts, ScaledExperts

GROUP_SIZE = 128
MAX_ERROR = 1e-2
"""Relative error, from another order of bfloat16 sums and from rounding between products."""


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    sizes = setting.sizes.int4_experts
    yield error_row(setting, sizes)
    item_bytes = 1 / 2 + 8 / min(GROUP_SIZE, sizes.expert_size)
    for num_tokens in sizes.nums_tokens:
        yield expert_row(setting, sizes, num_tokens, "int4", item_bytes, random_experts)


def error_row(setting: Setting, sizes: FourBitSizes) -> Row:
    """Compares with the library's products, for which each expert's weight is converted."""
    from engine.kernels.gpu.parts import TritonInt4Experts

    stacks = random_stacks(sizes, dtype_of(setting), setting)
    squares = torch.zeros(2, dtype=torch.float64)
    for num_tokens in sizes.nums_tokens:
        x_RD, ends_E = random_rows(sizes, num_tokens, dtype_of(setting), setting)
        expected_RD = ScaledExperts(*stacks)(x_RD, ends_E).double()
        off_RD = TritonInt4Experts(*stacks)(x_RD, ends_E).double() - expected_RD
        squares += torch.stack([each.square().sum().cpu() for each in (off_RD, expected_RD)])
    error = float((squares[0] / squares[1]).sqrt())
    return Row(what="error of experts in int4", value=error, unit="error", at_most=MAX_ERROR, is_check=True)


def random_experts(sizes: FourBitSizes, dtype: torch.dtype, setting: Setting) -> ExpertProducts:
    from engine.kernels.gpu.parts import TritonInt4Experts

    return TritonInt4Experts(*random_stacks(sizes, dtype, setting))


def random_stacks(sizes: FourBitSizes, dtype: torch.dtype, setting: Setting) -> tuple[Int4Weight, Int4Weight]:
    """(gate and up, down)"""

    def stack(num_outputs: int, num_inputs: int) -> Int4Weight:
        shape = sizes.num_experts * num_outputs, num_inputs // min(GROUP_SIZE, num_inputs)
        packed = torch.randint(256, (shape[0], num_inputs // 2), dtype=torch.uint8, device=setting.device)
        # Values of about 1 / sqrt(inputs); not all of them exact in bfloat16.
        scale = (torch.rand(shape, device=setting.device) + 0.5).half().float() * num_inputs**-0.5 / 4
        return Int4Weight(packed, scale, -8 * scale, dtype)

    return stack(2 * sizes.expert_size, sizes.hidden_size), stack(sizes.hidden_size, sizes.expert_size)
