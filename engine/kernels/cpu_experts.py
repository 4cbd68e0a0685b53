"""A mixture's experts by the CPU kernels (source/experts.h): plain ones, in 8 or 4 bits, and gpt-oss' in MXFP4.

Shapes: E experts, R rows, D hidden, I intermediate; of a product, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from engine.kernels.cpu_products import PANEL, PanelGatedLinear, PanelLinear, PanelLogits, side_by_side
from engine.layers import Activation
from engine.models.chosen_experts import ChosenExperts
from engine.models.expert_choice import Choice
from engine.models.expert_products import ExpertProducts, ExpertWeight
from engine.models.experts_config import ExpertsConfig
from engine.models.four_bit_experts import BiasedExpert, ClampedGate, FourBitStack
from engine.weight import dequantized

MOST_EXPONENT = 252
"""As in source/mxfp4.h."""


class _InOneCall(ExpertProducts):
    """All experts of a layer. Each reads its weights once for all its rows."""

    reads_back = True
    experts: Any
    """torch.classes.tandem_cpu.Experts"""

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        y_RD: torch.Tensor = self.experts.forward(x_RD, ends_E)
        return y_RD


class PanelChosenExperts(ChosenExperts):
    """Sorts rows, multiplies and sums up in one call."""

    def __init__(self, products: ExpertProducts, num_experts: int, device: torch.device | str) -> None:
        super().__init__(products, num_experts, device)
        assert isinstance(products, _InOneCall)
        self.products = products

    def __call__(self, h_TD: torch.Tensor, choice: Choice) -> torch.Tensor:
        experts_TA, weights_TA = choice
        o_TD: torch.Tensor = self.products.experts.of_chosen(h_TD, experts_TA.contiguous(), weights_TA.contiguous())
        return o_TD


class PanelExperts(_InOneCall):
    """Experts with a gate by SiLU or GELU, plain or in 8 or 4 bits."""

    def __init__(self, weights: Iterable[ExpertWeight], activation: Activation = "silu") -> None:
        self.experts = None
        for gate, up, down in map(_of_even_size, weights):
            if self.experts is None:
                self.experts = torch.classes.tandem_cpu.Experts(len(gate), len(down), activation, 0.0, 0.0)
            gated, outer = PanelGatedLinear(gate, up, None, None), PanelLinear(down)
            self.experts.add(gated.panels, gated.scale, None, outer.panels, outer.scale, None)


def _of_even_size(weight: ExpertWeight) -> ExpertWeight:
    """Pad an odd intermediate size with zeros, since products read inputs in pairs. The result is the same."""
    gate, up, down = weight
    if len(gate) % 2 == 0:
        return weight
    gate, up = (F.pad(dequantized(each), (0, 0, 0, 1)) for each in (gate, up))
    return gate, up, F.pad(dequantized(down), (0, 1))


class PanelClampedExperts(_InOneCall):
    """gpt-oss' experts, with biases and a gate of their own."""

    def __init__(self, experts: Iterable[BiasedExpert], gate: ClampedGate) -> None:
        self.experts = None
        for (gate_weight, up, down), (gate_bias, up_bias, down_bias) in experts:
            if self.experts is None:
                self.experts = _clamped(gate, len(up), len(down))
            gated, outer = PanelGatedLinear(gate_weight, up, gate_bias, up_bias), PanelLinear(down, down_bias)
            self.experts.add(gated.panels, gated.scale, gated.bias, outer.panels, outer.scale, outer.bias)


class PanelFourBitExperts(PanelClampedExperts):
    """The same in MXFP4: a product reads 4.25 bits of a weight, and multiplies it as the bfloat16 that it is."""

    def __init__(self, gate_up: FourBitStack, down: FourBitStack, gate: ClampedGate) -> None:
        """`gate_up` [E, 2I, D], gate and up alternately; `down` [E, D, I]. Copies both. Raises `ValueError` if a number
        is too large for a bfloat16."""
        self.experts = _clamped(gate, gate_up.bias.shape[1] // 2, down.bias.shape[1])
        for of_gate_up, of_down in zip(_each(gate_up), _each(down), strict=True):
            gated, gated_bias = _in_panels(*(side_by_side([each[::2], each[1::2]]) for each in of_gate_up))
            outer, outer_bias = _in_panels(*of_down)
            self.experts.add(gated, None, gated_bias, outer, None, outer_bias)


def mixture_of(products: _InOneCall, scores: PanelLogits, bias_E: torch.Tensor | None, config: ExpertsConfig) -> Any:
    """A torch.classes.tandem_cpu.Mixture, which also chooses each token's experts. `bias_E`: see `choose_experts`."""
    return torch.classes.tandem_cpu.Mixture(
        scores.panels,
        config.num_experts,
        config.num_experts_per_token,
        config.num_groups,
        config.num_chosen_groups,
        config.norms_weights,
        config.scaling,
        bias_E,
        products.experts,
    )


def _clamped(gate: ClampedGate, intermediate_size: int, hidden_size: int) -> Any:
    return torch.classes.tandem_cpu.Experts(intermediate_size, hidden_size, "clamped", gate.alpha, gate.limit)


_OfExpert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Pairs [N, K / 2], exponents [N, K / 32] and bias [N]."""


def _each(stack: FourBitStack) -> Iterable[_OfExpert]:
    if stack.scales.numel() and int(stack.scales.max()) > MOST_EXPONENT:
        raise ValueError(f"MXFP4 weights have a scale above {MOST_EXPONENT}, which is too large for bfloat16")
    return zip(stack.pairs, stack.scales, stack.bias, strict=True)


def _in_panels(pairs: torch.Tensor, exponents: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    panels = torch.ops.tandem_cpu.pack_mxfp4(pairs.contiguous(), exponents.contiguous())
    return panels, F.pad(bias, (0, -len(bias) % PANEL))
