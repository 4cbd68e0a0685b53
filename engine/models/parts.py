"""What a decoder is made of, and how its products and norms come from a checkpoint's tensors.

`Parts` are the classes: plain torch's, or those that compute the same faster on some device. `PartsFactory` makes
objects of them from weights, by their Hugging Face names. Neither keeps a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.int4_weight import Int4Weight
from engine.layers import (
    FloatLinear,
    GatedLinear,
    HeadProducts,
    Linear,
    MakeLinear,
    RMSNorm,
    RowParallelLinear,
    SumOverRanks,
)
from engine.lora.adapters import Adapters
from engine.model_loader.weights import Weights
from engine.models.expert_choice import ChooseExperts, choose_experts
from engine.models.expert_products import (
    ExpertProducts,
    ExpertWeight,
    ExpertWeights,
    PlainExperts,
    ScaledExperts,
    SumOfExperts,
    sum_of_experts,
)
from engine.models.experts_config import ExpertsConfig
from engine.models.four_bit_experts import ClampedGate, FourBitStack
from engine.models.layer import DecoderLayer, LayerStack, PlainLayers
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight, stacked


@dataclass(frozen=True, slots=True)
class Parts:
    """What a decoder is made of: plain torch, or what computes the same faster on some device."""

    linear: MakeLinear = Linear
    gated_linear: Callable[..., GatedLinear] = GatedLinear
    """Called as `GatedLinear` is; with a `linear` by `with_products` and plain adapters alone."""
    lm_head: MakeLinear = Linear
    rms_norm: type[RMSNorm] = RMSNorm
    stack: Callable[[list[DecoderLayer]], LayerStack] = PlainLayers
    """Makes of the layers what computes them one after the other."""
    scores: MakeLinear = FloatLinear
    """Of experts, in float32."""
    choose_experts: ChooseExperts = choose_experts
    head_products: type[HeadProducts] = HeadProducts
    """Of latent attention."""
    plain_experts: Callable[[torch.Tensor, torch.Tensor], ExpertProducts] = PlainExperts
    each_expert: Callable[[Iterator[ExpertWeight]], ExpertProducts] | None = None
    """Of experts whose weights are kept one by one, as stored; None: all are stacked, as one of those around this."""
    scaled_experts: Callable[[ScaledWeight, ScaledWeight], ExpertProducts] = ScaledExperts
    """Of (gate and up, down), in 8 bits."""
    int4_experts: Callable[[Int4Weight, Int4Weight], ExpertProducts] = ScaledExperts
    """The same in 4 bits (engine/int4_weight.py)."""
    four_bit_experts: Callable[[FourBitStack, FourBitStack, ClampedGate], ExpertProducts] | None = None
    """Of (gate and up, down), in MXFP4. None: such weights are widened when they are loaded."""
    sum_of_experts: SumOfExperts = sum_of_experts
    sum_over_ranks: SumOverRanks | None = None
    """None: one rank computes the whole model."""
    adapters: Adapters | None = None
    """What some requests' products are changed by."""

    def with_products(self, linear: MakeLinear) -> Parts:
        """The same parts, but for the products of layers: not that of the logits. Of parts whose `gated_linear` takes
        a `linear`."""
        return replace(self, linear=linear, gated_linear=partial(self.gated_linear, linear=linear))


PLAIN_PARTS = Parts()

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
"""[outputs, inputs] and, where there is one, [outputs]."""


@dataclass(frozen=True, slots=True)
class PartsFactory:
    """Takes tensors from `weights` and makes `parts` of them. Each raises `ValueError` where a tensor does not fit."""

    weights: Weights
    parts: Parts
    rms_norm_eps: float

    def linear(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """The products of those names as one, one below the other; sizes in numbers."""
        linear = self.fused([self._as_stored(name, size, inputs, has_bias) for name, size in outputs.items()])
        return self._adapted(linear, outputs, inputs)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, has_bias: bool) -> Linear:
        """A product whose inputs are a rank's own."""
        linear = self.linear({name: outputs}, inputs, has_bias)
        sum_over_ranks = self.parts.sum_over_ranks
        return linear if sum_over_ranks is None else RowParallelLinear(linear, sum_over_ranks)

    def fused(self, products: Sequence[tuple[Weight, torch.Tensor | None]]) -> Linear:
        """Products of the same inputs as one. Either all have a bias or none."""
        biases = [bias for _, bias in products if bias is not None]
        weight = stacked([weight for weight, _ in products])
        return self.parts.linear(weight, torch.cat(biases) if biases else None)

    def gated_linear(self, gate: str, up: str, outputs: int, inputs: int, has_bias: bool) -> GatedLinear:
        gate_weight, gate_bias = self._as_stored(gate, outputs, inputs, has_bias)
        up_weight, up_bias = self._as_stored(up, outputs, inputs, has_bias)
        gated_linear = partial(self.parts.gated_linear, gate_weight, up_weight, gate_bias, up_bias)
        adapters = self.parts.adapters
        if adapters is None:
            return gated_linear()
        return adapters.adapt_gated(gated_linear, self.parts.linear, {gate: outputs, up: outputs}, inputs)

    def experts(self, name: str, config: ExpertsConfig, hidden_size: int) -> ExpertProducts:
        """As stored where each is kept for itself; else in 8 or 4 bits where the weights of all are, and alike."""
        weights = ExpertWeights(self.weights, name, config, hidden_size)
        if self.parts.each_expert is not None:
            return self.parts.each_expert(weights.take_each())
        match weights.take_stacked():
            case (ScaledWeight() as gate_up, ScaledWeight() as down):
                return self.parts.scaled_experts(gate_up, down)
            case (Int4Weight() as gate_up, Int4Weight() as down):
                return self.parts.int4_experts(gate_up, down)
        return self.parts.plain_experts(*weights.take_plain())

    def rms_norm(self, name: str, size: int, eps: float | None = None) -> RMSNorm:
        """`eps`: where it is not the model's."""
        weight = self.weights.take(f"{name}.weight", (size,))
        return self.parts.rms_norm(weight, self.rms_norm_eps if eps is None else eps)

    def weight_and_bias(self, name: str, outputs: int, inputs: int, has_bias: bool) -> WeightAndBias:
        weight = self.weights.take(f"{name}.weight", (outputs, inputs))
        return weight, self._bias(name, outputs, has_bias)

    def _adapted(self, linear: Linear, outputs: dict[str, int], inputs: int) -> Linear:
        adapters = self.parts.adapters
        return linear if adapters is None else adapters.adapt(linear, outputs, inputs)

    def _as_stored(self, name: str, outputs: int, inputs: int, has_bias: bool) -> tuple[Weight, torch.Tensor | None]:
        weight = self.weights.take_product(f"{name}.weight", (outputs, inputs))
        return weight, self._bias(name, outputs, has_bias)

    def _bias(self, name: str, outputs: int, has_bias: bool) -> torch.Tensor | None:
        return self.weights.take(f"{name}.bias", (outputs,)) if has_bias else None
