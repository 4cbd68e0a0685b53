"""Paged attention on a GPU without Triton: FlashAttention (engine/attention/flash_calls.py), with plain torch around
it.

The pool has the order `KV_ORDER`; the library gets a permuted view of a layer. Plain torch writes keys and values.
Steps are not recorded as CUDA graphs, since torch cannot leave a row unwritten. With Triton, FlashAttention computes
only prompts: engine/attention/triton_flash.py.

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.flash_calls import FlashCalls, PagedBatch
from engine.attention.paged_groups import TorchPlan
from engine.attention.step_arrays import IntArray, pack, unpack
from engine.attention.torch_backend import TorchAttention
from engine.layers import CosSin, HeadProjection
from engine.models.scores import Scores
from engine.to_device import to_device


@dataclass(frozen=True, slots=True)
class FlashPlan:
    plain: TorchPlan
    """The plan by which plain torch writes keys and values"""
    decodes: PagedBatch | None
    """The decoding sequences, which compute one token each; None if there are none"""
    prefills: PagedBatch | None
    """All other sequences; None if there are none"""
    num_decodes: int


class FlashAttention(AttentionBackend[FlashPlan]):
    def __init__(self, plain: TorchAttention, calls: FlashCalls, device: str) -> None:
        """`plain`: writes keys and values."""
        self._plain, self._calls, self._device = plain, calls, device

    def prepare(self, layout: StepLayout) -> FlashPlan:
        return FlashPlan(
            plain=self._plain.prepare(layout),
            decodes=paged_batch(layout, slice(0, layout.num_decodes), self._device),
            prefills=paged_batch(layout, slice(layout.num_decodes, None), self._device),
            num_decodes=layout.num_decodes,
        )

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: FlashPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        return self._plain.project(qkv_TX, kv, plan.plain, heads, cos_sin)

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: FlashPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks_N is None, "the configuration has seen to it"
        q_TNH = q_TNH.contiguous()
        outputs = []
        if plan.decodes is not None:
            outputs.append(self._calls.decode(q_TNH[: plan.num_decodes], *pages_of(kv), plan.decodes, scores))
        if plan.prefills is not None:
            outputs.append(self._calls.prefill(q_TNH[plan.num_decodes :], *pages_of(kv), plan.prefills, scores))
        o_TNH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return o_TNH.reshape(len(q_TNH), -1)


def pages_of(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys and values, [block, slot, K, H]."""
    k_pages, v_pages = (kv[:, i].transpose(1, 2) for i in (0, 1))
    return k_pages, v_pages


def paged_batch(layout: StepLayout, members: slice, device: str) -> PagedBatch | None:
    """Copy the arrays of some of a step's sequences to the device, in one copy, for one call. None if there are no
    sequences."""
    query_lens, context_lens = layout.query_lens[members], layout.context_lens[members]
    if len(query_lens) == 0:
        return None
    arrays: list[IntArray] = [
        np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
        np.concatenate(([0], np.cumsum(context_lens))).astype(np.int32),
        context_lens.astype(np.int32),
        layout.block_tables[members].astype(np.int32),
    ]
    query_starts, context_starts, lens, block_tables = unpack(to_device(pack(arrays), device), arrays)
    return PagedBatch(
        query_starts=query_starts,
        context_starts=context_starts,
        context_lens=lens,
        block_tables=block_tables,
        max_query_len=int(query_lens.max()),
        max_context_len=int(context_lens.max()),
    )
