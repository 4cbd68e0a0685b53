"""One rank's part of each weight, cut out of another source's.

    q, gate, up, kv_b    outputs: each rank has some heads, or some of the feed-forward's inner numbers
    k, v                 outputs; of fewer key heads than ranks, several ranks have the same one
    o, down              inputs, of the same; their products are partial sums, which ranks add up (engine/layers.py)
    all else             whole

Every rank reads all of a weight, one at a time, and keeps its part. Of experts likewise: each rank has a part of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model_loader.weights import Weights
from engine.scaled_weight import Weight, part_of

OUTPUTS, INPUTS = 0, 1
CUT_OUTPUTS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
CUT_KEY_HEADS = ("k_proj", "v_proj")
CUT_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Cut:
    """Part `index` of `num_parts` along an axis."""

    axis: int
    num_parts: int
    index: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a part's."""
        return tuple(size * self.num_parts if i == self.axis else size for i, size in enumerate(shape))

    def part(self, shape: tuple[int, ...]) -> range:
        """Where it lies in the whole."""
        size = shape[self.axis]
        return range(self.index * size, (self.index + 1) * size)


class ShardedWeights(Weights):
    """Asked for the shapes of a rank's part. `whole`: the model's weights; they are this object's from now on.
    `num_key_parts`: see engine/tensor_parallel/shares.py."""

    def __init__(self, whole: Weights, rank: int, num_ranks: int, num_key_parts: int) -> None:
        self.dtype, self.device = whole.dtype, whole.device
        self._whole = whole
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_key_parts = num_key_parts

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        product, _, kind = name.rpartition(".")
        if kind == "bias" and product.endswith(CUT_INPUTS):
            bias = self._whole.take(name, shape, dtype)
            return bias if self._rank == 0 else torch.zeros_like(bias)  # it is added once
        cut = self._cut_of(product)
        if cut is None:
            return self._whole.take(name, shape, dtype)
        part = part_of(self._whole.take(name, cut.whole(shape), dtype), cut.axis, cut.part(shape))
        assert isinstance(part, torch.Tensor)
        return part

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        cut = self._cut_of(name.rpartition(".")[0])
        if cut is None:
            return self._whole.take_product(name, shape)
        num_outputs, num_inputs = cut.whole(shape)
        return part_of(self._whole.take_product(name, (num_outputs, num_inputs)), cut.axis, cut.part(shape))

    def ignore(self, suffix: str) -> None:
        self._whole.ignore(suffix)

    def ignore_layer(self, layer: int) -> None:
        self._whole.ignore_layer(layer)

    def check_all_taken(self) -> None:
        self._whole.check_all_taken()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError("parts are cut out of what the other source has read")

    def _cut_of(self, product: str) -> Cut | None:
        """None: every rank has all of it."""
        if product.endswith(CUT_KEY_HEADS):
            return Cut(OUTPUTS, self._num_key_parts, self._rank * self._num_key_parts // self._num_ranks)
        if product.endswith(CUT_OUTPUTS):
            return Cut(OUTPUTS, self._num_ranks, self._rank)
        return Cut(INPUTS, self._num_ranks, self._rank) if product.endswith(CUT_INPUTS) else None
