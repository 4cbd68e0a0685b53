"""The feed-forwards of a mixture's experts, for rows that are sorted by expert.

    plain    weights in the model's dtype: one grouped product for all experts (`torch.nn.functional.grouped_mm`)
    scaled   weights in 8 or 4 bits, as in the checkpoint. Here one expert after the other, which reads back the number
             of rows of each: the reference for engine/kernels/gpu/, which computes all in one launch (experts.py,
             int4_experts.py)

Neither knows how experts are chosen, or how a token's rows are summed (chosen_experts.py).

Shapes: T tokens, A experts of each, R = T * A rows, D hidden, E experts, I intermediate, padded to `EXPERT_GRAIN` if
plain; of a product, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812

from engine.int4_weight import Int4Weight
from engine.layers import ACTIVATIONS, Activation
from engine.model_loader.weights import Weights
from engine.models.experts_config import EXPERT_GRAIN, ExpertsConfig, reads_groups_back
from engine.scaled_weight import ScaledWeight
from engine.weight import Quantise, Weight, as_it_is, stacked


class ExpertProducts(ABC):
    """Computes `down(activation(gate(x)) * up(x))` of each row with its expert's weights."""

    reads_back: bool
    """The host needs the number of rows of each expert, and waits for a GPU to compute it."""

    @abstractmethod
    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """[R, D]. `ends_E`: int32, where an expert's rows end and the next one's begin."""


class PlainExperts(ExpertProducts):
    """Only weights are padded. Where torch has one kernel for all experts, the host need not know their lengths."""

    def __init__(self, gate_up_EXD: torch.Tensor, down_EDI: torch.Tensor) -> None:
        """X: 2 I."""
        self._gate_up_EDX, self._down_EID = gate_up_EXD.transpose(1, 2), down_EDI.transpose(1, 2)
        device, dtype = gate_up_EXD.device, str(gate_up_EXD.dtype).removeprefix("torch.")
        self.reads_back = device.type == "cuda" and reads_groups_back(dtype, torch.cuda.get_device_capability(device))

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(x_RD, self._gate_up_EDX, offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self._down_EID, offs=ends_E)


ExpertStack = ScaledWeight | Int4Weight
"""One weight of every expert, all of the same form, stacked into one weight of E * N outputs."""


def stack_of(weights: Iterable[Weight], num_experts: int) -> ExpertStack | None:
    """Stack the experts' weights. Returns None if one is plain, or in another form than the first. Takes one weight at
    a time from the iterable."""
    stack: ExpertStack | None = None
    for e, weight in enumerate(weights):
        if isinstance(weight, torch.Tensor):
            return None
        if stack is None:
            stack = weight.with_room(num_experts * len(weight))
        if weight.form != stack.form:
            return None
        for to, tensor in zip(of_expert(stack, e, num_experts).tensors, weight.tensors, strict=True):
            to.copy_(tensor)
    return stack


def of_expert(stack: ExpertStack, e: int, num_experts: int) -> ExpertStack:
    """A view of expert `e`'s weight."""
    size = len(stack) // num_experts
    return stack.rows(range(e * size, (e + 1) * size))


class ScaledExperts(ExpertProducts):
    """Only weights are quantised: activations keep their dtype."""

    reads_back = True

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, activation: Activation = "silu") -> None:
        self.gate_up, self.down, self._activation = gate_up, down, activation

    def __call__(self, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        bounds = [0, *ends_E.tolist()]
        gate, up = _multiplied(x_RD, self.gate_up, bounds).chunk(2, dim=-1)
        return _multiplied(ACTIVATIONS[self._activation](gate) * up, self.down, bounds)


def _multiplied(x_RK: torch.Tensor, stack: ExpertStack, bounds: list[int]) -> torch.Tensor:
    """Multiply with each expert's weight, which is dequantised for its rows and then freed."""
    parts = [
        F.linear(x_RK[start:end], of_expert(stack, e, len(bounds) - 1).dequantized())
        for e, (start, end) in enumerate(pairwise(bounds))
        if start < end
    ]
    return torch.cat(parts)


ExpertWeight = tuple[Weight, Weight, Weight]
"""Gate, up and down of one expert: [I, D] twice, and [D, I]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts, named `name`.<expert>.<product>.weight."""

    weights: Weights
    name: str
    config: ExpertsConfig
    hidden_size: int
    quantise: Quantise = as_it_is

    def take_stacked(self) -> tuple[ExpertStack, ExpertStack] | None:
        """(gate and up, down); None unless all experts' weights are quantised, in the same form."""
        num_experts, (gate, up, down) = self.config.num_experts, self.config.products
        both = (stacked([self._take(e, gate), self._take(e, up)]) for e in range(num_experts))
        gate_up_stack = stack_of(both, num_experts)
        if gate_up_stack is None:
            return None
        down_stack = stack_of((self._take(e, down) for e in range(num_experts)), num_experts)
        return None if down_stack is None else (gate_up_stack, down_stack)

    def take_each(self) -> Iterator[ExpertWeight]:
        """Yield one expert after the other."""
        for e in range(self.config.num_experts):
            gate, up, down = (self._take(e, product) for product in self.config.products)
            yield gate, up, down

    def take_plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([E, 2 I, D], [E, D, I]), with I padded by zeros, which does not change the result."""
        weights, D, E, I = self.weights, self.hidden_size, self.config.num_experts, self.config.intermediate_size  # noqa: E741
        gate, up, down = self.config.products
        padded = -(-I // EXPERT_GRAIN) * EXPERT_GRAIN
        gate_up_EXD = torch.zeros(E, 2 * padded, D, dtype=weights.dtype, device=weights.device)
        down_EDI = torch.zeros(E, D, padded, dtype=weights.dtype, device=weights.device)
        for e in range(E):
            gate_up_EXD[e, :I] = weights.take(self._name(e, gate), (I, D))
            gate_up_EXD[e, padded : padded + I] = weights.take(self._name(e, up), (I, D))
            down_EDI[e, :, :I] = weights.take(self._name(e, down), (D, I))
        return gate_up_EXD, down_EDI

    def _take(self, e: int, product: str) -> Weight:
        D, I = self.hidden_size, self.config.intermediate_size  # noqa: E741
        is_down = product == self.config.products[2]
        return self.quantise(self.weights.take_product(self._name(e, product), (D, I) if is_down else (I, D)))

    def _name(self, e: int, product: str) -> str:
        return f"{self.name}.{e}.{product}.weight"
