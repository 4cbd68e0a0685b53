"""A decoder's shape, weights and parts, as one rank of several has them.

Shapes: T tokens, V vocabulary, P a rank's part of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812

from engine.layers import Linear, MakeLinear
from engine.model_loader.weights import Weights
from engine.models.decoder_config import DecoderConfig
from engine.models.layer import PlainLayers
from engine.models.parts import Parts
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.sharded_weights import ShardedWeights, cuts_of_rank
from engine.tensor_parallel.shares import num_key_parts, share_of
from engine.weight_cut import CutOf


def shared_out(
    shape: DecoderConfig, weights: Weights, parts: Parts, group: RankGroup
) -> tuple[DecoderConfig, Weights, Parts]:
    """Of a whole model's. Raises `ValueError` as `share_of`."""
    share = share_of(shape, group.num_ranks)
    assert isinstance(share, DecoderConfig)
    if share.moe is not None and weights.device != "cpu":
        # Ranks that compute scores otherwise would add up parts of different experts.
        group.check_alike(torch.cuda.get_device_name(), "GPUs that choose experts")

    linear = parts.lm_head

    def lm_head(weight: torch.Tensor) -> Linear:
        return VocabParallelLinear(weight, linear, group)

    # One layer after the other: what computes all in one call could not sum up between them.
    parts = replace(parts, stack=PlainLayers, lm_head=lm_head, sum_over_ranks=group.sum)
    return share, ShardedWeights(weights, cuts_of(shape, group), has_biases=group.rank == 0), parts


def cuts_of(shape: DecoderConfig, group: RankGroup) -> CutOf:
    """What this rank has of a whole model's products."""
    return cuts_of_rank(group.rank, group.num_ranks, num_key_parts(shape, group.num_ranks))


class VocabParallelLinear(Linear):
    """Logits: each rank multiplies with its rows of the weight, and gets all. Without a bias."""

    def __init__(self, weight: torch.Tensor, linear: MakeLinear, group: RankGroup) -> None:
        self._num_outputs = len(weight)
        self._group = group
        num_rows = -(-self._num_outputs // group.num_ranks)
        rows = weight[group.rank * num_rows : (group.rank + 1) * num_rows].clone()
        self._linear = linear(rows)
        self._num_missing = num_rows - len(rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, V]"""
        y_TP = F.pad(self._linear(x), (0, self._num_missing))
        return self._group.gather_outputs(y_TP, self._num_outputs)
