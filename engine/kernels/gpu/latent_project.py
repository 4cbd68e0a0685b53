"""The operations before attention to latents (`latents.py`), in one pass: the norm and rotation of a step's latents and
keys, their write into the pool, and the rotation of its queries.

Shapes: T tokens, N query heads, Q + P numbers of a head's query, C of a latent, P of a rotated key, R = C + P; A heads
of a program; C and P padded to powers of two. A layer of the pool: [block, 1, 1, slot, R].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.float8 import MAX_FLOAT8
from engine.kernels.gpu.rotate import VALUES_PER_PROGRAM, for_pool
from engine.layers import CosSin


def rotate_and_store_latents(
    q_TX: torch.Tensor,
    latent_TR: torch.Tensor,
    cos_sin: CosSin,
    norm_weight: torch.Tensor,
    eps: float,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    out_TNX: torch.Tensor,
) -> None:
    """Write normed latents and their rotated keys into the pool, and rotated queries to the last P numbers of
    `out_TNX`, which may have other numbers before them.

    `q_TX`: [T, N * (Q + P)], contiguous. `latent_TR`: rows contiguous. `cos_sin`: [T, 1, P] each, contiguous, the sines
    with the sign of `RotaryEmbedding`. `norm_weight`: [C]. `kv`: a layer of the pool; 8-bit floats saturate.
    `slot_mapping`: [T] int64; nothing is written for slots below 0. Computes in float32, rounded as in `rotate.py`.
    """
    num_tokens, num_heads, size = out_TNX.shape
    latent_dim = len(norm_weight)
    rotated = latent_TR.shape[1] - latent_dim
    block_p = triton.next_power_of_2(rotated)
    heads_per_program = max(VALUES_PER_PROGRAM // block_p, 1)
    _latent_project_kernel[(num_tokens, triton.cdiv(num_heads, heads_per_program) + 1)](
        q_TX, latent_TR, *cos_sin, norm_weight, kv, slot_mapping, out_TNX, latent_TR.stride(0), eps,
        NUM_HEADS=num_heads, QUERY=q_TX.shape[1] // max(num_heads, 1), LATENT=latent_dim, ROTATED=rotated, OUT=size,
        MAX_FLOAT8=MAX_FLOAT8, BLOCK_A=heads_per_program, BLOCK_C=triton.next_power_of_2(latent_dim), BLOCK_P=block_p,
        num_warps=4,
    )  # fmt: skip


def store_latents(
    latent_TR: torch.Tensor,
    cos_sin: CosSin,
    norm_weight: torch.Tensor,
    eps: float,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`rotate_and_store_latents` without queries."""
    no_heads = latent_TR.new_empty(len(latent_TR), 0, latent_TR.shape[1])
    rotate_and_store_latents(no_heads.flatten(1), latent_TR, cos_sin, norm_weight, eps, kv, slot_mapping, no_heads)


@triton.jit(do_not_specialize=["latent_stride"])
def _latent_project_kernel(
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    kv_ptr,
    slots_ptr,
    out_ptr,
    latent_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    OUT: tl.constexpr,
    MAX_FLOAT8: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Program (token, tile of A of its N heads); the last program of a token handles its latent and key."""
    token = tl.program_id(0).to(tl.int64)
    dims_P = tl.arange(0, BLOCK_P)
    # A rotation combines each number with the one half a head further on.
    others_P = (dims_P + ROTATED // 2) % ROTATED
    is_dim_P = dims_P < ROTATED
    cos_P = tl.load(cos_ptr + token * ROTATED + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)
    sin_P = tl.load(sin_ptr + token * ROTATED + dims_P, mask=is_dim_P, other=0.0).to(tl.float32)
    if tl.program_id(1) * BLOCK_A < NUM_HEADS:
        heads_A = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
        is_real_AP = (heads_A < NUM_HEADS)[:, None] & is_dim_P[None, :]
        head_ptrs = q_ptr + (token * NUM_HEADS + heads_A)[:, None] * QUERY + (QUERY - ROTATED)
        a_AP = tl.load(head_ptrs + dims_P[None, :], mask=is_real_AP, other=0.0)
        b_AP = tl.load(head_ptrs + others_P[None, :], mask=is_real_AP, other=0.0)
        y_AP = a_AP.to(tl.float32) * cos_P[None, :] + b_AP.to(tl.float32) * sin_P[None, :]
        out_ptrs = out_ptr + (token * NUM_HEADS + heads_A)[:, None] * OUT + (OUT - ROTATED) + dims_P[None, :]
        tl.store(out_ptrs, y_AP.to(a_AP.dtype), mask=is_real_AP)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    row_ptr, kv_row_ptr = latent_ptr + token * latent_stride, kv_ptr + slot * (LATENT + ROTATED)
    dims_C = tl.arange(0, BLOCK_C)
    is_dim_C = dims_C < LATENT
    x_C = tl.load(row_ptr + dims_C, mask=is_dim_C, other=0.0)
    h_C = x_C.to(tl.float32)
    h_C = (h_C * tl.rsqrt(tl.sum(h_C * h_C, 0) / LATENT + eps)).to(x_C.dtype).to(tl.float32)
    weight_C = tl.load(weight_ptr + dims_C, mask=is_dim_C, other=0.0).to(tl.float32)
    tl.store(kv_row_ptr + dims_C, for_pool((h_C * weight_C).to(x_C.dtype), kv_ptr, MAX_FLOAT8), mask=is_dim_C)
    a_P = tl.load(row_ptr + LATENT + dims_P, mask=is_dim_P, other=0.0)
    b_P = tl.load(row_ptr + LATENT + others_P, mask=is_dim_P, other=0.0)
    y_P = (a_P.to(tl.float32) * cos_P + b_P.to(tl.float32) * sin_P).to(a_P.dtype)
    tl.store(kv_row_ptr + LATENT + dims_P, for_pool(y_P, kv_ptr, MAX_FLOAT8), mask=is_dim_P)
