"""Paged attention on a GPU by FlashAttention (engine/attention/flash_calls.py).

Its pool has the order `KV_ORDER`: what the library gets is a view of a layer with its axes in another order. Keys and
values are written by the Triton kernel where there is one, otherwise by plain torch.

A step's arrays travel to the device as one copy; nothing is read back by what is written here. With the Triton kernel,
and where the library says so (`FlashCalls.is_capturable`), a decoding step can be captured as a CUDA graph, as with
`engine.attention.triton_backend`:

    plan = backend.reserve_decode_plan(num_seqs, max_context_len)     once; then capture with it
    backend.refill(plan, layout)                                      before every replay; fewer sequences fit too

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.flash_calls import FlashCalls, PagedBatch
from engine.attention.paged_groups import TorchPlan
from engine.attention.step_arrays import IntArray, empty_decodes, fill_up_decodes, pack, unpack
from engine.attention.torch_backend import TorchAttention
from engine.layers import HeadProjection
from engine.models.scores import Scores
from engine.to_device import fill, to_device


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """A step's arrays: parts of `buffer`."""

    buffer: torch.Tensor
    """[all of the below] int32"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    decodes: PagedBatch | None
    """The sequences that compute one token each, if there are any"""
    prefills: PagedBatch | None
    """All others"""
    plain: TorchPlan | None
    """Where plain torch writes; None: the Triton kernel does."""


class FlashAttention(AttentionBackend[FlashPlan]):
    def __init__(
        self,
        *,
        calls: FlashCalls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: str,
        has_triton: bool,
    ) -> None:
        """`has_triton`: whether the Triton kernels can run here, for this model."""
        self._calls = calls
        self._block_size = block_size
        self._device = device
        self._plain: TorchAttention | None = None
        if not has_triton:
            self._plain = TorchAttention(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                device=device,
            )

    def prepare(self, layout: StepLayout) -> FlashPlan:
        return self._plan(layout, max_context_len=0)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> FlashPlan:
        """A plan for steps in which up to `num_seqs` sequences decode, none longer than `max_context_len`; made by
        `refill`. Rows that it leaves empty attend to nothing and write nothing."""
        assert self._plain is None, "plain torch cannot leave a row unwritten"
        return self._plan(empty_decodes(num_seqs, -(-max_context_len // self._block_size)), max_context_len)

    def refill(self, plan: FlashPlan, layout: StepLayout) -> None:
        """Put a decoding step into a reserved plan, in stream order. Raises `ValueError` where it does not fit."""
        assert plan.decodes is not None, "reserved for sequences that decode"
        num_seqs, num_blocks = plan.decodes.block_tables.shape
        filled = fill_up_decodes(layout, num_seqs, num_blocks, plan.decodes.max_context_len)
        fill(plan.buffer, pack(_arrays(filled)))

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: FlashPlan,
        heads: HeadProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        if self._plain is not None and plan.plain is not None:
            return self._plain.project(qkv_TX, kv, plan.plain, heads, cos_sin)
        # Not before it is known that Triton is there.
        from engine.kernels.gpu.rotate import project_heads

        return project_heads(qkv_TX, kv, plan.slot_mapping, heads, cos_sin)

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
        k_pages, v_pages = (kv[:, i].transpose(1, 2) for i in (0, 1))  # [block, slot, K, H], of another order in memory
        num_decodes = 0 if plan.decodes is None else len(plan.decodes.context_lens)
        outputs = []
        if plan.decodes is not None:
            q_SNH = q_TNH[:num_decodes]
            outputs.append(self._calls.decode(q_SNH, k_pages, v_pages, plan.decodes, scores))
        if plan.prefills is not None:
            rest_TNH = q_TNH[num_decodes:]
            outputs.append(self._calls.prefill(rest_TNH, k_pages, v_pages, plan.prefills, scores))
        o_TNH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return o_TNH.reshape(len(q_TNH), -1)

    def _plan(self, layout: StepLayout, max_context_len: int) -> FlashPlan:
        """`max_context_len`: that steps put into it later may have; 0: none will be."""
        arrays = _arrays(layout)
        buffer = to_device(pack(arrays), self._device)
        slot_mapping, *parts = unpack(buffer, arrays)
        decodes = slice(0, layout.num_decodes)
        prefills = slice(layout.num_decodes, None)
        return FlashPlan(
            buffer=buffer,
            slot_mapping=slot_mapping,
            decodes=_batch(parts[:4], layout, decodes, max_context_len),
            prefills=_batch(parts[4:], layout, prefills, 0),
            plain=None if self._plain is None else self._plain.prepare(layout),
        )


def _arrays(layout: StepLayout) -> list[IntArray]:
    """In the order of `FlashPlan`, and of `PagedBatch` twice."""
    arrays: list[IntArray] = [layout.slot_mapping.astype(np.int64, copy=False)]
    for members in (slice(0, layout.num_decodes), slice(layout.num_decodes, None)):
        query_lens, context_lens = layout.query_lens[members], layout.context_lens[members]
        arrays += [
            np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32),
            np.concatenate(([0], np.cumsum(context_lens))).astype(np.int32),
            context_lens.astype(np.int32),
            layout.block_tables[members].astype(np.int32),
        ]
    return arrays


def _batch(parts: list[torch.Tensor], layout: StepLayout, members: slice, max_context_len: int) -> PagedBatch | None:
    if len(layout.query_lens[members]) == 0:
        return None
    query_starts, context_starts, context_lens, block_tables = parts
    return PagedBatch(
        query_starts=query_starts,
        context_starts=context_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        max_query_len=int(layout.query_lens[members].max()),
        max_context_len=max_context_len or int(layout.context_lens[members].max()),
    )
