"""Attention to latents over a paged pool, written out in float64: what every backend for latents is compared with."""

from __future__ import annotations

import torch
from attention_cases import Case


class LatentCase:
    """A pool with random latents of some sequences, and the step's queries and latents. Blocks as in `Case`."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        num_heads: int,
        latent_dim: int,
        rotated_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        last: LatentCase | None = None,
    ) -> None:
        """`lens` and `kv_dtype` as of `Case`. `last`: the last sequence's tokens are those of that one's last."""
        size = latent_dim + rotated_dim
        case = Case(
            lens, num_heads=num_heads, num_kv_heads=1, head_dim=size, block_size=block_size, dtype=dtype,
            kv_dtype=kv_dtype, last=None if last is None else last.tokens,
        )  # fmt: skip
        self.lens, self.layout, self.block_size = lens, case.layout, block_size
        self.num_heads, self.latent_dim, self.scale = num_heads, latent_dim, 0.3 * size**-0.5
        self.q = case.q
        self.history = [latents[:, 0] for latents, _ in case.history]
        """[tokens, R] of each sequence."""
        self.kv = case.kv[:, :1].contiguous()
        self.new_latents = case.k[:, 0].contiguous()
        """[T, R]"""

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the last sequence, in the words of `Case`; queries of what was computed before are zeros."""
        latents, (before, new) = self.history[-1].unsqueeze(1), self.lens[-1]
        return torch.cat((self.q.new_zeros(before, *self.q.shape[1:]), self.q[-new:])), latents, latents

    def written_pool(self) -> torch.Tensor:
        """With the step's latents in it."""
        kv = self.kv.clone()
        kv.flatten(0, 3)[torch.from_numpy(self.layout.slot_mapping)] = self.new_latents.to(kv.dtype)
        return kv

    def expected(self) -> torch.Tensor:
        """[T, N, C]"""
        rows: list[torch.Tensor] = []
        for (before, new), latents_TR in zip(self.lens, self.history, strict=True):
            for position in range(before, before + new):
                seen = latents_TR[: position + 1].double()
                scores_NT = self.q[len(rows)].double() @ seen.T * self.scale
                rows.append(torch.softmax(scores_NT, dim=-1) @ seen[:, : self.latent_dim])
        return torch.stack(rows)
