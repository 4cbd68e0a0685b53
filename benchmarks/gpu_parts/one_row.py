"""A product of one row with a weight, row by row of the weight and without tensor cores: tried beside cuBLAS's, and not
in use.

With one row there is nothing to share: a product is bound by the bytes of its weight, and cuBLAS is known to leave some
of the bandwidth unused there. A program multiplies a few rows of the weight with all of x, 16 bytes a load; the sums of
a row's pieces stay apart until the end, so that loads wait for nothing but memory.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from benchmarks.gpu_parts.runner import Setting
from benchmarks.gpu_parts.timing import cache_bytes, num_sets
from benchmarks.gpu_parts.variants import Job

VARIANTS: tuple[dict[str, int], ...] = (
    {"block_n": 2}, {"block_n": 8}, {"block_k": 512}, {"block_k": 2048}, {"num_warps": 2}, {"num_warps": 8},
)  # fmt: skip
"""What differs from `OneRowConfig()`."""


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    block_n: int = 4
    block_k: int = 1024
    num_warps: int = 4


def one_row_product(x_1K: torch.Tensor, weight_NK: torch.Tensor, config: OneRowConfig) -> torch.Tensor:
    """x times the weight, [1, N]. Both contiguous, of one dtype."""
    num_outputs, num_inputs = weight_NK.shape
    out_1N = x_1K.new_empty(1, num_outputs)
    _one_row_kernel[(triton.cdiv(num_outputs, config.block_n),)](
        x_1K, weight_NK, out_1N, SIZE_N=num_outputs, SIZE_K=num_inputs,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip
    return out_1N


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (rows of the weight)."""
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins_K = tl.arange(0, BLOCK_K)
    is_out_N = outs_N < SIZE_N
    # What lies beyond the last output is computed from the last one, and not stored.
    weight_ptrs = weight_ptr + tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    acc_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            weight_NK = tl.load(weight_ptrs + start, eviction_policy="evict_first")
            x_K = tl.load(x_ptr + start + ins_K)
        else:
            is_in_K = start + ins_K < SIZE_K
            weight_NK = tl.load(weight_ptrs + start, mask=is_in_K[None, :], other=0.0, eviction_policy="evict_first")
            x_K = tl.load(x_ptr + start + ins_K, mask=is_in_K, other=0.0)
        acc_NK += weight_NK.to(tl.float32) * x_K.to(tl.float32)[None, :]
    tl.store(out_ptr + outs_N, tl.sum(acc_NK, 1).to(out_ptr.dtype.element_ty), mask=is_out_N)


def one_row_job(
    what: str, num_outputs: int, num_inputs: int, dtype: torch.dtype, limit: float | None, setting: Setting
) -> Job:
    num_bytes = num_outputs * num_inputs * dtype.itemsize

    def launches(config: OneRowConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        x_1K = torch.randn(1, num_inputs, device=setting.device).to(dtype)
        weights = [
            torch.randn(num_outputs, num_inputs, device=setting.device).to(dtype)
            for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
        ]
        works: list[Callable[[], object]] = [
            lambda weight=weight: one_row_product(x_1K, weight, config)  # type: ignore[misc]
            for weight in weights
        ]
        return works, one_row_product(x_1K, weights[0], config)

    return Job(what=what, amount=num_bytes / 1e9, unit="GB/s", limit=limit, target=None, launches=launches)
