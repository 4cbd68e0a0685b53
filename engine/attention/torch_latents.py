"""Paged attention to latents in plain torch, on any device: the reference for other backends.

Owns only its groups (engine/attention/paged_groups.py), each of which is one scaled-dot-product call, and memory for
unfolded keys and values. In the absorbed form all query heads share one key, so the heads of a decoding group become
its queries. The context of a prompt is unfolded where that pays (engine/attention/latent_forms.py).

Shapes: T tokens, A of them absorbed, N query heads, C latent dim, P rotated key dim, R = C + P, V dim of a head's
value; B sequences of a group, L its longest query, S the slots of its gathered blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from engine.attention.base import LatentBackend, StepLayout
from engine.attention.latent_forms import Part, Unfolding, part_of, unfolded_seqs
from engine.attention.paged_groups import Group, PagedGroups, TorchPlan, in_token_order
from engine.attention.torch_unfolded import UnfoldedHeads, unfolded_queries
from engine.layers import CosSin, LatentProjection


@dataclass(frozen=True, slots=True)
class MixedTorchPlan:
    """The plan of a step in which some or all sequences are unfolded."""

    step: TorchPlan
    """Says where the step's tokens are written."""
    absorbed: tuple[Part, TorchPlan] | None
    unfolded: tuple[Part, TorchPlan]


class TorchLatentAttention(LatentBackend[TorchPlan | MixedTorchPlan]):
    def __init__(
        self,
        *,
        kv_lora_rank: int,
        latent_dim: int,
        block_size: int,
        device: str,
        unfolding: Unfolding | None = None,
    ) -> None:
        """`latent_dim`: R, the size of a token in the pool. `unfolding`: None for none."""
        self._value_dim, self._unfolding = kv_lora_rank, unfolding
        self._groups = PagedGroups(
            num_parts=1, num_kv_heads=1, head_dim=latent_dim, block_size=block_size, device=device
        )
        if unfolding is not None:
            self._unfolded_heads = UnfoldedHeads(unfolding.max_bytes)

    def prepare(self, layout: StepLayout) -> TorchPlan | MixedTorchPlan:
        is_unfolded = unfolded_seqs(layout, self._unfolding)
        step, unfolded = self._groups.prepare(layout), part_of(layout, is_unfolded)
        if unfolded is None:
            return step
        absorbed = part_of(layout, ~is_unfolded)
        return MixedTorchPlan(
            step,
            None if absorbed is None else (absorbed, self._groups.prepare(absorbed.layout)),
            (unfolded, self._groups.prepare(unfolded.layout)),
        )

    def write(
        self,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan | MixedTorchPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
    ) -> None:
        self.store(heads.latents(latent_TR, cos_sin), kv, plan if isinstance(plan, TorchPlan) else plan.step)

    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan | MixedTorchPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
        scale: float,
    ) -> torch.Tensor:
        if isinstance(plan, TorchPlan):
            q_TNR = self.project(q_TX, latent_TR, kv, plan, heads, cos_sin)
            return heads.values(self.attend_absorbed(q_TNR, kv, plan, scale))
        self.write(latent_TR, kv, plan, heads, cos_sin)
        o_TNV = q_TX.new_empty(len(q_TX), heads.up_key.shape[0], heads.up_value.shape[2])
        if plan.absorbed is not None:
            part, absorbed = plan.absorbed
            o_ANC = self.attend_absorbed(_absorbed_queries(q_TX, cos_sin, heads, part), kv, absorbed, scale)
            for run in part.runs:
                heads.up_value(o_ANC[run.part], o_TNV[run.step])
        part, unfolded = plan.unfolded
        o_UNV = self._attend_unfolded(unfolded_queries(q_TX, cos_sin, heads, part), kv, unfolded, heads, scale)
        for run in part.runs:
            o_TNV[run.step] = o_UNV[run.part]
        return o_TNV

    def project(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        """Write latents and keys into the pool. Returns queries [T, N, R] in the latent space."""
        q_TNR, latent_TR = heads(q_TX, latent_TR, cos_sin)
        self.store(latent_TR, kv, plan)
        return q_TNR

    def store(self, latent_TR: torch.Tensor, kv: torch.Tensor, plan: TorchPlan) -> None:
        self._groups.write(kv, (latent_TR,), plan)

    def attend_absorbed(self, q_TNR: torch.Tensor, kv: torch.Tensor, plan: TorchPlan, scale: float) -> torch.Tensor:
        """Compute weighted sums of latents: [T, N, C]."""
        groups = self._groups.of(plan, 0, q_TNR.dtype)
        return in_token_order(groups, len(q_TNR), lambda group: self._attend_group(q_TNR, kv, group, scale))

    def _attend_unfolded(
        self, q_UNX: torch.Tensor, kv: torch.Tensor, plan: TorchPlan, heads: LatentProjection, scale: float
    ) -> torch.Tensor:
        """[U, N, V]"""

        def attend_group(group: Group) -> torch.Tensor:
            latent_B1SR = self._groups.gather(kv, group, q_UNX.dtype)[0]
            return self._unfolded_heads.attend(q_UNX, latent_B1SR.squeeze(1), group, heads, scale)

        return in_token_order(self._groups.of(plan, 0, q_UNX.dtype), len(q_UNX), attend_group)

    def _attend_group(self, q_TNR: torch.Tensor, kv: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
        """[tokens of the group, N, C]"""
        L, N = group.query_len, q_TNR.shape[1]
        k_B1SR = self._groups.gather(kv, group, q_TNR.dtype)[0]
        if L == 1:
            q_B1NR = q_TNR[group.token_rows].unsqueeze(1)
            v_B1SV = self._values_in(k_B1SR)
            o_B1NV = F.scaled_dot_product_attention(q_B1NR, k_B1SR, v_B1SV, attn_mask=group.mask, scale=scale)
            return o_B1NV.squeeze(1)[..., : self._value_dim]
        if group.mask is None:
            k_B1SR = k_B1SR[:, :, :L]
        k_BNSR = k_B1SR.expand(-1, N, -1, -1)
        o_BNLV = F.scaled_dot_product_attention(
            group.queries(q_TNR),
            k_BNSR,
            self._values_in(k_BNSR),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=scale,
        )
        return group.results(o_BNLV[..., : self._value_dim])

    def _values_in(self, k_BNSR: torch.Tensor) -> torch.Tensor:
        """The latents as values. On a CPU the values include the rotated keys, whose sums are ignored: torch's fast CPU
        kernel requires values as long as keys, and the other one writes all scores to memory."""
        return k_BNSR if k_BNSR.device.type == "cpu" else k_BNSR[..., : self._value_dim]


def _absorbed_queries(q_TX: torch.Tensor, cos_sin: CosSin, heads: LatentProjection, part: Part) -> torch.Tensor:
    """[A, N, R]: the queries of the part's tokens in the latent space."""
    N, Q, C = heads.up_key.shape
    q_ANR = q_TX.new_empty(part.num_tokens, N, C + q_TX.shape[1] // N - Q)
    cos, sin = cos_sin
    for run in part.runs:
        heads.absorb(q_TX[run.step], q_ANR[run.part])
        q_ANR[run.part, :, C:] = heads.rotated(q_TX[run.step], (cos[run.step], sin[run.step]))
    return q_ANR
