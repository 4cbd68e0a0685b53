"""Layers of gated delta rules and of Mamba-2, what they compute from, and a layer alone over the states of some
sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.models.recurrent_ops import Convolution, RecurrentOps
from engine.models.recurrent_shape import DeltaLayer, Mamba2Layer, RecurrentLayer, recurrent_bytes
from engine.models.recurrent_states import RecurrentStates

NUM_SLOTS = 5


def layer_of(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, num_taps: int) -> DeltaLayer:
    return DeltaLayer(
        name="layer", num_key_heads=num_key_heads, num_value_heads=num_value_heads, key_dim=key_dim,
        value_dim=value_dim, num_taps=num_taps,
    )  # fmt: skip


def mamba2_of(num_heads: int, head_dim: int, state_dim: int, num_groups: int, num_taps: int) -> Mamba2Layer:
    return Mamba2Layer(
        name="layer", num_heads=num_heads, head_dim=head_dim, state_dim=state_dim, num_groups=num_groups,
        num_taps=num_taps,
    )  # fmt: skip


MAMBA_2S = [mamba2_of(1, 16, 16, 1, 2), mamba2_of(6, 32, 48, 2, 4), mamba2_of(4, 80, 128, 4, 4)]
LAYERS = [layer_of(1, 1, 16, 32, 2), layer_of(2, 4, 16, 32, 4), layer_of(2, 6, 48, 96, 3), layer_of(3, 3, 128, 128, 4)]


@dataclass
class Tokens:
    """What a layer computes from, for each token of a text."""

    x: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def between(self, begin: int, end: int) -> Tokens:
        return Tokens(self.x[begin:end], self.decay[begin:end], self.beta[begin:end])


def text_of(layer: DeltaLayer | Mamba2Layer, length: int, seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, layer.num_channels, generator=generator).bfloat16()
    decay, beta = torch.rand(2, length, layer.matrices_shape[0], generator=generator)
    return Tokens(x, 0.7 + 0.3 * decay, beta)


def weight_of(layer: RecurrentLayer) -> torch.Tensor:
    return torch.randn(layer.num_channels, layer.num_taps, generator=torch.Generator().manual_seed(8)).bfloat16()


class Bench:
    """A layer over the states of some sequences."""

    def __init__(
        self,
        layer: DeltaLayer | Mamba2Layer,
        ops: RecurrentOps,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        row_bytes = recurrent_bytes((layer,), dtype.itemsize) + 64
        self.states = RecurrentStates((layer,), NUM_SLOTS, row_bytes, dtype, device)
        for part in (*self.states.inputs, *self.states.matrices):
            part.fill_(float("nan"))  # so that a read of another's state shows
        self.weight, self.ops, self.layer = weight_of(layer).to(device, dtype), ops, layer
        self.dtype, self.device = dtype, device
        self.num_done = dict.fromkeys(range(-1, NUM_SLOTS), 0)

    def convolve(self, *chunks: tuple[int, torch.Tensor]) -> torch.Tensor:
        """The convolution alone, without SiLU, of the next inputs of some slots."""
        lengths, slots = [len(x) for _, x in chunks], [slot for slot, _ in chunks]
        contexts = [self.num_done[slot] + length for slot, length in zip(slots, lengths, strict=True)]
        self.num_done |= dict(zip(slots, contexts, strict=True))
        self.states.assign(*(np.array(each, dtype=np.int64) for each in (lengths, contexts, slots)))
        x = torch.cat([x for _, x in chunks]).to(self.device, self.dtype)
        return self.ops.convolve(x, Convolution(self.weight), self.states.inputs[0], self.states.step)

    def step(self, *chunks: tuple[int, Tokens]) -> list[torch.Tensor]:
        """Compute the next tokens of some slots; return what each gets."""
        lengths = [len(tokens.x) for _, tokens in chunks]
        slots = [slot for slot, _ in chunks]
        contexts = [self.num_done[slot] + length for slot, length in zip(slots, lengths, strict=True)]
        self.states.assign(*(np.array(each, dtype=np.int64) for each in (lengths, contexts, slots)))
        x, decay, beta = (torch.cat([getattr(tokens, name) for _, tokens in chunks]) for name in ("x", "decay", "beta"))
        x, decay, beta = x.to(self.device, self.dtype), decay.to(self.device), beta.to(self.device)
        step = self.states.step
        qkv = self.ops.convolve(x, Convolution(self.weight, has_silu=True), self.states.inputs[0], step)
        if isinstance(self.layer, DeltaLayer):
            y = self.ops.delta_rule(qkv, decay, beta, self.states.matrices[0], step)
        else:  # beta serves as the steps
            skip = torch.arange(self.layer.num_heads, dtype=torch.float32, device=self.device) / 3
            y = self.ops.scan(qkv, decay, beta, skip, self.states.matrices[0], step)
        self.num_done |= dict(zip(slots, contexts, strict=True))
        return list(y.split(lengths))
