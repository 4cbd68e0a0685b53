"""The operations of layers that keep a state, between their products: what they take, and which layers they fit.

Each computes a sequence's tokens from the sequence's row of `RecurrentStates`, and leaves the new state there. On CPUs
it computes them one after the other. So its numbers depend neither on the chunks that a prompt comes in nor on other
sequences (README, P3).

Shapes: T tokens, C channels, J taps, N value heads, K and V dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.models.recurrent_shape import Mamba2Layer, RecurrentLayer
from engine.models.recurrent_states import RecurrentStep


class Convolution(NamedTuple):
    """A causal convolution of each channel."""

    weight: torch.Tensor
    """[C, J], contiguous"""
    bias: torch.Tensor | None = None
    """[C]"""
    has_silu: bool = False
    """SiLU comes after it."""


Convolve = Callable[[torch.Tensor, Convolution, torch.Tensor, RecurrentStep], torch.Tensor]
"""(x [T, C], convolution, inputs [rows, J - 1, C], step): [T, C]. Updates `inputs`, each sequence's last ones."""
Gates = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(a [T, N], b [T, N], rate [N], bias [N]): decay and beta of `DeltaRule`. rate and bias are float32."""
DeltaRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RecurrentStep], torch.Tensor]
"""(qkv [T, C], decay [T, N], beta [T, N], matrices [rows, N, K, V], step): [T, N, V] in the dtype of qkv. decay, the
factor of the matrices, beta and matrices are float32. Updates `matrices`."""


Steps = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, float]], tuple[torch.Tensor, torch.Tensor]]
"""(dt [T, N], rate [N], bias [N], limits): decay and dt of `Scan`; dt within the limits. rate and bias are float32."""
Scan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RecurrentStep], torch.Tensor]
"""(x [T, C], decay [T, N], dt [T, N], skip [N], matrices [rows, N, K, V], step): [T, N, V] in the dtype of x, which has
values, keys and queries. decay, the factor of the matrices, dt, skip and matrices are float32. Updates `matrices`."""


class Limits(NamedTuple):
    """Of heads that a kernel can compute."""

    key_grain: int = 1
    """Dims of keys must be a multiple of this."""
    value_grain: int = 1
    most_key_dim: int = 1 << 30


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class RecurrentOps:
    """What layers compute between their products."""

    convolve: Convolve
    delta_rule: DeltaRule
    gates: Gates
    scan: Scan
    steps: Steps
    delta_limits: Limits = NO_LIMITS
    scan_limits: Limits = NO_LIMITS
    channel_grain: int = 1
    """Channels of convolutions must be a multiple of this."""
    most_taps: int = 1 << 30

    def fit(self, layer: RecurrentLayer) -> bool:
        """Whether they can compute the layer."""
        _, key_dim, value_dim = layer.matrices_shape
        limits = self.scan_limits if isinstance(layer, Mamba2Layer) else self.delta_limits
        has_heads = key_dim % limits.key_grain == 0 and key_dim <= limits.most_key_dim
        has_channels = layer.num_channels % self.channel_grain == 0 and layer.num_taps <= self.most_taps
        return has_heads and value_dim % limits.value_grain == 0 and has_channels
