"""Paged attention on a GPU: prompts by FlashAttention (engine/attention/flash_calls.py), and all else by our Triton
kernels (engine/attention/triton_backend.py).

Its kernels for Hopper have warps that load while others multiply, as Triton's do not: on an H200 a prompt of 8,192
takes them seven tenths of the time, and a whole step with it 6 % less. Decoding is ours: FlashAttention is told not to
split contexts (docs/decisions.md), and with one sequence a step then takes 6 % longer. Both read the same pool, in the
order `KV_ORDER`.

Decoding steps are recorded as with `TritonAttention`, whose plans they have. Those with prompts bring FlashAttention's
arrays to the device by a copy of their own.

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.flash_backend import paged_batch, pages_of
from engine.attention.flash_calls import FlashCalls, PagedBatch
from engine.attention.triton_backend import TritonAttention
from engine.attention.triton_plans import TritonPlan
from engine.layers import HeadProjection
from engine.models.scores import Scores


@dataclass(frozen=True, slots=True)
class TritonFlashPlan:
    ours: TritonPlan
    """Of all sequences. Its tiles of prompts nobody computes."""
    prompts: PagedBatch | None
    """Those that compute more than one token, or are not called decoding, if there are any"""


class TritonFlashAttention(AttentionBackend[TritonFlashPlan]):
    def __init__(self, ours: TritonAttention, calls: FlashCalls, device: str) -> None:
        self._ours = ours
        self._calls = calls
        self._device = device

    def prepare(self, layout: StepLayout) -> TritonFlashPlan:
        prompts = paged_batch(layout, slice(layout.num_decodes, None), self._device)
        return TritonFlashPlan(self._ours.prepare(layout), prompts)

    def keep_scratch(self, num_seqs: int, max_context_len: int) -> None:
        self._ours.keep_scratch(num_seqs, max_context_len)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonFlashPlan:
        """See `TritonPlans`."""
        return TritonFlashPlan(self._ours.reserve_decode_plan(num_seqs, max_context_len), prompts=None)

    def refill(self, plan: TritonFlashPlan, layout: StepLayout) -> None:
        """See `TritonPlans`."""
        self._ours.refill(plan.ours, layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonFlashPlan,
        heads: HeadProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        return self._ours.project(qkv_TX, kv, plan.ours, heads, cos_sin)

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonFlashPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_N is None, "the configuration has seen to it"
        q_TNH = q_TNH.contiguous()
        num_decodes = plan.ours.num_decodes
        if plan.prompts is None:
            o_TNH = torch.empty_like(q_TNH)
        else:
            o_TNH = self._calls.prefill(q_TNH[num_decodes:], *pages_of(kv), plan.prompts, scores)
            if num_decodes:
                o_TNH = torch.cat([torch.empty_like(q_TNH[:num_decodes]), o_TNH])
        self._ours.attend_decodes(q_TNH, kv, plan.ours, o_TNH, scores)
        return o_TNH.reshape(len(q_TNH), -1)
