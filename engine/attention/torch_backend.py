"""Paged attention in plain torch, on any device: the reference for all other backends.

Owns only its groups (engine/attention/paged_groups.py), each of which is one scaled-dot-product call.

A decoding group folds the query heads that share a key head into the query axis, so that keys are never repeated. A
group of whole prompts needs no mask, since it is causal from its first token. All other groups get an explicit mask.

Shapes: T tokens, N query heads, K key/value heads, G = N / K, H head dim; B sequences of a group, L its longest query,
C the slots of its gathered blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.paged_groups import Group, PagedGroups, TorchPlan, in_token_order
from engine.layers import CosSin, HeadProjection
from engine.models.scores import Scores

FLASH_CAPABILITY = (8, 0)
"""The lowest compute capability that torch's flash kernel runs on."""


class TorchAttention(AttentionBackend[TorchPlan]):
    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: str) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._groups = PagedGroups(
            num_parts=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, device=device
        )

    def prepare(self, layout: StepLayout) -> TorchPlan:
        return self._groups.prepare(layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        q_TNH, k_TKH, v_TKH = heads(qkv_TX, cos_sin)
        self.write_kv(kv, k_TKH, v_TKH, plan)
        return q_TNH

    def write_kv(self, kv: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: TorchPlan) -> None:
        self._groups.write(kv, (k_TKH, v_TKH), plan)

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: TorchPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups = self._groups.of(plan, scores.sliding_window, q_TNH.dtype)
        o_TNH = in_token_order(groups, len(q_TNH), lambda group: self._attend_group(q_TNH, kv, group, scores, sinks_N))
        return o_TNH.reshape(len(q_TNH), -1)

    def _attend_group(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, group: Group, scores: Scores, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        """[tokens of the group, N, H]"""
        B, L = group.num_seqs, group.query_len
        N, K, H = self._num_heads, self._num_kv_heads, self._head_dim
        k_BKCH, v_BKCH = self._groups.gather(kv, group, q_TNH.dtype).unbind(0)
        if L == 1:
            q_BKGH = q_TNH[group.token_rows].reshape(B, K, N // K, H)
            sinks_KG = None if sinks_N is None else sinks_N.view(K, N // K)
            return _weighted_values(q_BKGH, k_BKCH, v_BKCH, group.mask, scores, sinks_KG).reshape(B, N, H)
        if group.mask is None:
            k_BKCH, v_BKCH = k_BKCH[:, :, :L], v_BKCH[:, :, :L]
        sinks_N1 = None if sinks_N is None else sinks_N.view(N, 1)
        return group.results(_weighted_values(group.queries(q_TNH), k_BKCH, v_BKCH, group.mask, scores, sinks_N1))


def _weighted_values(
    q_BNLH: torch.Tensor,
    k_BKCH: torch.Tensor,
    v_BKCH: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    sinks_NL: torch.Tensor | None,
) -> torch.Tensor:
    """[B, N, L, H]. `mask` [B, 1, L, C] is added to the scores; None: causal from the first token, L = C. `sinks_NL`
    may also be [N, 1]."""
    if scores.soft_cap or sinks_NL is not None:
        return _weighted_values_by_hand(q_BNLH, k_BKCH, v_BKCH, mask, scores, sinks_NL)
    shares_keys = q_BNLH.shape[1] != k_BKCH.shape[1]
    if shares_keys and q_BNLH.is_cuda and not _takes_flash(q_BNLH, mask):
        return weighted_values_head_by_head(q_BNLH, k_BKCH, v_BKCH, mask, scores.scale)
    return F.scaled_dot_product_attention(
        q_BNLH,
        k_BKCH,
        v_BKCH,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=shares_keys,
    )


def _takes_flash(q: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether torch's flash kernel computes this on q's GPU."""
    is_plain = mask is None and q.dtype != torch.float32
    return is_plain and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY


def weighted_values_head_by_head(
    q_BNLH: torch.Tensor, k_BKCH: torch.Tensor, v_BKCH: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Like `_weighted_values`, with calls in which each query head has its own key head. On a GPU, torch's flash kernel
    takes neither masks nor float32, and exists only from 8.0 on; its memory-efficient kernel takes no shared key heads.
    So torch would write all scores to memory: gigabytes for a chunk of a long context. No keys are copied here."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)

    B, N, L, H = q_BNLH.shape
    K = k_BKCH.shape[1]
    q_BKGLH = q_BNLH.view(B, K, N // K, L, H)
    if B == 1:
        # One call: the query heads of a key head become sequences over the same keys.
        q_GKLH = q_BKGLH[0].transpose(0, 1)
        o_GKLH = attend(q_GKLH, k_BKCH.expand(N // K, -1, -1, -1), v_BKCH.expand(N // K, -1, -1, -1))
        return o_GKLH.transpose(0, 1).reshape(B, N, L, H)
    return torch.stack([attend(q_BKLH, k_BKCH, v_BKCH) for q_BKLH in q_BKGLH.unbind(2)], 2).flatten(1, 2)


def _weighted_values_by_hand(
    q_BNLH: torch.Tensor,
    k_BKCH: torch.Tensor,
    v_BKCH: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    sinks_NL: torch.Tensor | None,
) -> torch.Tensor:
    """Like `_weighted_values`, for a soft cap or sinks, which torch has no call for."""
    B, N, L, H = q_BNLH.shape
    K, C = k_BKCH.shape[1:3]
    q_BKRH = q_BNLH.reshape(B, K, N // K * L, H)  # the query heads of a key head are adjacent
    s = (q_BKRH @ k_BKCH.mT).mul_(scores.scale / (scores.soft_cap or 1.0))
    if scores.soft_cap:
        s = s.tanh_().mul_(scores.soft_cap)
    s_BNLC = s.view(B, N, L, C)
    if mask is None:
        s_BNLC.masked_fill_(torch.ones(L, C, dtype=torch.bool, device=s.device).triu_(1), float("-inf"))
    else:
        s_BNLC += mask
    if sinks_NL is not None:
        s_BNLC = torch.cat((s_BNLC, sinks_NL.to(s.dtype).expand(B, N, L).unsqueeze(-1)), -1)
    weights = s_BNLC.softmax(-1, dtype=torch.float32)[..., :C].to(v_BKCH.dtype)
    return (weights.reshape(B, K, N // K * L, C) @ v_BKCH).view(B, N, L, H)
