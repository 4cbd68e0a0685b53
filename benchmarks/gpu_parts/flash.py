"""Measures the installed FlashAttention alone, over pages of several sizes, as the backend `flash_attn` calls it.

Uses the same sizes, bytes and operations as for our kernels (attention.py), for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.attention import random_pool
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import attention_bytes, attention_flop
from benchmarks.gpu_parts.timing import cache_bytes, num_sets, seconds_of
from engine.attention.flash_backend import pages_of
from engine.attention.flash_calls import Attend, FlashCalls, FlashUnavailable, PagedBatch, load_flash_calls
from engine.models.scores import Scores

BLOCK_SIZES = (16, 128, 256)
"""The engine's block size; the number of keys in a tile of some libraries; the size that FlashAttention-2 requires."""
NUM_CHECKED = 8
MAX_ERROR = 1e-2
"""bfloat16 rounds by at most 4e-3, twice: the weights of attention, and its result."""


def measure(setting: Setting) -> Iterator[Row]:
    found = list(calls_by_block_size(setting))
    errors: list[float] = []
    for block_size, calls in found:
        for num_seqs, context, longest in setting.sizes.decode_attention:
            yield decode_row(setting, calls, block_size, num_seqs, context, longest, errors)
    for block_size, calls in found:
        for num_prompts, length in setting.sizes.prefill_attention:
            yield prefill_row(setting, calls, block_size, num_prompts, length, errors)
    yield Row(
        what="FlashAttention's error, of all of these", value=torch.tensor(errors).max().item(), unit="error",
        at_most=MAX_ERROR, is_check=True,  # Python's max() would miss a NaN
        note=f"the last {NUM_CHECKED} queries of two sequences, against float64",
    )  # fmt: skip


def calls_by_block_size(setting: Setting) -> Iterator[tuple[int, FlashCalls]]:
    """Raises `NotRun` if no block size has a FlashAttention."""
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


def decode_row(
    setting: Setting, calls: FlashCalls, block_size: int, num_seqs: int, context: int, longest: int,
    errors: list[float],
) -> Row:  # fmt: skip
    """Also appends the error of these calls to `errors`."""
    _, num_kv_heads, head_dim = setting.sizes.attention_heads
    num_bytes = num_seqs * attention_bytes(num_kv_heads, head_dim, context)
    works = [
        Call.of(setting, calls.decode, block_size, num_seqs, num_queries=1, context=context, longest=longest)
        for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
    ]
    errors.append(works[0].error())
    return Row(
        what=f"decode attention {num_seqs} x {context}, {calls.name}, blocks of {block_size}",
        value=num_bytes / seconds_of(works, setting.device) / 1e9, unit="GB/s", limit=setting.known.get(floors.COPY),
        group=f"decode {num_seqs} x {context}",
    )  # fmt: skip


def prefill_row(
    setting: Setting, calls: FlashCalls, block_size: int, num_prompts: int, length: int, errors: list[float]
) -> Row:
    num_heads, _, head_dim = setting.sizes.attention_heads
    work = Call.of(
        setting, calls.prefill, block_size, num_prompts, num_queries=length, context=length, longest=length
    )  # fmt: skip
    errors.append(work.error())
    num_tflop = num_prompts * attention_flop(num_heads, head_dim, length) / 1e12
    return Row(
        what=f"prefill attention {num_prompts} x {length}, {calls.name}, blocks of {block_size}",
        value=num_tflop / seconds_of([work], setting.device), unit="TFLOP/s",
        limit=setting.known.get(floors.PRODUCTS), group=f"prefill {num_prompts} x {length}",
    )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call with a pool of its own."""

    attend: Attend
    q: torch.Tensor
    """[sequences * queries, heads, head size]"""
    pages: tuple[torch.Tensor, torch.Tensor]
    batch: PagedBatch
    scores: Scores

    @classmethod
    def of(
        cls, setting: Setting, attend: Attend, block_size: int, num_seqs: int, *, num_queries: int, context: int,
        longest: int,
    ) -> Call:  # fmt: skip
        num_heads, _, head_dim = setting.sizes.attention_heads
        kv, tables = random_pool(num_seqs, context, setting, torch.bfloat16, block_size)
        q = torch.randn(num_seqs * num_queries, num_heads, head_dim, device=setting.device).bfloat16()

        def starts(each: int) -> torch.Tensor:
            return torch.arange(0, (num_seqs + 1) * each, each, dtype=torch.int32, device=setting.device)

        batch = PagedBatch(
            query_starts=starts(num_queries), context_starts=starts(context),
            context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=setting.device),
            block_tables=tables, max_query_len=num_queries, max_context_len=longest,
        )  # fmt: skip
        return cls(attend, q, pages_of(kv), batch, Scores.of(head_dim))

    def __call__(self) -> torch.Tensor:
        return self.attend(self.q, *self.pages, self.batch, self.scores)

    def error(self) -> float:
        """The relative error of some of the last queries: |difference| / |exact|. These see all keys except the last
        ones."""
        context = int(self.batch.context_lens[0])
        num_queries = min(NUM_CHECKED, self.batch.max_query_len)
        seen = torch.arange(context, device=self.q.device) <= torch.arange(
            context - num_queries, context, device=self.q.device
        ).unsqueeze(1)
        found, exact = [], []
        out = self()
        for seq in (0, len(self.batch.context_lens) - 1):
            last = slice((seq + 1) * self.batch.max_query_len - num_queries, (seq + 1) * self.batch.max_query_len)
            k_CNH, v_CNH = (
                pages[self.batch.block_tables[seq].long()].flatten(0, 1)[:context].double().repeat_interleave(
                    self.q.shape[1] // pages.shape[2], dim=1
                )
                for pages in self.pages
            )  # fmt: skip
            scores_NQC = torch.einsum("qnh,cnh->nqc", self.q[last].double(), k_CNH) * self.scores.scale
            weights_NQC = scores_NQC.masked_fill(~seen, -math.inf).softmax(dim=-1)
            exact.append(torch.einsum("nqc,cnh->qnh", weights_NQC, v_CNH))
            found.append(out[last].double())
        expected = torch.stack(exact)
        return float((torch.stack(found) - expected).norm() / expected.norm())
