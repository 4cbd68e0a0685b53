"""Paged attention on a CPU, in bfloat16, by our own kernels (engine/kernels/source/head_attention.h). For latents:
cpu_latents.py.

The kernels read keys and values in place: nothing is gathered or padded. The pool has the order `PAIRED_KV_ORDER`,
which only these kernels write and read.

Our own decoder, unless it is divided among ranks, does not come through `project` and `attend`:
`engine.kernels.cpu.FusedLayers` passes the plan to C++, which calls the same kernels (engine/kernels/source/layers.h).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, Needs, StepLayout
from engine.layers import CosSin, HeadProjection
from engine.models.scores import Scores

GRAIN = 16
"""Lanes of the kernels' vectors: must divide block sizes and head sizes."""
MAX_HEAD_DIM = 512
MAX_GROUPS = 96
"""The kernels' MAX_ROWS."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    slot_mapping: torch.Tensor
    """[T] int64"""
    block_tables: torch.Tensor
    """[S, blocks of the longest] int32"""
    query_lens: torch.Tensor
    """[S] int32"""
    context_lens: torch.Tensor
    """[S] int32"""

    @staticmethod
    def of(layout: StepLayout) -> CpuPlan:
        return CpuPlan(
            slot_mapping=torch.from_numpy(layout.slot_mapping),
            block_tables=torch.from_numpy(layout.block_tables).int(),
            query_lens=torch.from_numpy(layout.query_lens).int(),
            context_lens=torch.from_numpy(layout.context_lens).int(),
        )


def why_not_either(needs: Needs) -> str:
    """Why the kernels can serve neither heads nor latents, as a clause; empty if they can."""
    if needs.device != "cpu":
        return f"the device is {needs.device}"
    if needs.dtype != "bfloat16":
        return f"it computes bfloat16, and dtype is {needs.dtype}"
    if needs.quantization == "fp8":
        return f"it multiplies with weights in bfloat16, int8 or int4, and quantization is {needs.quantization}"
    if needs.kv_dtype != needs.dtype:
        return f"its pool holds bfloat16, and kv_cache_dtype makes it {needs.kv_dtype}"
    if needs.block_size % GRAIN:
        return f"block_size must be a multiple of {GRAIN}, is {needs.block_size}"
    if any(size % 2 for size in needs.model.product_inputs):
        sizes = " and ".join(map(str, needs.model.product_inputs))
        return f"the model's hidden and intermediate size must be even, are {sizes}"
    return ""


class CpuAttention(AttentionBackend[CpuPlan]):
    """`why_not` says whether it can serve a model. Call `load_cpu_kernels` before the first step."""

    @staticmethod
    def why_not(needs: Needs) -> str:
        """Why it cannot serve, as a clause; empty if it can."""
        model = needs.model
        if why_not := why_not_either(needs):
            return why_not
        if model.has_soft_cap:
            return "the model caps its scores"
        if model.head_dim % GRAIN or model.head_dim > MAX_HEAD_DIM:
            return f"the model's head size must be a multiple of {GRAIN} up to {MAX_HEAD_DIM}, is {model.head_dim}"
        if needs.num_groups > MAX_GROUPS:
            return f"at most {MAX_GROUPS} query heads may share a key head, and {needs.num_groups} do"
        return ""

    def prepare(self, layout: StepLayout) -> CpuPlan:
        return CpuPlan.of(layout)

    def project(
        self,
        qkv_TX: torch.Tensor,
        kv: torch.Tensor,
        plan: CpuPlan,
        heads: HeadProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        q_norm, k_norm = heads.q_norm, heads.k_norm
        q_TNH: torch.Tensor = torch.ops.tandem_cpu.rotate_and_store(
            qkv_TX,
            *cos_sin,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            kv,
            plan.slot_mapping,
        )
        return q_TNH

    def attend(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: CpuPlan,
        scores: Scores,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert not scores.soft_cap, "the configuration has seen to it"
        o_TD: torch.Tensor = torch.ops.tandem_cpu.paged_attention(
            q_TNH,
            kv,
            plan.block_tables,
            plan.query_lens,
            plan.context_lens,
            scores.scale,
            scores.sliding_window,
            sinks_N,
        )
        return o_TD
