"""Paged attention on a GPU, by Triton kernels (engine/kernels/gpu/).

The kernels read keys and values in place: nothing is gathered or padded. The pool has the order `KV_ORDER`.

One copy brings a step's arrays to the device (engine/attention/triton_plans.py). Nothing is read back, and the grids of
a decode step depend only on what the host knows, so that such a step can be captured as a CUDA graph.

Decoding sequences have a kernel of their own, which splits contexts by their length and adds up in another order than
the kernel for prompts. engine/attention/triton_invariant.py gives a token the same bits in both.

Shapes: T tokens, S sequences, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import torch

from engine.attention.base import Needs
from engine.attention.triton_plans import TritonHeadsBackend, TritonPlan, why_not_either
from engine.kernels.gpu.decode import DecodeConfig, paged_decode, partial_size
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.prefill import MAX_GROUPS, MAX_LARGE_GROUPS, PrefillConfig, paged_prefill
from engine.kernels.gpu.tile import MAX_HEAD_DIM
from engine.kv_cache import KV_DTYPES, TORCH_DTYPES
from engine.models.scores import Scores

MAX_SMALL_HEAD_DIM = 256
"""With larger heads, the kernels for `batch_invariant` have too few registers, and others fewer rows."""


class TritonAttention(TritonHeadsBackend):
    """`why_not` says whether it can serve a model, `engine.kernels.gpu.why_no_triton` whether Triton can run here."""

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
        """`dtype`: of queries. `kv_dtype`: the pool's. `kind`: the device's."""
        self._num_heads, self._head_dim = num_heads, head_dim
        itemsize, kv_itemsize = TORCH_DTYPES[dtype].itemsize, KV_DTYPES[kv_dtype].itemsize
        num_groups = num_heads // num_kv_heads
        self._decode_config = DecodeConfig.of(kind, head_dim, itemsize, kv_itemsize)
        self._prefill_config = PrefillConfig.of(kind, head_dim, itemsize, num_groups, kv_itemsize)
        super().__init__(
            block_size=block_size, tokens_per_tile=self._prefill_config.block_m // num_groups, device=device
        )

    @staticmethod
    def why_not(needs: Needs) -> str:
        """Why it cannot serve, as a clause; empty if it can."""
        if why_not := why_not_either(needs):
            return why_not
        head_dim = needs.model.head_dim
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            return f"the model's head size must be even and at most {MAX_HEAD_DIM}, is {head_dim}"
        if needs.batch_invariant and head_dim > MAX_SMALL_HEAD_DIM:
            return f"with batch_invariant, a head's size must be at most {MAX_SMALL_HEAD_DIM}, is {head_dim}"
        most_groups = MAX_GROUPS if head_dim <= MAX_SMALL_HEAD_DIM else MAX_LARGE_GROUPS
        if needs.num_groups > most_groups:
            return f"at most {most_groups} query heads may share a key head, and {needs.num_groups} do"
        return ""

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
        self.attend_decodes(q_TNH, kv, plan, o_TNH, scores, sinks_N)
        if len(plan.prefill_tiles):
            paged_prefill(
                q_TNH, kv, plan.block_tables, plan.context_lens, plan.query_starts, plan.prefill_tiles, o_TNH,
                scores=scores, sinks_N=sinks_N, config=self._prefill_config,
            )  # fmt: skip
        return o_TNH.view(len(o_TNH), -1)

    def attend_decodes(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        o_TNH: torch.Tensor,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> None:
        """Compute the first rows of `o_TNH`, those of decoding sequences. `q_TNH` must be contiguous."""
        decodes = plan.num_decodes
        if decodes:
            paged_decode(
                q_TNH[:decodes], kv, plan.block_tables, plan.context_lens, o_TNH[:decodes], plan.scratch,
                max_context_len=plan.max_context_len, scores=scores, sinks_N=sinks_N, config=self._decode_config,
            )  # fmt: skip

    def _scratch_size(self, num_seqs: int, max_context_len: int) -> int:
        return partial_size(num_seqs, self._num_heads, self._head_dim, max_context_len, self._decode_config)
