"""The operations between the product of q, k, v and attention: norms of heads, rotary positions, and the write into the
pool.

One pass over the product, where plain torch makes eight, or 25 with norms. Computes in float32, rounded where
transformers rounds a norm, and at the end: plain torch in 16 bits also rounds both products of a rotation.

Shapes: T tokens, N query heads, K key/value heads, H head dim. A layer of the pool: [block, 2, K, slot, H].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.float8 import MAX_FLOAT8
from engine.layers import CosSin, HeadProjection

VALUES_PER_PROGRAM = 1024


def project_heads(
    qkv_TX: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    heads: HeadProjection,
    cos_sin: CosSin,
) -> torch.Tensor:
    """Apply `heads` to `qkv_TX` [T, (N + 2K) * H]: `rotate_and_store` with a layer's own norms."""
    q_norm, k_norm = heads.q_norm, heads.k_norm
    norm_weights = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
    eps = 0.0 if q_norm is None else q_norm.eps
    return rotate_and_store(
        qkv_TX.contiguous(), cos_sin, norm_weights, eps, kv, slot_mapping, num_heads=heads.num_heads
    )


def rotate_and_store(
    qkv_TX: torch.Tensor,
    cos_sin: CosSin,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
) -> torch.Tensor:
    """Return q [T, N, H], normed (if weights [H] for q and k are given) and rotated; write k, treated likewise, and v
    into the pool.

    `qkv_TX`: [T, (N + 2K) * H], contiguous. `cos_sin`: see `CosSin`; contiguous. `kv`: a layer of the pool, contiguous;
    8-bit floats saturate. `slot_mapping`: [T] int64, block * block size + slot; nothing is written for slots below 0.
    """
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    num_tokens, block_h = len(qkv_TX), triton.next_power_of_2(head_dim)
    heads_per_program = max(VALUES_PER_PROGRAM // block_h, 1)
    q_TNH = qkv_TX.new_empty(num_tokens, num_heads, head_dim)
    q_weight, k_weight = norm_weights or (qkv_TX, qkv_TX)  # not read without norms
    _rotate_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads_per_program))](
        qkv_TX, *cos_sin, q_weight, k_weight, kv, slot_mapping, q_TNH, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTATED=cos_sin[0].shape[-1],
        SLOTS=block_size, HAS_NORM=norm_weights is not None, MAX_FLOAT8=MAX_FLOAT8, BLOCK_A=heads_per_program,
        BLOCK_H=block_h, num_warps=4,
    )  # fmt: skip
    return q_TNH


@triton.jit
def _rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    kv_ptr,
    slots_ptr,
    q_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAX_FLOAT8: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program (token, tile of A of its N + 2K heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads_A = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    dims_H = tl.arange(0, BLOCK_H)
    is_dim_H, is_turned_H = dims_H < HEAD_DIM, dims_H < ROTATED
    others_H = dims_H
    if ROTATED:  # a rotation combines each number with the one half of them further on
        others_H = tl.where(is_turned_H, (dims_H + ROTATED // 2) % ROTATED, dims_H)
    is_q_A = heads_A < NUM_HEADS
    is_v_A = heads_A >= NUM_HEADS + NUM_KV_HEADS
    is_real_AH = (heads_A < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim_H[None, :]
    # All loads come before the first number is needed, and in one layout: otherwise each would wait for the one before.
    slot = tl.load(slots_ptr + token)
    angles_AH = tl.zeros([BLOCK_A, 1], dtype=tl.int32) + token * ROTATED + dims_H[None, :]
    is_turned_AH = is_real_AH & is_turned_H[None, :]
    cos_AH = tl.load(cos_ptr + angles_AH, mask=is_turned_AH, other=1.0).to(tl.float32)
    sin_AH = tl.load(sin_ptr + angles_AH, mask=is_turned_AH, other=0.0).to(tl.float32)
    head_ptrs = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads_A)[:, None] * HEAD_DIM
    x_AH = tl.load(head_ptrs + dims_H[None, :], mask=is_real_AH, other=0.0)
    a_AH = x_AH.to(tl.float32)
    b_AH = tl.load(head_ptrs + others_H[None, :], mask=is_real_AH, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale_A = tl.rsqrt(tl.sum(a_AH * a_AH, 1) / HEAD_DIM + eps)
        a_AH = _weigh(a_AH, scale_A, q_weight_ptr, k_weight_ptr, dims_H, is_dim_H, is_q_A, x_AH.dtype)
        b_AH = _weigh(b_AH, scale_A, q_weight_ptr, k_weight_ptr, others_H, is_dim_H, is_q_A, x_AH.dtype)
    turned_AH = tl.where(is_turned_H[None, :], a_AH * cos_AH + b_AH * sin_AH, a_AH)  # infinity times 0 is no number
    y_AH = turned_AH.to(x_AH.dtype)
    y_AH = tl.where(is_v_A[:, None], x_AH, y_AH)

    q_ptrs = q_ptr + (token * NUM_HEADS + heads_A)[:, None] * HEAD_DIM + dims_H[None, :]
    tl.store(q_ptrs, y_AH, mask=is_real_AH & is_q_A[:, None])
    if slot >= 0:
        # In the pool, a block's key heads are followed by its value heads, as in the product.
        rows_A = (slot // SLOTS * 2 * NUM_KV_HEADS + heads_A - NUM_HEADS) * SLOTS + slot % SLOTS
        kv_ptrs = kv_ptr + rows_A[:, None] * HEAD_DIM + dims_H[None, :]
        tl.store(kv_ptrs, for_pool(y_AH, kv_ptr, MAX_FLOAT8), mask=is_real_AH & (heads_A >= NUM_HEADS)[:, None])


@triton.jit
def _weigh(x_AH, scale_A, q_weight_ptr, k_weight_ptr, dims_H, is_dim_H, is_q_A, dtype: tl.constexpr):
    """RMS norm of heads with given scales: rounded before the multiplication by the weight and after it, as in
    `RMSNorm`."""
    q_weight_H = tl.load(q_weight_ptr + dims_H, mask=is_dim_H, other=0.0).to(tl.float32)
    k_weight_H = tl.load(k_weight_ptr + dims_H, mask=is_dim_H, other=0.0).to(tl.float32)
    weight_AH = tl.where(is_q_A[:, None], q_weight_H[None, :], k_weight_H[None, :])
    return ((x_AH * scale_A[:, None]).to(dtype).to(tl.float32) * weight_AH).to(dtype).to(tl.float32)


@triton.jit
def for_pool(x, kv_ptr, MAX_FLOAT8: tl.constexpr):
    """Convert x to the type of the pool."""
    if kv_ptr.dtype.element_ty == tl.float8e4nv:
        # A comparison with NaN is false: NaN stays NaN, as in plain torch.
        z = x.to(tl.float32)
        z = tl.where(z > MAX_FLOAT8, MAX_FLOAT8, tl.where(z < -MAX_FLOAT8, -MAX_FLOAT8, z))
        return z.to(tl.float8e4nv)
    else:
        return x
