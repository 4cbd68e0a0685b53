"""Paged attention on a GPU: FlashAttention (engine/attention/flash_calls.py) computes prompts, and our Triton kernels
(engine/attention/triton_backend.py) compute everything else.

FlashAttention's kernels for Hopper have warps that load while others multiply, which Triton's do not have. On an H200,
attention of a prompt of 8,192 tokens takes seven tenths of the time, and a whole step with it takes 6 % less. Decoding
uses our kernels: we do not let FlashAttention split contexts (docs/decisions.md), and without splits a step with one
sequence takes 6 % longer. Both read the same pool, in the order `KV_ORDER`.

Decode steps are recorded as with `TritonAttention`, and use its plans. Steps with prompts need a second copy to the
device, for FlashAttention's arrays.

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
from engine.layers import CosSin, HeadProjection
from engine.models.scores import Scores


@dataclass(frozen=True, slots=True)
class TritonFlashPlan:
    ours: TritonPlan
    """The plan of all sequences. Its tiles of prompts are not used."""
    prompts: PagedBatch | None
    """The sequences after the first `num_decodes`; None if there are none"""


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
        """See `WithTritonPlans`."""
        return TritonFlashPlan(self._ours.reserve_decode_plan(num_seqs, max_context_len), prompts=None)

    def refill(self, plan: TritonFlashPlan, layout: StepLayout) -> None:
        """See `WithTritonPlans`."""
        self._ours.refill(plan.ours, layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonFlashPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
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
