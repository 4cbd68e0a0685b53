"""The memory-bound operations between a layer's products, in one pass each: residual + RMS norm, SiLU or GELU * up.

Shapes: T tokens, D hidden, F intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.layers import Activation

MAX_HIDDEN_SIZE = 32768
"""A row is held in registers."""


def add_rms_norm(x_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x + delta, as `engine.layers.RMSNorm` computes it; `x_TD` is overwritten with x + delta. All
    contiguous."""
    out_TD = torch.empty_like(x_TD)
    size = x_TD.shape[-1]
    block = triton.next_power_of_2(size)
    _norm_kernel[(x_TD.numel() // size,)](
        x_TD, x_TD if delta_TD is None else delta_TD, weight_D, out_TD, eps,
        SIZE=size, HAS_DELTA=delta_TD is not None, ROUNDS_FIRST=weight_D.dtype == x_TD.dtype, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out_TD


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row). ROUNDS_FIRST: rounds before the multiplication by the weight, too."""
    dims = tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + dims
    weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0)  # early: it would wait for the sum otherwise
    x = tl.load(x_ptr + offsets, mask=is_dim, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta_ptr + offsets, mask=is_dim, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + offsets, x, mask=is_dim)
    h = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / SIZE + eps)
    y = h * scale
    if ROUNDS_FIRST:
        y = y.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + offsets, (y * weight.to(tl.float32)).to(x.dtype), mask=is_dim)


def multiply_gated(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up of [..., 2F], gate first, contiguous: [..., F]. In float32, rounded once."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = min(triton.next_power_of_2(size), 1024)
    _activation_kernel[(out.numel() // size, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, IS_GELU=activation == "gelu_tanh", BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _activation_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, tile of it). GELU by tanh is gate * sigmoid(2 z), where tanh takes z."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
    at = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    y = gate / (1 + tl.exp(-at)) * up
    tl.store(out_ptr + row * SIZE + dims, y.to(out_ptr.dtype.element_ty), mask=is_dim)
