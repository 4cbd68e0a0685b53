"""Cuts one rank's part of each weight out of the whole weights.

    q, gate, up, kv_b    outputs: each rank has some heads, or a part of the feed-forward's intermediate size
    k, v                 outputs; with fewer key heads than ranks, several ranks have the same one
    o, down              the corresponding inputs; the products are partial sums, which ranks add up (engine/layers.py)
    all else             whole

Every rank reads whole weights, one at a time, and keeps its part. Each rank also has a part of every expert.
"""

from __future__ import annotations

import torch

from engine.model_loader.weights import Weights
from engine.weight import Weight, part_of
from engine.weight_cut import INPUTS, OUTPUTS, Cut, CutOf

CUT_OUTPUTS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", ".w1", ".w3")
CUT_KEY_HEADS = ("k_proj", "v_proj")
CUT_INPUTS = ("o_proj", "down_proj", ".w2")


def cuts_of_rank(rank: int, num_ranks: int, num_key_parts: int) -> CutOf:
    """`num_key_parts`: see engine/tensor_parallel/shares.py."""

    def cut_of(product: str) -> Cut | None:
        if product.endswith(CUT_KEY_HEADS):
            return Cut(OUTPUTS, num_key_parts, rank * num_key_parts // num_ranks)
        if product.endswith(CUT_OUTPUTS):
            return Cut(OUTPUTS, num_ranks, rank)
        return Cut(INPUTS, num_ranks, rank) if product.endswith(CUT_INPUTS) else None

    return cut_of


class ShardedWeights(Weights):
    """Takes shapes of the rank's parts. `whole`: the model's weights, which this object then owns."""

    def __init__(self, whole: Weights, cut_of: CutOf, *, has_biases: bool) -> None:
        """`has_biases`: whether this rank adds the biases of products that are summed over ranks; only one rank may."""
        self.dtype, self.device = whole.dtype, whole.device
        self._whole = whole
        self._cut_of = cut_of
        self._has_biases = has_biases

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        product, _, kind = name.rpartition(".")
        if kind == "bias" and product.endswith(CUT_INPUTS):
            bias = self._whole.take(name, shape, dtype)
            return bias if self._has_biases else torch.zeros_like(bias)
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

    def take_integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._whole.take_integers(name, shape)

    def has(self, name: str) -> bool:
        return self._whole.has(name)

    def ignore(self, suffix: str) -> None:
        self._whole.ignore(suffix)

    def ignore_layer(self, layer: int) -> None:
        self._whole.ignore_layer(layer)

    def check_all_taken(self) -> None:
        self._whole.check_all_taken()

    def check_layer_taken(self, layer: int) -> None:
        self._whole.check_layer_taken(layer)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError("parts are cut out of what the other source has read")
