"""The classes that a decoder is made of, and a factory that makes its products and norms from a checkpoint's tensors.

`Parts` holds the classes: plain torch, or faster ones for some device. `PartsFactory` makes objects of these classes
from weights, by their Hugging Face names. Neither keeps a tensor.
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
from engine.models.chosen_experts import ChosenExperts
from engine.models.expert_choice import ChooseExperts, choose_experts
from engine.models.expert_products import (
    ExpertProducts,
    ExpertWeights,
    PlainExperts,
    ScaledExperts,
)
from engine.models.experts_config import ExpertsConfig
from engine.models.four_bit_experts import BiasedExpert, ClampedGate, FourBitStack
from engine.models.layer import DecoderLayer, LayerStack, PlainLayers
from engine.models.recurrent_ops import RecurrentOps
from engine.models.recurrent_reference import TORCH_OPS
from engine.scaled_weight import ScaledWeight
from engine.weight import Quantise, Weight, as_it_is, stacked


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes that a decoder is made of: plain torch, or faster ones for some device."""

    linear: MakeLinear = Linear
    gated_linear: Callable[..., GatedLinear] = GatedLinear
    """Has the signature of `GatedLinear`; only `with_products` and plain adapters pass a `linear`."""
    lm_head: MakeLinear = Linear
    rms_norm: type[RMSNorm] = RMSNorm
    stack: Callable[[list[DecoderLayer]], LayerStack] = PlainLayers
    """Makes a stack of the layers."""
    expert_scores: MakeLinear = FloatLinear
    """The product of experts' scores, in float32."""
    choose_experts: ChooseExperts = choose_experts
    head_products: Callable[[torch.Tensor], HeadProducts] = HeadProducts
    """Makes the products of heads in latent attention."""
    plain_experts: Callable[[torch.Tensor, torch.Tensor], ExpertProducts] = PlainExperts
    each_expert: Callable[..., ExpertProducts] | None = None
    """Takes an iterator of each expert's weights, as stored, and an activation (default: silu). None: weights are
    stacked, for one of the other classes."""
    scaled_experts: Callable[..., ExpertProducts] = ScaledExperts
    """Takes (gate and up, down) in 8 bits, and an activation (default: silu)."""
    int4_experts: Callable[..., ExpertProducts] = ScaledExperts
    """The same for weights in 4 bits (engine/int4_weight.py)."""
    four_bit_experts: Callable[[FourBitStack, FourBitStack, ClampedGate], ExpertProducts] | None = None
    """Takes (gate and up, down) in MXFP4. None: such weights are dequantised when they are loaded."""
    clamped_experts: Callable[[Iterator[BiasedExpert], ClampedGate], ExpertProducts] | None = None
    """Takes gpt-oss' experts in 16 bits, one by one. None: transformers' code computes them."""
    quantise_expert: Quantise = as_it_is
    """Puts an expert's weight into the engine's quantization; `linear` and `gated_linear` do so themselves."""
    chosen_experts: Callable[[ExpertProducts, int, torch.device | str], ChosenExperts] = ChosenExperts
    """Takes products, the number of experts, and the device."""
    recurrent_ops: RecurrentOps = TORCH_OPS
    sum_over_ranks: SumOverRanks | None = None
    """None: one rank computes the whole model."""
    adapters: Adapters | None = None
    """The LoRA adapters that requests may use, if any."""

    def with_products(self, linear: MakeLinear) -> Parts:
        """The same parts with `linear` for the layers' products, but not for the logits. Only for parts whose
        `gated_linear` takes a `linear`."""
        return replace(self, linear=linear, gated_linear=partial(self.gated_linear, linear=linear))


PLAIN_PARTS = Parts()

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
"""[outputs, inputs], and [outputs] or None."""


@dataclass(frozen=True, slots=True)
class PartsFactory:
    """Makes `parts` from the tensors of `weights`. Its methods raise `ValueError` if a tensor does not fit."""

    weights: Weights
    parts: Parts
    rms_norm_eps: float

    def linear(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One product that stacks the named ones. `outputs`: number of outputs by name."""
        linear = self.fused([self._as_stored(name, size, inputs, has_bias) for name, size in outputs.items()])
        return self._adapted(linear, outputs, inputs)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, has_bias: bool) -> Linear:
        """A product whose inputs are split over ranks, so that its outputs are summed over them."""
        linear = self.linear({name: outputs}, inputs, has_bias)
        sum_over_ranks = self.parts.sum_over_ranks
        return linear if sum_over_ranks is None else RowParallelLinear(linear, sum_over_ranks)

    def fused(self, products: Sequence[tuple[Weight, torch.Tensor | None]]) -> Linear:
        """Fuse products of the same inputs into one. Either all or none must have a bias."""
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
        """Experts one by one if the parts keep them so; else stacked, in 8 or 4 bits if all weights have that form.
        Each weight is quantised when it is taken, so that only one is there in both forms."""
        weights = ExpertWeights(self.weights, name, config, hidden_size, self.parts.quantise_expert)
        if self.parts.each_expert is not None:
            return self.parts.each_expert(weights.take_each())
        match weights.take_stacked():
            case (ScaledWeight() as gate_up, ScaledWeight() as down):
                return self.parts.scaled_experts(gate_up, down)
            case (Int4Weight() as gate_up, Int4Weight() as down):
                return self.parts.int4_experts(gate_up, down)
        return self.parts.plain_experts(*weights.take_plain())

    def rms_norm(self, name: str, size: int, eps: float | None = None) -> RMSNorm:
        """`eps`: default: the model's."""
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
