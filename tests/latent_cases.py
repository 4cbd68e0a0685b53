"""Attention to latents over a paged pool, computed in float64: the reference for every backend for latents."""

from __future__ import annotations

import torch
from attention_cases import Case

from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding, rotated
from engine.models.rope_config import RopeConfig


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
        """`lens` and `kv_dtype`: see `Case`. `last`: a case whose last sequence gives this one's last sequence its
        tokens."""
        size = latent_dim + rotated_dim
        case = Case(
            lens, num_heads=num_heads, num_kv_heads=1, head_dim=size, block_size=block_size, dtype=dtype,
            kv_dtype=kv_dtype, last=None if last is None else last.tokens,
        )  # fmt: skip
        self.lens, self.layout, self.block_size = lens, case.layout, block_size
        self.num_heads, self.latent_dim, self.scale = num_heads, latent_dim, 0.3 * size**-0.5
        self.q = case.q
        self.history = [latents[:, 0] for latents, _ in case.history]
        """The latents of each sequence, [tokens, R]."""
        self.kv = case.kv[:, :1].contiguous()
        self.new_latents = case.k[:, 0].contiguous()
        """[T, R]"""

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last sequence's `QKV` for `Case`; the queries of tokens computed before this step are zeros."""
        latents, (before, new) = self.history[-1].unsqueeze(1), self.lens[-1]
        return torch.cat((self.q.new_zeros(before, *self.q.shape[1:]), self.q[-new:])), latents, latents

    def written_pool(self) -> torch.Tensor:
        """Return a copy of the pool that also holds the step's latents."""
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


MIXES = {
    "whole prompt": [(0, 40)],
    "whole prompts, none as long as another": [(0, 33), (0, 17), (0, 70)],
    "a chunk at the end of a context": [(131, 37)],
    "decodes, short and long ones": [(9, 1), (31, 1), (0, 17), (8, 8), (3, 1), (0, 40), (30, 33), (2, 1)],
    "long ones apart from each other": [(0, 20), (40, 3), (0, 18), (5, 2), (64, 16)],
}
"""The `lens` of steps, for backends that unfold sequences with 16 or more new tokens."""


class HeadsCase(LatentCase):
    """A latent case that also has the heads' queries and products: all arguments of `LatentBackend.attend`."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        num_heads: int = 3,
        latent_dim: int = 32,
        rotated_dim: int = 8,
        query_dim: int = 12,
        value_dim: int = 10,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            lens, num_heads=num_heads, latent_dim=latent_dim, rotated_dim=rotated_dim, block_size=block_size,
            dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(7)
        q, weight, up_key, up_value = (
            torch.randn(*shape, generator=generator).mul_(factor).to(dtype).to(device)
            for shape, factor in (
                ((len(self.q), num_heads * (query_dim + rotated_dim)), 1.0),
                ((latent_dim,), 1.0),
                ((num_heads, query_dim, latent_dim), latent_dim**-0.5),
                ((num_heads, latent_dim, value_dim), latent_dim**-0.5),
            )
        )
        self.q_TX, self.query_dim, self.value_dim = q, query_dim, value_dim
        rotary = RotaryEmbedding(RopeConfig(theta=100.0, rope_type="default"), rotated_dim, 2048, dtype, device)
        self.heads = LatentProjection(RMSNorm(weight.abs(), 1e-6), HeadProducts(up_key), HeadProducts(up_value))
        positions = [p for before, new in lens for p in range(before, before + new)]
        self.cos_sin = rotary.select(torch.tensor(positions, device=device))
        self.scale = (query_dim + rotated_dim) ** -0.5

    def expected_of(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, N, V], computed in float64 from each head's own keys and values. `kv`: a pool that
        holds the step's latents."""
        up_key, up_value = (each._weight_NKO.cpu().double() for each in (self.heads.up_key, self.heads.up_value))
        q_TNX = self.q_TX.cpu().double().view(len(self.q), self.num_heads, -1)
        rotated_TNP = rotated(q_TNX[..., self.query_dim :], tuple(x.cpu().double() for x in self.cos_sin))
        rows: list[torch.Tensor] = []
        slots = kv.cpu().double().flatten(1, 3)
        for table, (before, new) in zip(self.layout.block_tables, self.lens, strict=True):
            latents_TR = slots[torch.from_numpy(table)].flatten(0, 1)[: before + new]
            c_TC, p_TP = latents_TR.tensor_split([self.latent_dim], dim=1)
            k_NTQ, v_NTV = torch.einsum("nqc,tc->ntq", up_key, c_TC), torch.einsum("ncv,tc->ntv", up_value, c_TC)
            for position in range(before, before + new):
                token, seen = len(rows), slice(0, position + 1)
                scores_NT = torch.einsum("nq,ntq->nt", q_TNX[token, :, : self.query_dim], k_NTQ[:, seen])
                scores_NT += rotated_TNP[token] @ p_TP[seen].T
                weights_NT = torch.softmax(scores_NT * self.scale, dim=1)
                rows.append(torch.einsum("nt,ntv->nv", weights_NT, v_NTV[:, seen]))
        return torch.stack(rows)
