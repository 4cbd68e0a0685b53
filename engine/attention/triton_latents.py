"""Paged attention to latents on a GPU, by Triton kernels (engine/kernels/gpu/latents.py).

The kernels read latents in place. Plans, also those for CUDA graphs, are the same as for keys and values
(engine/attention/triton_plans.py). Owns the scratch memory for the pieces of contexts. All plans share it, since steps
run one after the other; one per plan would take gigabytes.

The context of a prompt is unfolded where that pays (engine/attention/latent_forms.py, triton_unfolded.py). Steps in
which all sequences decode, and reserved plans, use only the absorbed form.

Decoding sequences have a kernel of their own, which splits contexts by their length and adds up in another order than
the kernel for prompts. With `batch_invariant`, the latter computes all tokens, absorbed, in tiles of one size: a token
has the same bits whether its sequence decodes, its prompt is computed again, or drafts are checked. With few sequences
and long contexts, much of the GPU is then idle: cutting contexts into pieces (triton_invariant.py) needs a second sum,
for which there are not enough registers.

Shapes: T tokens, A of them absorbed, N query heads, C latent dim, P rotated key dim, R = C + P, V dim of a head's
value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import LatentBackend, Needs, StepLayout
from engine.attention.latent_forms import Part, Unfolding, part_of, unfolded_seqs
from engine.attention.triton_plans import TritonPlan, WithTritonPlans, why_not_either
from engine.attention.triton_unfolded import UnfoldedAttention, UnfoldedPlan
from engine.kernels.gpu.decode import partial_size
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.latent_project import rotate_and_store_latents, store_latents
from engine.kernels.gpu.latents import (
    MAX_LATENT,
    MAX_ROTATED,
    LatentTileConfig,
    decode_latents,
    prefill_latents,
)
from engine.kernels.gpu.unfolded import MAX_QUERY, MAX_VALUE
from engine.kv_cache import KV_DTYPES, TORCH_DTYPES
from engine.layers import CosSin, LatentProjection
from engine.models.deepseek_config import LatentConfig


@dataclass(frozen=True, slots=True)
class MixedTritonPlan:
    """The plan of a step in which some or all sequences are unfolded."""

    unfolded: UnfoldedPlan
    absorbed: tuple[Part, TritonPlan] | None


class TritonLatentAttention(WithTritonPlans, LatentBackend[TritonPlan | MixedTritonPlan]):
    """`why_not` says whether it can serve a model, `engine.kernels.gpu.why_no_triton` whether Triton can run here."""

    def __init__(
        self,
        *,
        num_heads: int,
        kv_lora_rank: int,
        block_size: int,
        dtype: str,
        kv_dtype: str,
        device: str,
        kind: GpuKind,
        batch_invariant: bool = False,
        unfolding: Unfolding | None = None,
    ) -> None:
        """See `TritonAttention`. `unfolding`: None for none; ignored if a head is too large for a tile, and with
        `batch_invariant`."""
        self._num_heads, self._latent_dim = num_heads, kv_lora_rank
        itemsize, kv_itemsize = TORCH_DTYPES[dtype].itemsize, KV_DTYPES[kv_dtype].itemsize
        self._decode_config = LatentTileConfig.of_decode(kind, num_heads, itemsize, kv_itemsize)
        self._prefill_config = LatentTileConfig.of_prefill(kind, itemsize, kv_itemsize)
        super().__init__(
            block_size=block_size,
            tokens_per_tile=self._prefill_config.tokens_per_tile(num_heads),
            device=device,
            splits_decodes=not batch_invariant,
        )
        has_room = unfolding is not None and unfolding.query_dim <= MAX_QUERY and unfolding.value_dim <= MAX_VALUE
        self._unfolding = unfolding if has_room and not batch_invariant else None
        if self._unfolding is not None:
            self._unfolded = UnfoldedAttention(
                unfolding=self._unfolding, num_heads=num_heads, block_size=block_size, dtype=dtype, device=device,
                kind=kind,
            )  # fmt: skip

    @staticmethod
    def why_not(needs: Needs, mla: LatentConfig) -> str:
        """Why it cannot serve, as a clause; empty if it can."""
        if why_not := why_not_either(needs):
            return why_not
        if mla.kv_lora_rank > MAX_LATENT or mla.qk_rope_head_dim > MAX_ROTATED:
            return (
                f"the model's kv_lora_rank must be at most {MAX_LATENT} and its qk_rope_head_dim at most "
                f"{MAX_ROTATED}, are {mla.kv_lora_rank} and {mla.qk_rope_head_dim}"
            )
        return ""

    def prepare(self, layout: StepLayout) -> TritonPlan | MixedTritonPlan:
        is_unfolded = unfolded_seqs(layout, self._unfolding)
        unfolded = part_of(layout, is_unfolded)
        if unfolded is None:
            return self._plan_of(layout)
        absorbed = part_of(layout, ~is_unfolded)
        return MixedTritonPlan(
            self._unfolded.prepare(layout, unfolded),
            None if absorbed is None else (absorbed, self._plan_of(absorbed.layout)),
        )

    def write(
        self,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan | MixedTritonPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
    ) -> None:
        slot_mapping = plan.slot_mapping if isinstance(plan, TritonPlan) else plan.unfolded.slot_mapping
        store_latents(latent_TR, cos_sin, heads.norm.weight, heads.norm.eps, kv, slot_mapping)

    def attend(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan | MixedTritonPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
        scale: float,
    ) -> torch.Tensor:
        if isinstance(plan, TritonPlan):
            q_TNR = self.project(q_TX, latent_TR, kv, plan, heads, cos_sin)
            return heads.values(self.attend_absorbed(q_TNR, kv, plan, scale))
        (N, _, C), V = heads.up_key.shape, heads.up_value.shape[2]
        rotated_TNP = q_TX.new_empty(len(q_TX), N, latent_TR.shape[1] - C)
        rotate_and_store_latents(
            q_TX, latent_TR, cos_sin, heads.norm.weight, heads.norm.eps, kv, plan.unfolded.slot_mapping, rotated_TNP
        )
        o_TNV = q_TX.new_empty(len(q_TX), N, V)
        if plan.absorbed is not None:
            part, absorbed = plan.absorbed
            o_ANC = self.attend_absorbed(_absorbed_queries(q_TX, rotated_TNP, heads, part), kv, absorbed, scale)
            for run in part.runs:
                heads.up_value(o_ANC[run.part], o_TNV[run.step])
        self._unfolded.attend(q_TX, rotated_TNP, kv, plan.unfolded, heads, o_TNV, scale)
        return o_TNV

    def project(
        self,
        q_TX: torch.Tensor,
        latent_TR: torch.Tensor,
        kv: torch.Tensor,
        plan: TritonPlan,
        heads: LatentProjection,
        cos_sin: CosSin,
    ) -> torch.Tensor:
        """Write latents and keys into the pool. Returns queries [T, N, R] in the latent space."""
        q_TNR = q_TX.new_empty(len(q_TX), self._num_heads, latent_TR.shape[1])
        heads.absorb(q_TX, q_TNR)
        rotate_and_store_latents(
            q_TX, latent_TR, cos_sin, heads.norm.weight, heads.norm.eps, kv, plan.slot_mapping, q_TNR
        )
        return q_TNR

    def attend_absorbed(self, q_TNR: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, scale: float) -> torch.Tensor:
        """Compute weighted sums of latents: [T, N, C]."""
        q_TNR = q_TNR.contiguous()
        o_TNC = q_TNR.new_empty(*q_TNR.shape[:2], self._latent_dim)
        decodes = plan.num_decodes
        if decodes:
            decode_latents(
                q_TNR[:decodes], kv, plan.block_tables, plan.context_lens, o_TNC[:decodes], plan.scratch,
                scale=scale, max_context_len=plan.max_context_len, config=self._decode_config,
            )  # fmt: skip
        if len(plan.prefill_tiles):
            prefill_latents(
                q_TNR, kv, plan.block_tables, plan.context_lens, plan.query_starts, plan.prefill_tiles, o_TNC,
                scale=scale, config=self._prefill_config,
            )  # fmt: skip
        return o_TNC

    def _scratch_size(self, num_seqs: int, max_context_len: int) -> int:
        return partial_size(num_seqs, self._num_heads, self._latent_dim, max_context_len, self._decode_config)


def _absorbed_queries(
    q_TX: torch.Tensor, rotated_TNP: torch.Tensor, heads: LatentProjection, part: Part
) -> torch.Tensor:
    """[A, N, R]: the queries of the part's tokens in the latent space."""
    N, _, C = heads.up_key.shape
    q_ANR = q_TX.new_empty(part.num_tokens, N, C + rotated_TNP.shape[2])
    for run in part.runs:
        heads.absorb(q_TX[run.step], q_ANR[run.part])
        q_ANR[run.part, :, C:] = rotated_TNP[run.step]
    return q_ANR
