"""One rank's version of a decoder's shape, weights and parts.

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
from engine.models.transformers_config import TransformersConfig
from engine.tensor_parallel.group import RankGroup
from engine.tensor_parallel.sharded_weights import ShardedWeights, cuts_of_rank
from engine.tensor_parallel.shares import num_key_parts, share_of
from engine.tensor_parallel.transformers_share import TransformersShare
from engine.weight_cut import CutOf


def shared_out(
    shape: DecoderConfig, weights: Weights, parts: Parts, group: RankGroup
) -> tuple[DecoderConfig, Weights, Parts]:
    """Derive a rank's shape, weights and parts from the whole model's. Raises what `share_of` raises, and `ValueError`
    if the ranks' GPUs differ and the model has experts."""
    share = share_of(shape, group.num_ranks)
    assert isinstance(share, DecoderConfig)
    if share.moe is not None:
        _check_gpus_alike(group)
    # Compute layers one by one: a single call for all layers could not sum over ranks in between.
    lm_head = _vocab_parallel(parts.lm_head, group)
    parts = replace(parts, stack=PlainLayers, lm_head=lm_head, sum_over_ranks=group.sum)
    return share, ShardedWeights(weights, cuts_of(shape, group), has_biases=group.rank == 0), parts


def part_of_transformers(
    shape: TransformersConfig, parts: Parts, group: RankGroup
) -> tuple[TransformersConfig, MakeLinear, TransformersShare]:
    """A rank's part of a model that transformers' code computes: its shape, its product for logits, and what cuts its
    weights. `shape`: the whole model's. Raises what `share_of` raises, and `ValueError` as `shared_out` does."""
    own = share_of(shape, group.num_ranks)
    assert isinstance(own, TransformersConfig)
    if shape.has_experts:
        _check_gpus_alike(group)
    return own, _vocab_parallel(parts.lm_head, group), TransformersShare(shape.splits, group)


def _check_gpus_alike(group: RankGroup) -> None:
    """Different GPUs may compute scores differently; ranks would then add up parts of different experts."""
    if group.device != "cpu":
        group.check_alike(torch.cuda.get_device_name(), "GPUs that choose experts")


def _vocab_parallel(linear: MakeLinear, group: RankGroup) -> MakeLinear:
    def lm_head(weight: torch.Tensor) -> Linear:
        return VocabParallelLinear(weight, linear, group)

    return lm_head


def cuts_of(shape: DecoderConfig, group: RankGroup) -> CutOf:
    """This rank's part of each product."""
    return cuts_of_rank(group.rank, group.num_ranks, num_key_parts(shape, group.num_ranks))


class VocabParallelLinear(Linear):
    """Logits: each rank multiplies with its rows of the weight and gathers the logits of all. Without a bias."""

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
