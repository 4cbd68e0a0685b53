"""The product of one row with a 16-bit or 8-bit weight, computed row by row of the weight and without tensor cores.

With one row, nothing can be shared: the time is bound by the bytes of the weight. A program multiplies a few rows of
the weight by all of x, 16 bytes per load. The sums of a row's elements stay separate until the end, so that loads wait
only for memory. On an H100 this reads Llama-3.1-8B's weights at 2.6 to 3.2 TB/s where cuBLAS reads at 2.2 to 2.9
(docs/gpu.md): a decoding step of one sequence takes a tenth less time.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.eight_bits import zero_of


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    """Sizes of a launch, the best of those tried on an H100 (`products-variants` of benchmarks/gpu.py tries others)."""

    block_n: int = 4
    block_k: int = 1024
    num_warps: int = 8

    @staticmethod
    def of(itemsize: int) -> OneRowConfig:
        """Sizes for a weight with numbers of `itemsize` bytes: each thread loads the same number of bytes per iteration
        for any."""
        return OneRowConfig(block_k=2048 // itemsize)


def one_row_product(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    scale_N: torch.Tensor | None = None,
    config: OneRowConfig | None = None,
) -> torch.Tensor:
    """x times the weight, each output times its scale, plus the bias: [1, N]. All contiguous; the bias has x's dtype,
    the weight that or an 8-bit one. Added up in float32, rounded once."""
    num_outputs, num_inputs = weight_NK.shape
    config = config or OneRowConfig.of(weight_NK.itemsize)
    out_1N = x_1K.new_empty(1, num_outputs)
    _one_row_kernel[(triton.cdiv(num_outputs, config.block_n),)](
        x_1K, weight_NK, bias_N, scale_N, out_1N, SIZE_N=num_outputs, SIZE_K=num_inputs, ZERO=zero_of(weight_NK),
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip
    return out_1N


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    out_ptr,
    SIZE_N: tl.constexpr,
    SIZE_K: tl.constexpr,
    ZERO: tl.constexpr,  # of the weight's type
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (rows of the weight)."""
    outs_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins_K = tl.arange(0, BLOCK_K)
    is_out_N = outs_N < SIZE_N
    # Outputs beyond the last one are computed from the last one, and not stored.
    weight_ptrs = weight_ptr + tl.minimum(outs_N, SIZE_N - 1)[:, None].to(tl.int64) * SIZE_K + ins_K[None, :]
    acc_NK = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K == 0:
            weight_NK = tl.load(weight_ptrs + start, eviction_policy="evict_first")
            x_K = tl.load(x_ptr + start + ins_K)
        else:
            is_in_K = start + ins_K < SIZE_K
            weight_NK = tl.load(weight_ptrs + start, mask=is_in_K[None, :], other=ZERO, eviction_policy="evict_first")
            x_K = tl.load(x_ptr + start + ins_K, mask=is_in_K, other=0.0)
        acc_NK += weight_NK.to(tl.float32) * x_K.to(tl.float32)[None, :]
    sum_N = tl.sum(acc_NK, 1)
    if scale_ptr is not None:
        sum_N *= tl.load(scale_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        sum_N += tl.load(bias_ptr + outs_N, mask=is_out_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs_N, sum_N.to(out_ptr.dtype.element_ty), mask=is_out_N)
