"""One rank's part of a model that transformers' code computes, as its splits say (engine/models/split.py).

    q, k, v   outputs ──> attention of the rank's heads ──> o   inputs ──> sum over ranks
    products before a norm of all heads, or fused ones   outputs ──> gathered ──> attention of the rank's heads ──>
              gathered ──> o
    gate, up  outputs ──> down  inputs ──> sum over ranks;  experts: the same for each of them ──> sum over ranks

Every rank reads whole weights, one at a time, and keeps its part.

Shapes: T tokens, R a rank's part of the inputs or outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from engine.layers import Linear, SumOverRanks
from engine.models.expert_parts import keep_part
from engine.models.expert_products import ExpertWeight
from engine.models.four_bit_experts import GROUP
from engine.models.share import AnyWeight
from engine.models.split import EXPERTS, GATHERED, INPUTS, Split
from engine.models.transformers_experts import FourBitExperts
from engine.narrow_weight import NarrowWeight
from engine.tensor_parallel.group import RankGroup
from engine.weight import part_of
from engine.weight_cut import INPUTS as INPUTS_AXIS
from engine.weight_cut import OUTPUTS as OUTPUTS_AXIS
from engine.weight_cut import Cut


class TransformersShare:
    """Implements `engine.models.share.Share`."""

    def __init__(self, splits: Iterable[Split], group: RankGroup) -> None:
        self._splits = {split.name: split for split in splits}
        self._group = group

    def cut_of(self, product: str) -> Cut | None:
        """See `engine.weight_cut.CutOf`."""
        split = self._splits.get(product)
        return None if split is None else split.cut(self._group.rank, self._group.num_ranks)

    def is_cut(self, name: str) -> bool:
        return self.cut_of(name) is not None

    def is_gathered(self, name: str) -> bool:
        return self.is_cut(name) and self._splits[name].how == GATHERED

    def own_size(self, name: str, size: tuple[int, int]) -> tuple[int, int]:
        cut = self.cut_of(name)
        if cut is None:
            return size
        outputs, inputs = (len(cut.part_of(n)) if axis == cut.axis else n for axis, n in enumerate(size))
        return outputs, inputs

    def weight(self, name: str, weight: AnyWeight, size: tuple[int, int]) -> AnyWeight:
        cut = self.cut_of(name)
        if cut is None:
            return weight
        part = cut.part_of(size[cut.axis])
        return weight.part(cut.axis, part) if isinstance(weight, NarrowWeight) else part_of(weight, cut.axis, part)

    def bias(self, name: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        cut = self.cut_of(name)
        if bias is None or cut is None:
            return bias
        if cut.axis == INPUTS_AXIS:
            return bias if self._group.rank == 0 else None  # added once
        part = cut.part_of(len(bias))
        return bias[part.start : part.stop].clone()

    def joined(self, name: str, linear: Linear, size: tuple[int, int]) -> Linear:
        cut = self.cut_of(name)
        if cut is None:
            return linear
        num_outputs, num_inputs = size
        if self._splits[name].how == INPUTS:
            return _SummedLinear(linear, cut.part_of(num_inputs), self._group.sum)
        if self.is_gathered(name):
            return _GatheredLinear(linear, num_outputs, self._group)
        return linear

    def cut_experts(self, causal_lm: nn.Module, stored: dict[str, list[ExpertWeight]]) -> None:
        for name, cut in self._cut_experts():
            if name in stored:
                stored[name] = [_part_of_expert(expert, cut) for expert in stored[name]]
            else:
                module, num_units = causal_lm.get_submodule(name), self._splits[name].num_units
                in_groups = isinstance(module, FourBitExperts) and num_units >= GROUP * cut.num_parts
                part = cut.part_in_groups(num_units, GROUP) if in_groups else cut.part_of(num_units)
                keep_part(module, part, has_output_bias=self._group.rank == 0)

    def sum_experts(self, causal_lm: nn.Module) -> None:
        for name, _ in self._cut_experts():
            causal_lm.set_submodule(name, _Summed(causal_lm.get_submodule(name), self._group.sum))

    def _cut_experts(self) -> Iterator[tuple[str, Cut]]:
        for name, split in self._splits.items():
            cut = self.cut_of(name)
            if split.how == EXPERTS and cut is not None:
                yield name, cut

    def own_heads(self, x_1N: torch.Tensor, num_own: int) -> torch.Tensor:
        num_heads, rank, num_ranks = x_1N.shape[1], self._group.rank, self._group.num_ranks
        if num_heads == num_own:
            return x_1N
        num_parts = min(num_heads, num_ranks)
        first = rank * num_parts // num_ranks * num_own
        return x_1N[:, first : first + num_own]

    def all_heads(self, o_TX: torch.Tensor, size: int) -> torch.Tensor:
        return self._group.gather_outputs(o_TX, size)


def _part_of_expert(expert: ExpertWeight, cut: Cut) -> ExpertWeight:
    gate, up, down = expert
    part = cut.part_of(len(gate))
    return part_of(gate, OUTPUTS_AXIS, part), part_of(up, OUTPUTS_AXIS, part), part_of(down, INPUTS_AXIS, part)


class _SummedLinear(Linear):
    """A product with some inputs, summed over ranks."""

    def __init__(self, linear: Linear, part: range, sum_over_ranks: SumOverRanks) -> None:
        self._linear, self._part, self._sum_over_ranks = linear, part, sum_over_ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, all inputs] or [T, R] -> [T, out]. What comes before the product may compute all inputs, or only this
        rank's."""
        if x.shape[-1] != len(self._part):
            x = x[..., self._part.start : self._part.stop].contiguous()
        return self._sum_over_ranks(self._linear(x))


class _GatheredLinear(Linear):
    """A product whose outputs come from all ranks."""

    def __init__(self, linear: Linear, num_outputs: int, group: RankGroup) -> None:
        self._linear, self._num_outputs, self._group = linear, num_outputs, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, all outputs]"""
        return self._group.gather_outputs(self._linear(x), self._num_outputs)


class _Summed(nn.Module):
    """A layer's experts, of each of which a rank has a part."""

    def __init__(self, experts: nn.Module, sum_over_ranks: SumOverRanks) -> None:
        super().__init__()
        self._experts, self._sum_over_ranks = experts, sum_over_ranks

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._sum_over_ranks(self._experts(*args, **kwargs))
