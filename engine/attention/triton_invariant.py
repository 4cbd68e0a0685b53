"""Paged attention on a GPU that gives a token the same bits in any step (`batch_invariant`), by Triton kernels
(engine/kernels/gpu/pieces.py).

A token's sums run over its own context, cut at fixed positions, whichever other sequences and however many tokens of
its own sequence the step computes. So a sequence that is preempted, moved to another worker, or checked with drafts
continues with the bits that it would have had.

It uses the same plans as `TritonAttention`, is captured in CUDA graphs the same way, and serves the same models.

Shapes: T tokens, N query heads, H head dim.
"""

from __future__ import annotations

import torch

from engine.attention.triton_plans import TritonHeadsBackend, TritonPlan
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.pieces import PiecesCall, PiecesConfig, partial_size
from engine.kv_cache import KV_DTYPES, TORCH_DTYPES
from engine.models.scores import Scores


class InvariantTritonAttention(TritonHeadsBackend):
    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        kv_dtype: str,
        device: str,
        kind: GpuKind,
    ) -> None:
        """See `TritonAttention`."""
        self._num_heads, self._head_dim = num_heads, head_dim
        itemsize, kv_itemsize = TORCH_DTYPES[dtype].itemsize, KV_DTYPES[kv_dtype].itemsize
        num_groups = num_heads // num_kv_heads
        self._config = PiecesConfig.of(kind, head_dim, itemsize, num_groups, kv_itemsize)
        super().__init__(block_size=block_size, tokens_per_tile=self._config.block_m // num_groups, device=device)

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q_TNH = q_TNH.contiguous()
        o_TNH = torch.empty_like(q_TNH)
        call = PiecesCall(
            q=q_TNH, kv=kv, block_tables=plan.block_tables, context_lens=plan.context_lens,
            query_starts=plan.query_starts, out=o_TNH, scores=scores, config=self._config, scratch=plan.scratch,
            sinks=sinks_N,
        )  # fmt: skip
        if plan.num_decodes:
            call.decode(plan.num_decodes, plan.max_context_len)
        if len(plan.prefill_tiles):
            call.prefill(plan.prefill_tiles)
        return o_TNH.view(len(o_TNH), -1)

    def _scratch_size(self, num_seqs: int, max_context_len: int) -> int:
        return partial_size(num_seqs, self._num_heads, self._head_dim, max_context_len)
