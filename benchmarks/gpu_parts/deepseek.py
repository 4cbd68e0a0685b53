"""Measures the parts that DeepSeek-V3 has and other models have not, alone: attention to latents, and experts.

Attention reads a latent once for all heads. With 16 heads (DeepSeek-V2-Lite, or a rank of eight of V3), decoding is
bound by bytes; with 128 heads by operations. So are prompts, which are computed in both forms. Experts are one rank's
part of a layer of V3, as stored in 8 bits with a scale for each group of inputs, and in bfloat16. Tokens are
distributed evenly over them, so that a decoding step reads every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import (
    LatentSizes,
    expert_flop,
    expert_numbers,
    latent_flop,
    unfolded_flop,
    unfolding_flop,
)
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of
from engine.attention.base import StepLayout
from engine.attention.choice import GROUPED_MAJORS
from engine.attention.latent_forms import Unfolding
from engine.float8 import why_no_float8
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding
from engine.models.expert_products import ExpertProducts, PlainExperts
from engine.models.rope_config import RopeConfig
from engine.scaled_weight import ScaledWeight

if TYPE_CHECKING:
    from engine.attention.triton_latents import TritonLatentAttention

BLOCK_SIZE = 16
GROUP_SIZE = 128
DECODE_TARGET, PREFILL_TARGET = 0.8, 0.5
"""Targets as shares of the copy, and of the products: those of the same work in other models."""
FEW_HEADS = 32
"""Up to this many heads, the attention of a decoding token reads longer than it computes."""


def measure(setting: Setting) -> Iterator[Row]:
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    sizes = setting.sizes.latents
    # Triton's interpreter does not compute bfloat16.
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    for num_heads in sizes.nums_heads:
        yield decode_row(setting, dtype, sizes, num_heads)
        yield prefill_row(setting, dtype, sizes, num_heads)
        yield unfolded_row(setting, dtype, sizes, num_heads)
    capability = torch.cuda.get_device_capability() if setting.device == "cuda" else None
    forms = [torch.int8 if capability is not None and why_no_float8(capability) else torch.float8_e4m3fn]
    if capability is None or capability[0] in GROUPED_MAJORS:  # elsewhere torch waits in it: it cannot be recorded
        forms.append(dtype)
    for num_tokens in sizes.expert_tokens:
        for form in forms:
            yield expert_row(setting, dtype, sizes, num_tokens, form)


def decode_row(setting: Setting, dtype: torch.dtype, sizes: LatentSizes, num_heads: int) -> Row:
    num_seqs, context = sizes.decode
    num_bytes = num_seqs * context * sizes.latent_dim * dtype.itemsize
    works = [
        attention_work(setting, dtype, sizes, num_heads, [1] * num_seqs, [context] * num_seqs)
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    seconds = timed(works, setting)
    what = f"decode attention to latents {num_seqs} x {context}, {num_heads} heads"
    if num_heads <= FEW_HEADS:
        return rate_of_bytes(what, num_bytes, seconds, setting)
    return rate_of_operations(what, num_seqs * context * latent_flop(sizes, num_heads), seconds, None, setting)


def prefill_row(setting: Setting, dtype: torch.dtype, sizes: LatentSizes, num_heads: int) -> Row:
    num_prompts, length = sizes.prefill
    work = attention_work(setting, dtype, sizes, num_heads, [length] * num_prompts, [length] * num_prompts)
    num_pairs = num_prompts * (length * (length + 1) // 2)
    what = f"prefill attention to latents {num_prompts} x {length}, {num_heads} heads"
    operations = num_pairs * latent_flop(sizes, num_heads)
    return rate_of_operations(what, operations, timed([work], setting), PREFILL_TARGET, setting)


def attention_work(
    setting: Setting,
    dtype: torch.dtype,
    sizes: LatentSizes,
    num_heads: int,
    query_lens: list[int],
    context_lens: list[int],
) -> Callable[[], object]:
    """One layer's attention of a step over random latents in scattered blocks, in the absorbed form."""
    backend, layout = backend_of(setting, dtype, sizes, num_heads, None), layout_of(query_lens, context_lens)
    kv, plan = random_pool(setting, dtype, sizes, layout), backend.prepare(layout)
    q = torch.randn(sum(query_lens), num_heads, sizes.latent_dim, device=setting.device).to(dtype)
    return lambda: backend.attend_absorbed(q, kv, plan, sizes.latent_dim**-0.5)


def unfolded_row(setting: Setting, dtype: torch.dtype, sizes: LatentSizes, num_heads: int) -> Row:
    """The same prompts with attention to unfolded keys and values of heads, including the products that unfold them,
    and norms and rotations."""
    num_prompts, length = sizes.prefill
    num_tokens, Q, P = num_prompts * length, sizes.query_dim, sizes.latent_dim - sizes.kv_lora_rank
    layout = layout_of([length] * num_prompts, [length] * num_prompts)
    backend = backend_of(setting, dtype, sizes, num_heads, Unfolding(1, Q, sizes.value_dim))
    kv, plan = random_pool(setting, dtype, sizes, layout), backend.prepare(layout)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=setting.device).mul_(shape[-1] ** -0.5).to(dtype)

    rotary = RotaryEmbedding(RopeConfig(theta=1e4, rope_type="default"), P, length, dtype, setting.device)
    norm = RMSNorm(torch.ones(sizes.kv_lora_rank, device=setting.device, dtype=dtype), 1e-6)
    up_key, up_value = (randn(num_heads, size, sizes.kv_lora_rank) for size in (Q, sizes.value_dim))
    heads = LatentProjection(norm, HeadProducts(up_key), HeadProducts(up_value.mT.contiguous()))
    q, latents = randn(num_tokens, num_heads * (Q + P)), randn(num_tokens, sizes.latent_dim)
    cos_sin = rotary.select(torch.arange(length, device=setting.device).repeat(num_prompts))
    seconds = timed([lambda: backend.attend(q, latents, kv, plan, heads, cos_sin, (Q + P) ** -0.5)], setting)
    num_pairs = num_prompts * (length * (length + 1) // 2)
    operations = num_pairs * unfolded_flop(sizes, num_heads) + num_tokens * unfolding_flop(sizes, num_heads)
    what = f"prefill attention unfolded {num_prompts} x {length}, {num_heads} heads"
    return rate_of_operations(what, operations, seconds, PREFILL_TARGET, setting)


def backend_of(
    setting: Setting, dtype: torch.dtype, sizes: LatentSizes, num_heads: int, unfolding: Unfolding | None
) -> TritonLatentAttention:
    from engine.attention.triton_latents import TritonLatentAttention

    return TritonLatentAttention(
        num_heads=num_heads,
        kv_lora_rank=sizes.kv_lora_rank,
        block_size=BLOCK_SIZE,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(dtype).removeprefix("torch."),
        device=setting.device,
        kind=gpu_kind(setting.device),
        unfolding=unfolding,
    )


def layout_of(query_lens: list[int], context_lens: list[int]) -> StepLayout:
    blocks_each = -(-max(context_lens) // BLOCK_SIZE)
    tables = np.random.default_rng(1).permutation(len(query_lens) * blocks_each).reshape(len(query_lens), -1)
    return StepLayout(
        query_lens=np.array(query_lens),
        context_lens=np.array(context_lens),
        block_tables=tables,
        slot_mapping=np.full(sum(query_lens), -1, dtype=np.int64),  # nothing is written
        num_decodes=sum(length == 1 for length in query_lens),
    )


def random_pool(setting: Setting, dtype: torch.dtype, sizes: LatentSizes, layout: StepLayout) -> torch.Tensor:
    num_blocks = layout.block_tables.size
    return torch.randn(num_blocks, 1, 1, BLOCK_SIZE, sizes.latent_dim, device=setting.device).to(dtype)


def expert_row(
    setting: Setting, dtype: torch.dtype, sizes: LatentSizes, num_tokens: int, weight_dtype: torch.dtype
) -> Row:
    """All experts of a layer: gate and up, their product, down."""
    num_rows = num_tokens * sizes.experts_per_token
    counts = np.full(sizes.num_experts, num_rows // sizes.num_experts)
    counts[: num_rows % sizes.num_experts] += 1
    ends_E = torch.tensor(list(accumulate(counts.tolist())), dtype=torch.int32, device=setting.device)
    x_RD = torch.randn(num_rows, sizes.hidden_size, device=setting.device).to(dtype)
    num_bytes = expert_numbers(sizes) * weight_dtype.itemsize * min(num_rows, sizes.num_experts) // sizes.num_experts
    all_experts = [
        random_experts(setting, dtype, sizes, weight_dtype)
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    works = [lambda experts=experts: experts(x_RD, ends_E) for experts in all_experts]
    seconds = timed(works, setting)
    kind = str(weight_dtype).removeprefix("torch.")
    what = f"experts {sizes.num_experts} of {sizes.expert_size}, {num_tokens} tokens, {kind}"
    if num_rows <= sizes.num_experts * FEW_HEADS:
        return rate_of_bytes(what, num_bytes, seconds, setting)
    return rate_of_operations(what, num_rows * expert_flop(sizes), seconds, PREFILL_TARGET, setting)


def random_experts(
    setting: Setting, dtype: torch.dtype, sizes: LatentSizes, weight_dtype: torch.dtype
) -> ExpertProducts:
    from engine.kernels.gpu.parts import TritonScaledExperts

    shapes = (2 * sizes.expert_size, sizes.hidden_size), (sizes.hidden_size, sizes.expert_size)
    weights = [
        torch.randn(sizes.num_experts, *shape, device=setting.device, dtype=dtype).mul_(shape[1] ** -0.5)
        for shape in shapes
    ]
    if weight_dtype == dtype:
        return PlainExperts(*weights)
    group = min(GROUP_SIZE, sizes.expert_size)
    stacks = [
        ScaledWeight(
            (weight * 64).to(weight_dtype).flatten(0, 1),
            torch.full((len(weight) * weight.shape[1], -(-weight.shape[2] // group)), 1 / 64, device=setting.device),
            group,
            dtype,
        )
        for weight in weights
    ]
    return TritonScaledExperts(*stacks)


def timed(works: list[Callable[[], object]], setting: Setting) -> float:
    return seconds_of(works, setting.device, num_rounds=3 if setting.is_tiny else 30)


def rate_of_bytes(what: str, num_bytes: int, seconds: float, setting: Setting) -> Row:
    limit = setting.known.get(floors.COPY)
    return Row(what=what, value=num_bytes / seconds / 1e9, unit="GB/s", limit=limit, target=DECODE_TARGET)


def rate_of_operations(what: str, operations: float, seconds: float, target: float | None, setting: Setting) -> Row:
    limit = setting.known.get(floors.PRODUCTS)
    return Row(what=what, value=operations / seconds / 1e12, unit="TFLOP/s", limit=limit, target=target)
