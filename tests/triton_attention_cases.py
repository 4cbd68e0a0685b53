"""Launches of the attention kernels with the sizes of various models, by case name: see triton_compile.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from triton_compiler import name_of, now

from engine.attention.base import StepLayout
from engine.attention.triton_backend import TritonAttention
from engine.attention.triton_invariant import InvariantTritonAttention
from engine.attention.triton_latents import TritonLatentAttention
from engine.kernels.gpu.rotate import rotate_and_store
from engine.kernels.gpu.unfolded import UnfoldedConfig, attend_unfolded
from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding
from engine.models.rope_config import RopeConfig
from engine.models.scores import Scores

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, MAX_CONTEXT = 32, 8, 16, 8192


def compile_attention(
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    kv_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    make: type[TritonAttention | InvariantTritonAttention] = TritonAttention,
) -> None:
    kv_dtype = kv_dtype or dtype
    backend = make(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE,
        dtype=name_of(dtype), kv_dtype=name_of(kv_dtype), device="cpu", kind=now.kind,
    )  # fmt: skip
    kv = torch.zeros(1, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=kv_dtype)
    backend.attend(
        torch.zeros(4, num_heads, head_dim, dtype=dtype),
        kv,
        backend.prepare(mixed_layout()),
        Scores.of(head_dim, window, soft_cap),
        torch.zeros(num_heads) if has_sinks else None,
    )


def compile_latents(num_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """DeepSeek's: latents of 512 numbers, rotated keys of 64."""
    backend = TritonLatentAttention(
        num_heads=num_heads, kv_lora_rank=512, block_size=BLOCK_SIZE, dtype=name_of(dtype), kv_dtype=name_of(kv_dtype),
        device="cpu", kind=now.kind,
    )  # fmt: skip
    plan = backend.prepare(mixed_layout())
    kv = torch.zeros(1, 1, 1, BLOCK_SIZE, 576, dtype=kv_dtype)
    norm, up_key = RMSNorm(torch.ones(512, dtype=dtype), 1e-6), torch.zeros(num_heads, 128, 512, dtype=dtype)
    rotary = RotaryEmbedding(RopeConfig(theta=10_000.0, rope_type="default"), 64, 8, dtype, "cpu")
    backend.project(
        torch.zeros(4, num_heads * 192, dtype=dtype), torch.zeros(4, 576, dtype=dtype), kv, plan,
        LatentProjection(norm, HeadProducts(up_key), HeadProducts(up_key.mT)), rotary.select(torch.arange(4)),
    )  # fmt: skip
    backend.attend_absorbed(torch.zeros(4, num_heads, 576, dtype=dtype), kv, plan, 0.1)


def compile_unfolded(
    dtype: torch.dtype, query_dim: int = 128, rotated_dim: int = 64, value_dim: int = 128, latent_dim: int = 512
) -> None:
    """The sizes are DeepSeek's by default."""
    num_heads = 16
    k, v = (torch.zeros(num_heads, 128, size, dtype=dtype) for size in (query_dim, value_dim))
    attend_unfolded(
        torch.zeros(4, num_heads * (query_dim + rotated_dim), dtype=dtype),
        torch.zeros(4, num_heads, rotated_dim, dtype=dtype), k, v,
        torch.zeros(128, latent_dim + rotated_dim, dtype=dtype), torch.zeros(1, 6, dtype=torch.int32),
        torch.zeros(4, num_heads, value_dim, dtype=dtype), torch.zeros(1), scale=0.1,
        config=UnfoldedConfig.of(now.kind, dtype.itemsize),
    )  # fmt: skip


def mixed_layout() -> StepLayout:
    """Return a step with a decoding sequence of the longest context and a prompt of three tokens."""
    return StepLayout(
        query_lens=np.array([1, 3]), context_lens=np.array([MAX_CONTEXT, 3]),
        block_tables=np.zeros((2, MAX_CONTEXT // BLOCK_SIZE), dtype=np.int64), slot_mapping=np.zeros(4, dtype=np.int64),
        num_decodes=1,
    )  # fmt: skip


def compile_rotation(
    head_dim: int, dtype: torch.dtype, has_norms: bool, kv_dtype: torch.dtype, num_rotated: int | None = None
) -> None:
    kv = torch.zeros(1, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, dtype=kv_dtype)
    qkv, one = torch.zeros(2, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype)
    cos_sin = (torch.ones(2, 1, head_dim if num_rotated is None else num_rotated, dtype=dtype),) * 2
    slots = torch.zeros(2, dtype=torch.int64)
    rotate_and_store(qkv, cos_sin, (one, one) if has_norms else None, 1e-6, kv, slots, num_heads=NUM_HEADS)


def attention_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for head_dim, dtype, window, soft_cap in (
        (8, torch.bfloat16, 0, 0.0),
        (80, torch.float16, 0, 30.0),
        (96, torch.bfloat16, 0, 0.0),
        (128, torch.bfloat16, 0, 0.0),
        (128, torch.bfloat16, 4096, 50.0),
        (192, torch.bfloat16, 0, 0.0),
        (256, torch.bfloat16, 0, 0.0),
        (256, torch.bfloat16, 4096, 50.0),
        (128, torch.float32, 0, 0.0),
        (256, torch.float32, 0, 0.0),
        (512, torch.bfloat16, 0, 0.0),
        (512, torch.bfloat16, 4096, 50.0),
        (512, torch.float32, 0, 0.0),
    ):
        name = f"{head_dim} {name_of(dtype)}" + (f" window {window} cap" if window else "")
        cases[name] = partial(compile_attention, head_dim, dtype, window, soft_cap)
    cases["64 bfloat16 sinks"] = partial(compile_attention, 64, torch.bfloat16, 0, 0.0, has_sinks=True)  # gpt-oss's
    for head_dim in (64, 256):
        cases[f"{head_dim} bfloat16, 64 heads of a key's"] = partial(
            compile_attention, head_dim, torch.bfloat16, 0, 0.0, num_heads=64, num_kv_heads=1
        )
    for head_dim in (64, 128, 256, 512):
        cases[f"{head_dim} bfloat16, 8-bit pool"] = partial(
            compile_attention, head_dim, torch.bfloat16, 0, 0.0, torch.float8_e4m3fn
        )
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn) if head_dim <= 256 else ():
            cases[f"{head_dim} bfloat16, pool of {name_of(kv_dtype)}, batch invariant"] = partial(
                compile_attention, head_dim, torch.bfloat16, 4096, 50.0, kv_dtype, make=InvariantTritonAttention
            )
    for num_heads, dtype, kv_dtype in (
        (16, torch.bfloat16, torch.bfloat16),
        (20, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.bfloat16),
        (128, torch.float16, torch.float16),
        (16, torch.float32, torch.float32),
        (16, torch.bfloat16, torch.float8_e4m3fn),
        (32, torch.bfloat16, torch.float8_e4m3fn),
        (128, torch.bfloat16, torch.float8_e4m3fn),
    ):
        name = f"{num_heads} heads {name_of(dtype)}, pool of {name_of(kv_dtype)}"
        cases[name] = partial(compile_latents, num_heads, dtype, kv_dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases[f"{name_of(dtype)}, unfolded"] = partial(compile_unfolded, dtype)
    cases["bfloat16, unfolded, of other sizes"] = partial(compile_unfolded, torch.bfloat16, 96, 32, 80, 384)
    cases["plain"] = partial(compile_rotation, 128, torch.bfloat16, False, torch.bfloat16)
    cases["of a part of a head"] = partial(compile_rotation, 256, torch.bfloat16, False, torch.bfloat16, 64)
    cases["of none"] = partial(compile_rotation, 128, torch.bfloat16, False, torch.bfloat16, 0)
    cases["normed"] = partial(compile_rotation, 128, torch.bfloat16, True, torch.bfloat16)
    cases["8-bit pool"] = partial(compile_rotation, 128, torch.bfloat16, True, torch.float8_e4m3fn)
    return cases
