"""The FlashAttention that is installed, alone, over pages of several sizes, as the backend `flash_attn` calls it.

The same sizes, bytes and operations as of our kernels (attention.py), to be held against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.attention import random_pool
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import attention_bytes, attention_flop
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of
from engine.attention.flash_calls import FlashCalls, FlashUnavailable, PagedBatch, load_flash_calls
from engine.models.scores import Scores

BLOCK_SIZES = (16, 128, 256)
"""An engine's; as many keys as some libraries have in a tile; what FlashAttention-2 asks for."""


def measure(setting: Setting) -> Iterator[Row]:
    found = list(calls_by_block_size(setting))
    for block_size, calls in found:
        for num_seqs, context, longest in setting.sizes.decode_attention:
            yield decode_row(setting, calls, block_size, num_seqs, context, longest)
    for block_size, calls in found:
        for num_prompts, length in setting.sizes.prefill_attention:
            yield prefill_row(setting, calls, block_size, num_prompts, length)


def calls_by_block_size(setting: Setting) -> Iterator[tuple[int, FlashCalls]]:
    """Raises `NotRun` where there is none for any of them."""
    why_not = []
    _, _, head_dim = setting.sizes.attention_heads
    for block_size in BLOCK_SIZES:
        try:
            yield (
                block_size,
                load_flash_calls(
                    device=setting.device,
                    dtype="bfloat16",
                    kv_dtype="bfloat16",
                    head_dim=head_dim,
                    block_size=block_size,
                ),
            )
        except FlashUnavailable as error:
            why_not.append(str(error))
    if len(why_not) == len(BLOCK_SIZES):
        raise NotRun(why_not[-1])


def decode_row(setting: Setting, calls: FlashCalls, block_size: int, num_seqs: int, context: int, longest: int) -> Row:
    _, num_kv_heads, head_dim = setting.sizes.attention_heads
    num_bytes = num_seqs * attention_bytes(num_kv_heads, head_dim, context)
    works = [
        work_of(setting, calls.decode, block_size, num_seqs, num_queries=1, context=context, longest=longest)
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    return Row(
        what=f"decode attention {num_seqs} x {context}, {calls.name}, blocks of {block_size}",
        value=num_bytes / seconds_of(works, setting.device) / 1e9, unit="GB/s", limit=setting.known.get(floors.COPY),
        group=f"decode {num_seqs} x {context}",
    )  # fmt: skip


def prefill_row(setting: Setting, calls: FlashCalls, block_size: int, num_prompts: int, length: int) -> Row:
    num_heads, _, head_dim = setting.sizes.attention_heads
    work = work_of(setting, calls.prefill, block_size, num_prompts, num_queries=length, context=length, longest=length)
    num_tflop = num_prompts * attention_flop(num_heads, head_dim, length) / 1e12
    return Row(
        what=f"prefill attention {num_prompts} x {length}, {calls.name}, blocks of {block_size}",
        value=num_tflop / seconds_of([work], setting.device), unit="TFLOP/s",
        limit=setting.known.get(floors.PRODUCTS), group=f"prefill {num_prompts} x {length}",
    )  # fmt: skip


def work_of(
    setting: Setting, attend: Callable[..., torch.Tensor], block_size: int, num_seqs: int, *, num_queries: int,
    context: int, longest: int,
) -> Callable[[], object]:  # fmt: skip
    """A launch over a pool of its own."""
    num_heads, _, head_dim = setting.sizes.attention_heads
    kv, tables = random_pool(num_seqs, context, setting, torch.bfloat16, block_size)
    k_pages, v_pages = (kv[:, i].transpose(1, 2) for i in (0, 1))
    q = torch.randn(num_seqs * num_queries, num_heads, head_dim, device=setting.device).bfloat16()

    def starts(each: int) -> torch.Tensor:
        return torch.arange(0, (num_seqs + 1) * each, each, dtype=torch.int32, device=setting.device)

    batch = PagedBatch(
        query_starts=starts(num_queries), context_starts=starts(context),
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=setting.device),
        block_tables=tables, max_query_len=num_queries, max_context_len=longest,
    )  # fmt: skip
    return partial(attend, q, k_pages, v_pages, batch, Scores.of(head_dim))
