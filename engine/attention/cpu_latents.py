"""Paged attention to latents on a CPU, in bfloat16, by our own kernels (engine/kernels/source/latent_attention.h).

The kernels read latents in place. The pool has the order `PAIRED_LATENT_KV_ORDER`, which only these kernels write and
read. All tokens are absorbed (engine/attention/latent_forms.py), those of prompts, too: a token has the same bits
whether its sequence decodes, or its prompt is computed again, in whatever chunks.

`attend` serves models that are divided among ranks, and `write` heads that guess; else all layers are one call, as with
keys and values of heads.

Shapes: T tokens, N query heads, C latent dim, P rotated key dim, R = C + P, V dim of a head's value.
"""

from __future__ import annotations

import torch

from engine.attention.base import LatentBackend, Needs, StepLayout
from engine.attention.cpu_backend import GRAIN, CpuPlan, why_not_either
from engine.kernels.cpu_products import PanelHeadProducts
from engine.layers import CosSin, LatentProjection
from engine.models.deepseek_config import LatentConfig
from engine.models.model_shape import ModelShape


class CpuLatentAttention(LatentBackend[CpuPlan]):
    """`why_not` says whether it can serve a model. Call `load_cpu_kernels` before the first step."""

    @staticmethod
    def why_not(needs: Needs, mla: LatentConfig) -> str:
        """Why it cannot serve, as a clause; empty if it can."""
        if why_not := why_not_either(needs):
            return why_not
        if mla.kv_lora_rank % GRAIN or mla.qk_rope_head_dim % GRAIN:
            return (
                f"the model's kv_lora_rank and qk_rope_head_dim must be multiples of {GRAIN}, are {mla.kv_lora_rank} "
                f"and {mla.qk_rope_head_dim}"
            )
        if odd := [f"{name}={size}" for name, size in _inputs(needs.model, mla).items() if size % 2]:
            return f"the model's sizes must be even, and {', '.join(odd)}"
        return ""

    def prepare(self, layout: StepLayout) -> CpuPlan:
        return CpuPlan.of(layout)

    def write(
        self, latent_TR: torch.Tensor, kv: torch.Tensor, plan: CpuPlan, heads: LatentProjection, cos_sin: CosSin
    ) -> None:
        torch.ops.tandem_cpu.store_latents(
            latent_TR, *cos_sin, heads.norm.weight, heads.norm.eps, kv, plan.slot_mapping
        )

    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: CpuPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
        scale: float,
    ) -> torch.Tensor:
        up_key, up_value = heads.up_key, heads.up_value
        assert isinstance(up_key, PanelHeadProducts)
        assert isinstance(up_value, PanelHeadProducts)
        N, _, V = up_value.shape
        q_TNR = torch.ops.tandem_cpu.absorb(
            q_TX, latent_TR, *cos_sin, heads.norm.weight, heads.norm.eps, up_key.panels, up_key.scale, N, kv,
            plan.slot_mapping,
        )  # fmt: skip
        o_TX: torch.Tensor = torch.ops.tandem_cpu.latent_attention(
            q_TNR, kv, plan.block_tables, plan.query_lens, plan.context_lens, scale, up_value.panels, up_value.scale, V
        )
        return o_TX.view(-1, N, V)


def _inputs(model: ModelShape, mla: LatentConfig) -> dict[str, int]:
    """Numbers of inputs of products, which kernels read in pairs; of those that no other check covers."""
    inputs = {
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "num_attention_heads * v_head_dim": model.num_heads * mla.v_head_dim,
    }
    if model.moe is not None:
        inputs["n_shared_experts * moe_intermediate_size"] = model.moe.num_shared_experts * model.moe.intermediate_size
    return inputs
