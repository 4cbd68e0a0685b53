"""The sizes of layers that keep a state of fixed size in place of keys and values. Integers only, no torch.

For each sequence, a layer of short convolutions (LFM2) keeps the last inputs of its convolution. Layers of gated delta
rules (S. Yang et al., "Gated Delta Networks", 2024) and of Mamba-2 (T. Dao and A. Gu, "Transformers are SSMs", 2024)
also keep a matrix for each head. The engine keeps these in a row of `RecurrentStates`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

ALIGNMENT = 64
"""Each part of a row begins at a multiple of so many bytes."""
FLOAT_BYTES = 4
FEWEST_IN_SPANS = 16
"""Of a sequence, GPUs compute so many tokens of a step in spans (engine/kernels/gpu/spans.py), fewer one after the
other."""


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer(ABC):
    """One layer, in transformers' code."""

    name: str
    """Path of its module, within the causal language model."""
    num_taps: int
    """How many tokens the convolution sees: a token itself and those before it."""

    @property
    @abstractmethod
    def num_channels(self) -> int:
        """Inputs of the convolution for each token."""

    @property
    def matrices_shape(self) -> tuple[int, int, int]:
        """A sequence's matrices, in float32: [heads, key dim, value dim]. Without heads: none."""
        return 0, 0, 0

    @property
    def matrices_bytes(self) -> int:
        return _aligned(math.prod(self.matrices_shape) * FLOAT_BYTES)

    def inputs_bytes(self, dtype_bytes: int) -> int:
        """Bytes of a sequence's last inputs of the convolution, [num_taps - 1, num_channels] in the model's dtype."""
        return _aligned((self.num_taps - 1) * self.num_channels * dtype_bytes)


@dataclass(frozen=True, kw_only=True)
class ConvolutionLayer(RecurrentLayer):
    hidden_size: int

    @property
    def num_channels(self) -> int:
        return self.hidden_size


@dataclass(frozen=True, kw_only=True)
class DeltaLayer(RecurrentLayer):
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def matrices_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, kw_only=True)
class Mamba2Layer(RecurrentLayer):
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Groups of heads that share keys and queries."""

    @property
    def num_channels(self) -> int:
        """Values, keys and queries."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim

    @property
    def matrices_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_dim, self.head_dim


def recurrent_bytes(layers: tuple[RecurrentLayer, ...], dtype_bytes: int) -> int:
    """Bytes of a sequence's states in all layers. `dtype_bytes`: of a number in the model's dtype."""
    return sum(layer.matrices_bytes + layer.inputs_bytes(dtype_bytes) for layer in layers)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
