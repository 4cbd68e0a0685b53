"""Paged attention to latents in plain torch: the reference of other backends, on any device.

Owns nothing but its groups (engine/attention/paged_groups.py), each of which is one scaled-dot-product call: all query
heads share one key, a decoding group's heads are its queries.

Shapes: T tokens, N query heads, C numbers of a latent, P of a rotated key, R = C + P; B sequences of a group, L its
longest query, S the slots of its gathered blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from engine.attention.base import LatentBackend, StepLayout
from engine.attention.paged_groups import Group, PagedGroups, TorchPlan, in_token_order
from engine.layers import LatentProjection


class TorchLatentAttention(LatentBackend[TorchPlan]):
    def __init__(self, *, kv_lora_rank: int, latent_dim: int, block_size: int, device: str) -> None:
        """`latent_dim`: all that a token has in the pool, R."""
        self._value_dim = kv_lora_rank
        self._groups = PagedGroups(
            num_parts=1, num_kv_heads=1, head_dim=latent_dim, block_size=block_size, device=device
        )

    def prepare(self, layout: StepLayout) -> TorchPlan:
        return self._groups.prepare(layout)

    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan,
        heads: LatentProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        q_TNR = self.project(q_TX, latent_TR, kv, plan, heads, cos_sin)
        return heads.values(self.attend_absorbed(q_TNR, kv, plan, scale))

    def project(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan,
        heads: LatentProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Latents and keys into the pool; queries [T, N, R], in the space of latents."""
        q_TNR, latent_TR = heads(q_TX, latent_TR, cos_sin)
        self.store(latent_TR, kv, plan)
        return q_TNR

    def store(self, latent_TR: torch.Tensor, kv: torch.Tensor, plan: TorchPlan) -> None:
        self._groups.write(kv, (latent_TR,), plan)

    def attend_absorbed(self, q_TNR: torch.Tensor, kv: torch.Tensor, plan: TorchPlan, scale: float) -> torch.Tensor:
        """Weighted sums of latents: [T, N, C]."""
        groups = self._groups.of(plan, 0, q_TNR.dtype)
        return in_token_order(groups, len(q_TNR), lambda group: self._attend_group(q_TNR, kv, group, scale))

    def _attend_group(self, q_TNR: torch.Tensor, kv: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
        """[tokens of the group, N, C]"""
        B, L, N = group.num_seqs, group.query_len, q_TNR.shape[1]
        k_B1SR = self._groups.gather(kv, group, q_TNR.dtype)[0]
        if L == 1:
            q_B1NR = q_TNR[group.token_rows].unsqueeze(1)
            v_B1SC = k_B1SR[..., : self._value_dim]
            o_B1NC = F.scaled_dot_product_attention(q_B1NR, k_B1SR, v_B1SC, attn_mask=group.mask, scale=scale)
            return o_B1NC.squeeze(1)
        q = q_TNR[group.token_rows] if group.padded_rows is None else q_TNR[group.padded_rows]
        q_BNLR = q.view(B, L, N, -1).transpose(1, 2)
        if group.mask is None:
            k_B1SR = k_B1SR[:, :, :L]
        k_BNSR = k_B1SR.expand(-1, N, -1, -1)
        o_BNLC = F.scaled_dot_product_attention(
            q_BNLR,
            k_BNSR,
            k_BNSR[..., : self._value_dim],
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=scale,
        )
        o = o_BNLC.transpose(1, 2).reshape(B * L, N, -1)
        return o if group.valid_rows is None else o[group.valid_rows]
