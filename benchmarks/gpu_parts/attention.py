"""Measures attention alone, in one layer of Llama-3.1-8B's shape; and, as a separate part, possible launch
configurations.

Decoding is bound by bytes: keys and values are read once. Prefill is bound by operations: two products for each pair of
a token and one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import attention_bytes, attention_flop
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of
from benchmarks.gpu_parts.variants import Choice, Job, rows_in_use, rows_of_variants
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.models.scores import Scores

if TYPE_CHECKING:
    from engine.kernels.gpu.decode import DecodeConfig
    from engine.kernels.gpu.prefill import PrefillConfig

BLOCK_SIZE = 16
FEW_BYTES = 16 << 20
"""Reading so few bytes takes only microseconds, mostly for the launch: there is no target for the share of the copy."""

DECODE_VARIANTS: tuple[dict[str, int], ...] = (
    {"num_stages": 3}, {"num_stages": 7}, {"num_warps": 2}, {"block_n": 32}, {"min_piece": 128}, {"min_piece": 512},
)  # fmt: skip
PREFILL_VARIANTS: tuple[dict[str, int], ...] = (
    {"num_stages": 3}, {"num_stages": 7}, {"block_n": 128, "num_stages": 2}, {"block_n": 128},
)  # fmt: skip
"""Differences from the configuration in use: those that came close to it on an H100 (docs/gpu-testing.md)."""


def measure(setting: Setting) -> Iterator[Row]:
    yield from rows_in_use(choices(setting), setting)
    if setting.device == "cuda":
        yield from (plain_prefill(setting, *size) for size in setting.sizes.prefill_attention)


def measure_variants(setting: Setting) -> Iterator[Row]:
    yield from rows_of_variants(choices(setting), setting)


def choices(setting: Setting) -> Iterator[Choice]:
    """Raises `NotRun` without Triton."""
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)
    from engine.kernels.gpu.decode import DecodeConfig
    from engine.kernels.gpu.prefill import PrefillConfig

    # Triton's interpreter does not compute bfloat16.
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    kind = gpu_kind(setting.device)
    decode = DecodeConfig.of(kind, head_dim, dtype.itemsize)
    for size in setting.sizes.decode_attention:
        yield Choice(decode_job(setting, dtype, *size), decode, DECODE_VARIANTS)
    prefill = PrefillConfig.of(kind, head_dim, dtype.itemsize, num_heads // num_kv_heads)
    for prompts in setting.sizes.prefill_attention:
        yield Choice(prefill_job(setting, dtype, *prompts), prefill, PREFILL_VARIANTS)


def random_pool(
    num_seqs: int, length: int, setting: Setting, dtype: torch.dtype, block_size: int = BLOCK_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of a pool, and block tables of sequences whose blocks are scattered in it."""
    _, num_kv_heads, head_dim = setting.sizes.attention_heads
    blocks_each = -(-length // block_size)
    num_blocks = num_seqs * blocks_each
    kv = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, device=setting.device).to(dtype)
    tables = torch.randperm(num_blocks, device=setting.device).int().view(num_seqs, blocks_each)
    return kv, tables


def decode_job(setting: Setting, dtype: torch.dtype, num_seqs: int, context: int, longest: int) -> Job:
    """Measures bytes of keys and values per second. `longest`: the context that the grid is for, as in a recorded
    step."""
    from engine.kernels.gpu.decode import paged_decode, partial_size

    device = setting.device
    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    scores = Scores.of(head_dim)
    num_bytes = num_seqs * attention_bytes(num_kv_heads, head_dim, context, dtype.itemsize)

    def launches(config: DecodeConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
        scratch = torch.empty(partial_size(num_seqs, num_heads, head_dim, longest, config), device=device)
        works: list[Callable[[], object]] = []
        outs = []
        for _ in range(num_sets(num_bytes, cache_bytes(device))):
            kv, tables = random_pool(num_seqs, context, setting, dtype)
            q = torch.randn(num_seqs, num_heads, head_dim, device=device).to(dtype)
            outs.append(torch.full_like(q, float("nan")))

            def work(q: Any = q, kv: Any = kv, tables: Any = tables, out: Any = outs[-1]) -> None:
                paged_decode(q, kv, tables, lens, out, scratch, max_context_len=longest, scores=scores, config=config)

            works.append(work)
        return works, outs[0]

    return Job(
        what=f"decode attention {num_seqs} x {context}", amount=num_bytes / 1e9, unit="GB/s",
        limit=setting.known.get(floors.COPY), target=0.8 if num_bytes > FEW_BYTES else None, launches=launches,
    )  # fmt: skip


def prefill_job(setting: Setting, dtype: torch.dtype, num_prompts: int, length: int) -> Job:
    """Measures operations per second, only the causal ones."""
    from engine.kernels.gpu.prefill import list_tiles, paged_prefill

    device = setting.device
    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    nums_tokens = np.full(num_prompts, length, dtype=np.int64)

    def launches(config: PrefillConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        torch.manual_seed(1)
        kv, tables = random_pool(num_prompts, length, setting, dtype)
        q = torch.randn(num_prompts * length, num_heads, head_dim, device=device).to(dtype)
        out = torch.full_like(q, float("nan"))
        lens = torch.from_numpy(nums_tokens).int().to(device)
        starts = torch.from_numpy(np.arange(num_prompts + 1) * length).int().to(device)
        tiles = list_tiles(nums_tokens, nums_tokens, 0, config.block_m // (num_heads // num_kv_heads))
        tiles_on_device = torch.from_numpy(tiles).to(device)

        def work() -> None:
            paged_prefill(q, kv, tables, lens, starts, tiles_on_device, out, scores=Scores.of(head_dim), config=config)

        return [work], out

    return Job(
        what=f"prefill attention {num_prompts} x {length}",
        amount=num_prompts * attention_flop(num_heads, head_dim, length) / 1e12, unit="TFLOP/s",
        limit=setting.known.get(floors.PRODUCTS), target=0.5, launches=launches,
    )  # fmt: skip


def plain_prefill(setting: Setting, num_prompts: int, length: int) -> Row:
    """torch's own attention on the same sizes, contiguous and not in pages: shows what a tuned kernel reaches."""
    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    q, k, v = (
        torch.randn(num_prompts, heads, length, head_dim, device=setting.device).bfloat16()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = seconds_of([lambda: attend(q, k, v, is_causal=True, enable_gqa=True)], setting.device)
    rate = num_prompts * attention_flop(num_heads, head_dim, length) / seconds / 1e12
    what = f"torch's attention {num_prompts} x {length}, no pages"
    return Row(what=what, value=rate, unit="TFLOP/s", limit=setting.known.get(floors.PRODUCTS), note="to compare")
