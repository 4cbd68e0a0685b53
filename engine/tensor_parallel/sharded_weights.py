"""One rank's part of each weight, cut out of another source's.

    q, k, v, gate, up    outputs: each rank has some heads, or some of the feed-forward's inner numbers
    o, down              inputs, of the same; their products are partial sums, which ranks add up (engine/layers.py)
    all else             whole

Every rank reads all of a weight, one at a time, and keeps its part.
"""

from __future__ import annotations

import torch

from engine.model_loader.weights import Weights
from engine.scaled_weight import Weight, part_of

OUTPUTS, INPUTS = 0, 1
CUT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_INPUTS = ("o_proj", "down_proj")


class ShardedWeights(Weights):
    """Asked for the shapes of a rank's part. `whole`: the model's weights; they are this object's from now on."""

    def __init__(self, whole: Weights, rank: int, num_ranks: int) -> None:
        self.dtype, self.device = whole.dtype, whole.device
        self._whole = whole
        self._rank = rank
        self._num_ranks = num_ranks

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        product, _, kind = name.rpartition(".")
        if kind == "bias" and product.endswith(CUT_INPUTS):
            bias = self._whole.take(name, shape, dtype)
            return bias if self._rank == 0 else torch.zeros_like(bias)  # it is added once
        axis = _cut_axis(product)
        if axis is None:
            return self._whole.take(name, shape, dtype)
        part = part_of(self._whole.take(name, self._whole_shape(shape, axis), dtype), axis, self._part(shape, axis))
        assert isinstance(part, torch.Tensor)
        return part

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        axis = _cut_axis(name.rpartition(".")[0])
        if axis is None:
            return self._whole.take_product(name, shape)
        num_outputs, num_inputs = self._whole_shape(shape, axis)
        whole = self._whole.take_product(name, (num_outputs, num_inputs))
        return part_of(whole, axis, self._part(shape, axis))

    def ignore(self, suffix: str) -> None:
        self._whole.ignore(suffix)

    def ignore_layer(self, layer: int) -> None:
        self._whole.ignore_layer(layer)

    def check_all_taken(self) -> None:
        self._whole.check_all_taken()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError("parts are cut out of what the other source has read")

    def _whole_shape(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        return tuple(size * self._num_ranks if i == axis else size for i, size in enumerate(shape))

    def _part(self, shape: tuple[int, ...], axis: int) -> range:
        return range(self._rank * shape[axis], (self._rank + 1) * shape[axis])


def _cut_axis(product: str) -> int | None:
    if product.endswith(CUT_OUTPUTS):
        return OUTPUTS
    return INPUTS if product.endswith(CUT_INPUTS) else None
