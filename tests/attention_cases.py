"""Attention over a paged pool, computed in float64, one query at a time: the reference for every backend."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from engine.attention import StepLayout
from engine.models.scores import Scores

NUM_BLOCKS = 160

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [T, N, H], keys [T, K, H] and values [T, K, H] of one sequence's tokens."""


class Case:
    """A pool with random KV of some sequences, and the step's q, k, v."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        last: QKV | None = None,
    ) -> None:
        """
        lens: (tokens computed before, tokens of this step) per sequence, decoding ones first.
        kv_dtype: the pool's dtype, by default `dtype`; it represents all keys and values exactly.
        last: q, k, v of the last sequence's tokens; by default random, like those of all other sequences.
        """
        kv_dtype = kv_dtype or dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.lens, self.block_size = lens, block_size
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        order = torch.randperm(NUM_BLOCKS, generator=self.generator).tolist()
        tables = [[order.pop() for _ in range(-(-(before + new) // block_size))] for before, new in lens]
        self.kv = torch.full((NUM_BLOCKS, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=kv_dtype)
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        for table, (before, new) in zip(tables, lens, strict=True):
            self.kv[table[-1]] = 0  # the partly filled block is cleared, all others keep their NaNs
            k, v = (self.randn(before + new, num_kv_heads).to(kv_dtype).to(dtype) for _ in range(2))
            if last is not None and len(self.history) == len(lens) - 1:
                k, v = last[1][: before + new], last[2][: before + new]
            for position in range(before):
                block, slot = table[position // block_size], position % block_size
                self.kv[block, 0, :, slot], self.kv[block, 1, :, slot] = k[position], v[position]
            self.history.append((k, v))
        num_tokens = sum(new for _, new in lens)
        self.q = self.randn(num_tokens, num_heads).to(dtype)
        if last is not None:
            before, new = lens[-1]
            self.q[-new:] = last[0][before : before + new]
        self.k, self.v = (
            torch.cat([h[i][before:] for h, (before, _) in zip(self.history, lens, strict=True)]) for i in range(2)
        )
        block_tables = np.array([[*t, *([t[0]] * (max(map(len, tables)) - len(t)))] for t in tables])
        slots = [
            t[p // block_size] * block_size + p % block_size
            for t, (before, new) in zip(tables, lens, strict=True)
            for p in range(before, before + new)
        ]
        is_decode = [new == 1 for _, new in lens]
        self.layout = StepLayout(
            query_lens=np.array([new for _, new in lens]),
            context_lens=np.array([before + new for before, new in lens]),
            block_tables=block_tables,
            slot_mapping=np.array(slots),
            num_decodes=is_decode.index(False) if False in is_decode else len(lens),
        )

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.head_dim, generator=self.generator)

    def scores(self, window: int = 0, soft_cap: float = 0.0, scale: float | None = None) -> Scores:
        return replace(Scores.of(self.head_dim, window, soft_cap), **({} if scale is None else {"scale": scale}))

    def sinks(self) -> torch.Tensor:
        """Return sinks that take most of the weight of some query heads, and hardly any of others."""
        return torch.linspace(-4.0, 6.0, self.num_heads)

    def expected(
        self, window: int, soft_cap: float = 0.0, scale: float | None = None, sinks_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        rows: list[torch.Tensor] = []
        for (k, v), (before, new) in zip(self.history, self.lens, strict=True):
            k_TNH, v_TNH = (x.double().repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))
            for position in range(before, before + new):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                q_NH = self.q[len(rows)].double()
                scores_TN = (k_TNH[seen] * q_NH).sum(dim=2) * scale
                if soft_cap:
                    scores_TN = soft_cap * torch.tanh(scores_TN / soft_cap)
                if sinks_N is not None:
                    scores_TN = torch.cat((scores_TN, sinks_N[None].double()))
                weights_TN = torch.softmax(scores_TN, dim=0)[: seen.stop - seen.start]
                rows.append((weights_TN[:, :, None] * v_TNH[seen]).sum(dim=0))
        return torch.stack(rows).view(len(rows), -1)


LENS = {
    "one token": [(0, 1)],
    "decode batch": [(4, 1), (15, 1), (16, 1), (0, 1), (47, 1)],
    "decodes of very different lengths": [(150, 1), (3, 1), (5, 1), (7, 1), (2, 1)],
    "whole prompt": [(0, 33)],
    "whole prompts": [(0, 33), (0, 31), (0, 2), (0, 30)],
    "chunks": [(16, 9), (5, 20), (31, 2)],
    "mixed": [(9, 1), (31, 1), (0, 17), (8, 8), (0, 40), (30, 3), (2, 1)],
}
