"""Attention on a GPU to keys and values that are unfolded from latents, one slice of the contexts after the other.

    a step     list slices (engine/attention/unfolded_slices.py), copy them and the slot mapping to the device
    a slice    gather latents from the pool ──> keys and values by the library's products ──> one launch for all tiles

Owns nothing: a slice's memory is freed after the slice. A step takes at most `Unfolding.max_bytes`, and some more for
gathered latents and for softmax sums that continue in a later slice. The size of the KV pool is measured with it.

Shapes: T tokens of the step, N query heads; C latent dim, P rotated key dim, R = C + P; Q dim of a head's query without
positions, V dim of its value; S slots of a slice. A layer of the pool: [block, 1, 1, slot, R].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import StepLayout
from engine.attention.latent_forms import Part, Unfolding
from engine.attention.step_arrays import IntArray, pack, unpack
from engine.attention.unfolded_slices import list_slices, slots_of_slice
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.kernels.gpu.unfolded import UnfoldedConfig, attend_unfolded, state_size
from engine.kv_cache import TORCH_DTYPES, as_movable
from engine.layers import LatentProjection
from engine.to_device import to_device


@dataclass(frozen=True, slots=True)
class UnfoldedPlan:
    """Tensors on the device."""

    slot_mapping: torch.Tensor
    """[T] int64, of all tokens of the step"""
    slices: list[tuple[torch.Tensor, torch.Tensor]]
    """int32: `Slice.block_ids` and `Slice.tiles` of each slice"""
    is_cut: bool
    """Whether any sequence continues in another slice."""


class UnfoldedAttention:
    def __init__(
        self, *, unfolding: Unfolding, num_heads: int, block_size: int, dtype: str, device: str, kind: GpuKind
    ) -> None:
        self._config = UnfoldedConfig.of(kind, TORCH_DTYPES[dtype].itemsize)
        self._block_size, self._device = block_size, device
        bytes_per_token = num_heads * (unfolding.query_dim + unfolding.value_dim) * TORCH_DTYPES[dtype].itemsize
        self._num_slots = slots_of_slice(bytes_per_token, unfolding.max_bytes, block_size)

    def prepare(self, layout: StepLayout, part: Part) -> UnfoldedPlan:
        """Plan a step whose sequences in `part` are unfolded."""
        slices = list_slices(
            part, block_size=self._block_size, num_slots=self._num_slots, tokens_per_tile=self._config.block_m
        )
        arrays: list[IntArray] = [layout.slot_mapping]
        for each in slices:
            arrays += [each.block_ids, each.tiles]
        slot_mapping, *parts = unpack(to_device(pack(arrays), self._device), arrays)
        is_cut = bool(part.layout.context_lens.max() > self._num_slots)
        return UnfoldedPlan(slot_mapping, list(zip(parts[::2], parts[1::2], strict=True)), is_cut)

    def attend(
        self,
        q_TX: torch.Tensor,
        rotated_TNP: torch.Tensor,
        kv: torch.Tensor,
        plan: UnfoldedPlan,
        heads: LatentProjection,
        out_TNV: torch.Tensor,
        scale: float,
    ) -> None:
        """Attend for the tokens in `plan` and write to their rows of `out_TNV`. `q_TX`: see `LatentBackend`;
        `rotated_TNP`: the rotated last P numbers of its heads."""
        (N, Q, C), V = heads.up_key.shape, heads.up_value.shape[2]
        size = state_size(len(q_TX), N, V) if plan.is_cut else 1
        state = torch.empty(size, dtype=torch.float32, device=q_TX.device)
        for block_ids, tiles in plan.slices:
            latent_SR = _gathered(kv, block_ids, q_TX.dtype)
            k_NSQ, v_NSV = (q_TX.new_empty(N, len(latent_SR), numbers) for numbers in (Q, V))
            heads.unfold(latent_SR[:, :C], k_NSQ, v_NSV)
            attend_unfolded(
                q_TX, rotated_TNP, k_NSQ, v_NSV, latent_SR, tiles, out_TNV, state, scale=scale, config=self._config
            )


def _gathered(kv: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[S, R]: whole blocks, converted to `dtype`."""
    blocks = as_movable(kv).view(len(kv), -1).index_select(0, block_ids)
    return blocks.view(kv.dtype).view(-1, kv.shape[-1]).to(dtype)
