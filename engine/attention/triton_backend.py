"""Paged attention on a GPU, by Triton kernels (engine/kernels/gpu/).

Keys and values are read where they lie: nothing is gathered or padded. Its pool has the order `KV_ORDER`.

A step's arrays travel to the device as one copy. Nothing is ever read back, and the grids of a decoding step depend on
what the host knows: such a step can be captured as a CUDA graph, over a plan whose tensors keep their addresses:

    plan = backend.reserve_decode_plan(num_seqs, max_context_len)     once; then capture with it
    backend.refill(plan, layout)                                      before every replay; fewer sequences fit too

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionBackend, StepLayout
from engine.attention.step_arrays import IntArray, empty_decodes, fill_up_decodes, pack, unpack
from engine.float8 import FLOAT8, why_no_float8
from engine.kernels.gpu.decode import DecodeConfig, paged_decode, partial_size
from engine.kernels.gpu.pointwise import MAX_HIDDEN_SIZE
from engine.kernels.gpu.prefill import MAX_GROUPS, PrefillConfig, list_tiles, paged_prefill
from engine.kernels.gpu.rotate import project_heads
from engine.kernels.gpu.tile import MAX_HEAD_DIM
from engine.kv_cache import KV_DTYPES, TORCH_DTYPES
from engine.layers import HeadProjection
from engine.to_device import to_device


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step's arrays: parts of `buffer`, in this order."""

    buffer: torch.Tensor
    """[all of the below] int32"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    context_lens: torch.Tensor
    """[S] int32"""
    query_starts: torch.Tensor
    """[S + 1] int32"""
    block_tables: torch.Tensor
    """[S, blocks of the longest] int32"""
    prefill_tiles: torch.Tensor
    """[tiles, 2] int32: `engine.kernels.gpu.prefill.list_tiles`"""
    num_decodes: int
    max_context_len: int
    """No decoding sequence's context is longer."""
    scratch: torch.Tensor
    """float32, of the pieces of decoding sequences"""


class TritonAttention(AttentionBackend[TritonPlan]):
    """`why_not` says whether it can serve a model, `engine.kernels.gpu.why_no_triton` whether it can run at all."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        device: str,
        kv_dtype: str = "",
        soft_cap: float = 0.0,
    ) -> None:
        """`kv_dtype`: of the pool, where it is not the queries' `dtype`. `soft_cap`: of the scores, 0 for none."""
        self._num_heads, self._head_dim, self._block_size = num_heads, head_dim, block_size
        self._device, self._soft_cap = device, soft_cap
        itemsize, kv_itemsize = TORCH_DTYPES[dtype].itemsize, KV_DTYPES[kv_dtype or dtype].itemsize
        num_groups = num_heads // num_kv_heads
        self._decode_config = DecodeConfig.of(head_dim, itemsize, kv_itemsize)
        self._prefill_config = PrefillConfig.of(head_dim, itemsize, num_groups, kv_itemsize)
        self._tokens_per_tile = self._prefill_config.block_m // num_groups

    @staticmethod
    def why_not(
        *, head_dim: int, num_groups: int, hidden_size: int, kv_dtype: str, capability: tuple[int, int] | None
    ) -> str:
        """What is in the way, as a clause; empty if nothing is. `num_groups`: query heads per key head. `capability`:
        the GPU's, None without one."""
        if kv_dtype == FLOAT8 and capability is not None and (why_not := why_no_float8(capability)):
            return f"kv_cache_dtype is fp8, and {why_not}"
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            return f"the model's head size must be even and at most {MAX_HEAD_DIM}, is {head_dim}"
        if num_groups > MAX_GROUPS:
            return f"at most {MAX_GROUPS} query heads may share a key head, and {num_groups} do"
        if hidden_size > MAX_HIDDEN_SIZE:
            return f"the model's hidden size must be at most {MAX_HIDDEN_SIZE}, is {hidden_size}"
        return ""

    def prepare(self, layout: StepLayout) -> TritonPlan:
        decodes = layout.num_decodes
        return self._plan(layout, int(layout.context_lens[:decodes].max()) if decodes else 0)

    def reserve_decode_plan(self, num_seqs: int, max_context_len: int) -> TritonPlan:
        """A plan for steps in which up to `num_seqs` sequences decode, none longer than `max_context_len`; made by
        `refill`. Rows that it leaves empty attend to nothing and write nothing."""
        return self._plan(empty_decodes(num_seqs, -(-max_context_len // self._block_size)), max_context_len)

    def refill(self, plan: TritonPlan, layout: StepLayout) -> None:
        """Put a decoding step into a reserved plan, in stream order. Raises `ValueError` where it does not fit."""
        num_seqs, num_blocks = plan.block_tables.shape
        filled = fill_up_decodes(layout, num_seqs, num_blocks, plan.max_context_len)
        plan.buffer.copy_(to_device(pack(self._arrays(filled)), self._device), non_blocking=True)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        heads: HeadProjection,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        return project_heads(qkv_TX, kv, plan.slot_mapping, heads, cos_sin)

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, sliding_window: int) -> torch.Tensor:
        q_TNH = q_TNH.contiguous()
        o_TNH = torch.empty_like(q_TNH)
        decodes = plan.num_decodes
        if decodes:
            paged_decode(
                q_TNH[:decodes], kv, plan.block_tables, plan.context_lens, o_TNH[:decodes], plan.scratch,
                max_context_len=plan.max_context_len, window=sliding_window, soft_cap=self._soft_cap,
                config=self._decode_config,
            )  # fmt: skip
        if len(plan.prefill_tiles):
            paged_prefill(
                q_TNH, kv, plan.block_tables, plan.context_lens, plan.query_starts, plan.prefill_tiles, o_TNH,
                window=sliding_window, soft_cap=self._soft_cap, config=self._prefill_config,
            )  # fmt: skip
        return o_TNH.view(len(o_TNH), -1)

    def _arrays(self, layout: StepLayout) -> list[IntArray]:
        """In the order of `TritonPlan`."""
        starts = np.concatenate(([0], np.cumsum(layout.query_lens))).astype(np.int32)
        tiles = list_tiles(layout.query_lens, layout.context_lens, layout.num_decodes, self._tokens_per_tile)
        return [
            layout.slot_mapping.astype(np.int64, copy=False),
            layout.context_lens.astype(np.int32),
            starts,
            layout.block_tables.astype(np.int32),
            tiles,
        ]

    def _plan(self, layout: StepLayout, max_context_len: int) -> TritonPlan:
        """`max_context_len`: of sequences that decode, in this step or in one that is put into the plan later."""
        arrays, num_decodes = self._arrays(layout), layout.num_decodes
        buffer = to_device(pack(arrays), self._device)
        slot_mapping, context_lens, query_starts, block_tables, prefill_tiles = unpack(buffer, arrays)
        size = partial_size(num_decodes, self._num_heads, self._head_dim, max_context_len, self._decode_config)
        return TritonPlan(
            buffer=buffer,
            slot_mapping=slot_mapping,
            context_lens=context_lens,
            query_starts=query_starts,
            block_tables=block_tables,
            prefill_tiles=prefill_tiles,
            num_decodes=num_decodes,
            max_context_len=max_context_len,
            scratch=torch.empty(size, dtype=torch.float32, device=self._device),
        )
