"""The layers of decoders: linear, RMS norm, rotary positions. Each computes what transformers' layer computes.

They are plain callable objects that hold tensors: no autograd, no module tree. Made once at load, read-only afterwards.

Shapes: T tokens, N heads, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

from engine.models.rope_config import RopeConfig
from engine.weight import Weight, stacked


class Linear:
    """`x @ weight.T + bias`.

    On a CPU, bfloat16 weights are stored in oneDNN's blocked order only. Plain `linear` would reorder them in every
    call, which with few rows costs more than the product.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, torch.Tensor), "weights in 8 bits are for products in 8 bits"
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_onednn_bf16()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        if self._is_packed:
            y: torch.Tensor = _packed_linear(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


class FloatLinear(Linear):
    """A product in float32, whatever the input's dtype. Without a bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self._weight)


MakeLinear = Callable[..., Linear]
"""Makes a product from a weight and an optional bias. Has the signature of `Linear`."""
SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all ranks, on all of them. The argument may be overwritten."""
CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines of the positions of a step's T tokens: [T, 1, R] each, in the heads' dtype or float32. The
first R numbers of a head, which are an even number, are rotated."""
_packed_linear = torch.ops.mkldnn._linear_pointwise


def _has_onednn_bf16() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class RowParallelLinear(Linear):
    """A product whose inputs are split over ranks: the ranks' partial products are summed."""

    def __init__(self, linear: Linear, sum_over_ranks: SumOverRanks) -> None:
        self._linear = linear
        self._sum_over_ranks = sum_over_ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum_over_ranks(self._linear(x))


class HeadProducts:
    """A product for each head: `x[:, n] @ weight[n]`."""

    def __init__(self, weight_NKO: torch.Tensor) -> None:
        """K inputs and O outputs of a head."""
        self._weight_NKO = weight_NKO
        self.shape = tuple(weight_NKO.shape)

    def __call__(self, x_TNK: torch.Tensor, out_TNO: torch.Tensor) -> None:
        """Write the products to `out_TNO`. Both tensors may be views of larger ones."""
        torch.bmm(x_TNK.transpose(0, 1), self._weight_NKO, out=out_TNO.transpose(0, 1))

    def of_shared(self, x_TK: torch.Tensor, out_NTO: torch.Tensor, heads: slice) -> None:
        """Multiply inputs that all `heads` share. The output is ordered head by head."""
        weight = self._weight_NKO[heads]
        torch.bmm(x_TK.expand(len(weight), -1, -1), weight, out=out_NTO)

    def back_of_shared(self, x_TO: torch.Tensor, out_NTK: torch.Tensor, heads: slice) -> None:
        """Like `of_shared`, with `weight[n].T`."""
        weight = self._weight_NKO[heads]
        torch.bmm(x_TO.expand(len(weight), -1, -1), weight.mT, out=out_NTK)


class RMSNorm:
    """B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019. In float32, rounded before multiplying with
    the weight; if the weight is in float32 and the input is not, rounded after that, once."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        y = h * h.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return self.weight * y.to(x.dtype) if self.weight.dtype == x.dtype else (self.weight * y).to(x.dtype)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, and the norm of that. `x` may be overwritten."""
        x = x if delta is None else x + delta
        return x, self(x)


Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
}  # fmt: skip
"""GELU: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016, in the approximation by tanh."""


class GatedLinear:
    """`activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)`, with both products fused."""

    def __init__(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = "silu",
        *,
        linear: MakeLinear = Linear,
    ) -> None:
        """Either both or none must have a bias. `linear`: makes the product."""
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        self._gate_up = linear(stacked((gate, up)), bias)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return ACTIVATIONS[self._activation](gate) * up


class RotaryEmbedding:
    """Rotary positions (J. Su et al., "RoFormer", 2021), in the half-split order of Hugging Face checkpoints.

    Stores cosines and sines of all positions up to `max_positions`: 4 * H bytes per position in bfloat16.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: str) -> None:
        frequencies = inverse_frequencies(config, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        # The table of sines includes the sign of rotate_half(x) = (-x2, x1).
        sin = angles.sin()
        sin[:, : head_dim // 2].neg_()
        self._cos = (angles.cos() * config.attention_factor).to(device=device, dtype=dtype)
        self._sin = (sin * config.attention_factor).to(device=device, dtype=dtype)

    def select(self, positions: torch.Tensor) -> CosSin:
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotated(x_TNH: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """The heads, with their first R numbers rotated."""
    cos, sin = cos_sin
    R = cos.shape[-1]
    turned, rest = x_TNH[..., :R], x_TNH[..., R:]
    turned = (turned * cos).add_(turned.roll(R // 2, -1) * sin).to(x_TNH.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class HeadProjection:
    """The norms and rotation of a layer's q and k between their product and attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __call__(self, qkv_TX: torch.Tensor, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, (N + 2K) * H] -> q [T, N, H], k and v [T, K, H]: q and k normed, if the model does that, and rotated."""
        N, K = self.num_heads, self.num_kv_heads
        qkv = qkv_TX.view(-1, N + 2 * K, self.head_dim)
        qk, v_TKH = qkv[:, : N + K], qkv[:, N + K :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :N]), self.k_norm(qk[:, N:])), dim=1)
        qk = rotated(qk, cos_sin)
        return qk[:, :N], qk[:, N:], v_TKH


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """The norm, rotation and absorbed products of a layer's queries and latents, around latent attention.

    Shapes: C latent dim, P rotated key dim, R = C + P; Q dim of a head's query without positions, V dim of its value.
    """

    norm: RMSNorm
    """The latents' norm."""
    up_key: HeadProducts
    """[N, Q, C] each head's product from latents to keys; absorbed attention applies it to queries instead."""
    up_value: HeadProducts
    """[N, C, V] each head's product from latents to values; absorbed attention applies it to outputs instead."""

    def __call__(
        self, q_TX: torch.Tensor, latent_TR: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, N * (Q + P)] and [T, R] -> queries [T, N, R], absorbed and rotated; and [T, R], the normed latent and the
        rotated key."""
        N, _, C = self.up_key.shape
        q_TNR = q_TX.new_empty(len(q_TX), N, latent_TR.shape[1])
        self.absorb(q_TX, q_TNR)
        q_TNR[:, :, C:] = self.rotated(q_TX, cos_sin)
        return q_TNR, self.latents(latent_TR, cos_sin)

    def rotated(self, q_TX: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[T, N, P]: the rotated part of the queries."""
        N, Q, _ = self.up_key.shape
        return rotated(q_TX.view(len(q_TX), N, -1)[:, :, Q:], cos_sin)

    def latents(self, latent_TR: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[T, R]: the normed latent and the rotated key."""
        C = self.up_key.shape[2]
        key_T1P = rotated(latent_TR[:, C:].unsqueeze(1), cos_sin)
        return torch.cat((self.norm(latent_TR[:, :C]), key_T1P.squeeze(1)), dim=-1)

    def absorb(self, q_TX: torch.Tensor, out_TNR: torch.Tensor) -> None:
        """Map the queries without positions to the latent space, into the first C numbers of `out_TNR`."""
        N, Q, C = self.up_key.shape
        self.up_key(q_TX.view(len(q_TX), N, -1)[:, :, :Q], out_TNR[:, :, :C])

    def unfold(
        self, latent_TC: torch.Tensor, k_NTQ: torch.Tensor, v_NTV: torch.Tensor, heads: slice = slice(None)
    ) -> None:
        """Compute some heads' keys without positions, and values, from the pool's latents. Both outputs may be views of
        larger tensors."""
        self.up_key.back_of_shared(latent_TC, k_NTQ, heads)
        self.up_value.of_shared(latent_TC, v_NTV, heads)

    def values(self, o_TNC: torch.Tensor) -> torch.Tensor:
        """[T, N, V]: values from weighted sums of latents."""
        o_TNV = o_TNC.new_empty(*o_TNC.shape[:2], self.up_value.shape[2])
        self.up_value(o_TNC, o_TNV)
        return o_TNV


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[H / 2] angle per position, float32, as in transformers' `modeling_rope_utils`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "default":
        return frequencies
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, frequencies)
    assert config.rope_type == "llama3", config.rope_type
    # Short waves are kept, long ones are stretched by `factor`, and those between are interpolated.
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_positions / wavelengths
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    mixed = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    stretched = torch.where(turns < config.low_freq_factor, frequencies / config.factor, mixed)
    return torch.where(turns > config.high_freq_factor, frequencies, stretched)


def _yarn_frequencies(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """B. Peng et al., "YaRN", 2023, section 3.2: short waves are kept, long ones stretched, with a ramp in between."""
    half = len(frequencies)

    def dimension_that_turns(times: float) -> float:
        return half * math.log(config.original_max_positions / (times * 2 * math.pi)) / math.log(config.theta)

    low, high = dimension_that_turns(config.beta_fast), dimension_that_turns(config.beta_slow)
    if config.is_ramp_whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / config.factor * stretched
