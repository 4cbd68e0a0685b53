"""Measures the part that gpt-oss has and other models have not, alone: experts in MXFP4.

A whole layer of gpt-oss-120b. Tokens are distributed evenly over its experts: one token reads four of them, 64 tokens
read all, and a prompt multiplies each by many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from benchmarks.gpu_parts.deepseek import PREFILL_TARGET, rate_of_bytes, rate_of_operations, timed
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import FourBitSizes
from benchmarks.gpu_parts.timing import cache_bytes, num_sets
from engine.kernels.gpu import why_no_triton
from engine.models.expert_products import ExpertProducts
from engine.models.four_bit_experts import BIAS, GROUP, ClampedGate, FourBitStack

FEW_ROWS = 32
"""Rows of an expert up to which reading its weights takes longer than multiplying by them."""

MakeExperts = Callable[[FourBitSizes, torch.dtype, Setting], ExpertProducts]


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    for num_tokens in setting.sizes.four_bits.nums_tokens:
        yield expert_row(setting, setting.sizes.four_bits, num_tokens, "MXFP4", 1 / 2 + 1 / GROUP, random_experts)


def expert_row(
    setting: Setting, sizes: FourBitSizes, num_tokens: int, form: str, item_bytes: float, make: MakeExperts
) -> Row:
    """All experts of a layer: gate and up, their gate, down. `item_bytes`: bytes of a weight in that form."""
    num_rows, num_experts = num_tokens * sizes.experts_per_token, sizes.num_experts
    dtype = dtype_of(setting)
    x_RD, ends_E = random_rows(sizes, num_tokens, dtype, setting)
    num_numbers = 3 * sizes.hidden_size * sizes.expert_size
    num_bytes = int(min(num_rows, num_experts) * num_numbers * item_bytes)
    all_experts = [make(sizes, dtype, setting) for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))]
    seconds = timed([lambda experts=experts: experts(x_RD, ends_E) for experts in all_experts], setting)
    what = f"experts in {form}, {num_experts} of {sizes.expert_size}, {num_tokens} tokens"
    if num_rows <= num_experts * FEW_ROWS:
        return rate_of_bytes(what, num_bytes, seconds, setting)
    return rate_of_operations(what, num_rows * 2 * num_numbers, seconds, PREFILL_TARGET, setting)


def dtype_of(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.device == "cuda" else torch.float32  # which Triton's interpreter supports


def random_rows(
    sizes: FourBitSizes, num_tokens: int, dtype: torch.dtype, setting: Setting
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows sorted by expert, the end of each expert's rows); all experts have the same number of rows."""
    num_rows, num_experts = num_tokens * sizes.experts_per_token, sizes.num_experts
    counts = [num_rows // num_experts + (e < num_rows % num_experts) for e in range(num_experts)]
    ends_E = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=setting.device)
    return torch.randn(num_rows, sizes.hidden_size, device=setting.device).to(dtype), ends_E


def random_experts(sizes: FourBitSizes, dtype: torch.dtype, setting: Setting) -> ExpertProducts:
    from engine.kernels.gpu.parts import TritonFourBitExperts

    def stack(num_outputs: int, num_inputs: int) -> FourBitStack:
        shape = sizes.num_experts, num_outputs
        pairs = torch.randint(256, (*shape, num_inputs // 2), dtype=torch.uint8, device=setting.device)
        scales = torch.full((*shape, num_inputs // GROUP), BIAS - 7, dtype=torch.uint8, device=setting.device)
        return FourBitStack(pairs, scales, torch.zeros(shape, dtype=dtype, device=setting.device))

    gate_up, down = stack(2 * sizes.expert_size, sizes.hidden_size), stack(sizes.hidden_size, sizes.expert_size)
    return TritonFourBitExperts(gate_up, down, ClampedGate(alpha=1.702, limit=7.0))
