"""Weights in 8 and in 4 bits: what they are, where they can be, and the layers that multiply with them.

Quantised when loaded, with one scale per output channel (in 4 bits: per group of inputs), or taken as the checkpoint
has them (`ScaledWeight`, `Int4Weight`).
Products of layers alone: embeddings, norms and the logits' product keep the model's dtype, as in vLLM.
`Parts.with_products` puts them into a decoder.

    int8     weights alone, on any device: activations keep their dtype
    fp8      weights, and activations, per token, as they come: float8_e4m3fn (engine/float8.py) on tensor cores. Our
             GPU kernels multiply few rows by weights alone in 8 bits
    int4     weights alone, with a scale and an offset for each group of inputs (engine/int4_weight.py), on any device
    stored   each weight as it is in the checkpoint: one of these, or 8 bits with a scale for each group of inputs
             (weights alone), or plain where the checkpoint has left it so; a mixture's experts, in whatever 8 or 4
             bits, weights alone (engine/models/expert_products.py)

What is stored depends on the weights and nothing else, so that two engines with equal weights compute with equal ones.

Shapes: T tokens, N outputs, K inputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from engine.cache_dir import report
from engine.float8 import MAX_FLOAT8, saturated_float8, why_no_float8
from engine.int4_weight import INT4_GROUP_SIZE, Int4Weight
from engine.layers import Linear, MakeLinear
from engine.models.model_shape import ModelShape
from engine.models.stored_weights import AS_STORED, StoredWeights
from engine.scaled_weight import ScaledWeight
from engine.weight import Weight, as_int4, dequantized

MAX_INT8 = 127
FLOAT8_GRAIN = 16
"""Divides both sides of a weight that tensor cores multiply in 8 bits: `torch._scaled_mm` asks for it."""
GROUP_GRAIN = 16
"""Divides what a kernel for groups of inputs takes at once: as few as tensor cores multiply."""
MAX_PACKED_ROWS = 16
"""Of `torch._weight_int8pack_mm` on a CPU: with more, widening the whole weight first takes less. On a GPU it computes
an output per thread or warp, and is not used."""
PACKED_GRAIN, PACKED_ALIGNMENT = 16, 32
"""It takes inputs in bfloat16 by 16, which are 32 bytes, and checks neither: of another number it reads beyond a row's
end, and a row that begins elsewhere ends the process (torch 2.13, AVX-512)."""
SMALLEST_AMAX = 1e-12
"""A row of zeros must not divide by zero."""


def resolve_quantization(
    asked: str,
    stored: StoredWeights,
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    model: ModelShape,
    has_kernels: bool,
) -> str:
    """What layers multiply with: "none", "int8", "fp8", "int4" or "stored". "auto" is the last, where a checkpoint
    has weights in fewer bits and its numbers can stay what they are; where they cannot, all are widened, and that is
    said.

    `capability`: of the GPU, None where the device has none. `has_kernels`: whether our kernels for the device serve.
    Raises `ValueError` where what is asked for by name cannot work.
    """
    if asked != "auto":
        _check_asked(asked, capability, dtype, model)
        return asked
    if not stored.quantizations:
        return "none"
    why = _why_widened(stored, device=device, capability=capability, dtype=dtype, model=model, has_kernels=has_kernels)
    if why:
        report(f"weights in {stored.name} are widened to {dtype}: {why}")
    return "none" if why else AS_STORED


def _check_asked(asked: str, capability: tuple[int, int] | None, dtype: str, model: ModelShape) -> None:
    """Raises `ValueError` where products cannot be in what is asked for by name."""
    why_not = why_no_quantization(asked, capability=capability, dtype=dtype, model=model)
    if asked == "int4" and not why_not:
        why_not = _why_no_groups(model)
    advice = "none" if model.model_impl == "transformers" else "int8 or none"
    if (model.mla is not None or model.moe is not None) and asked != "none":
        advice = "auto or none"
        why_not = (
            "models with latent attention or experts have weights in fewer bits only as their checkpoint has them, "
            "which is what auto takes"
        )
    if why_not:
        raise ValueError(f"quantization {asked} cannot work here: {why_not}; give {advice}")


def _why_widened(
    stored: StoredWeights,
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    model: ModelShape,
    has_kernels: bool,
) -> str:
    """What keeps a checkpoint's weights from staying what they are, as a clause; empty if nothing does."""
    if device == "cpu" and not (has_kernels and _fits_cpu_kernels(stored, model)):
        is_for_dtype = dtype != "bfloat16" and _fits_cpu_kernels(stored, model)
        return "the CPU kernels, which keep them, take dtype bfloat16" if is_for_dtype else "a CPU computes faster so"
    for own in stored.quantizations:
        if why_not := why_no_quantization(own, capability=capability, dtype=dtype, model=model):
            return why_not
    needs_kernels = stored.block is not None or {"int8", "int4"} & {*stored.quantizations} or model.has_experts
    if needs_kernels and not has_kernels:
        return "without Triton's kernels each step would widen them anew"
    if stored.block is not None and stored.block[1] % GROUP_GRAIN:
        return f"inputs that share a scale must be a multiple of {GROUP_GRAIN}, are {stored.block[1]}"
    return ""


def _fits_cpu_kernels(stored: StoredWeights, model: ModelShape) -> bool:
    """They multiply with integers that have a scale an output, or in 4 bits one a group of inputs."""
    if stored.quantizations == ("int4",):
        return True
    return stored.quantizations == ("int8",) and stored.block is None and model.mla is None


def _why_no_groups(model: ModelShape) -> str:
    """What keeps weights from being quantised in groups, as a clause; empty if nothing does."""
    hidden_size, intermediate_size = model.product_inputs
    inputs = hidden_size, model.num_heads * model.head_dim, intermediate_size
    if any(size % INT4_GROUP_SIZE for size in inputs):
        return f"inputs of products must be multiples of {INT4_GROUP_SIZE}, are {inputs}"
    return ""


def why_no_quantization(quantization: str, *, capability: tuple[int, int] | None, dtype: str, model: ModelShape) -> str:
    """What keeps products from being in these bits, as a clause; empty if nothing does."""
    if quantization == "none":
        return ""
    if model.model_impl == "transformers":
        return "the model is computed by transformers' code"
    if quantization != "fp8":
        return ""
    if why_not := why_no_float8(capability):
        return why_not
    if dtype != "bfloat16":
        return f"it computes bfloat16, and dtype is {dtype}"
    sizes = _sizes_of_products(model)
    if any(size % FLOAT8_GRAIN for size in sizes):
        return f"inputs and outputs of products must be multiples of {FLOAT8_GRAIN}, are {sizes}"
    return ""


def _sizes_of_products(model: ModelShape) -> tuple[int, ...]:
    """Inputs and outputs of the products that `MakeLinear` makes: not those of latents, which are plain, nor those of
    routed experts, whose kernel takes any."""
    hidden_size, intermediate_size = model.product_inputs
    if model.mla is None:
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return hidden_size, q_size, q_size + 2 * kv_size, intermediate_size
    sizes = hidden_size, model.num_heads * model.mla.v_head_dim, intermediate_size
    return sizes if model.moe is None else (*sizes, model.moe.num_shared_experts * model.moe.intermediate_size)


def quantize_int8(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], scales [N]): symmetric, the largest of each output becomes 127.

    The scale is rounded before the weight is divided by it, not after; to float32 where the weight is in float16, which
    begins to lose bits at 6e-5. Raises `ValueError` where a weight is not finite.
    """
    dtype = torch.float32 if weight_NK.dtype == torch.float16 else weight_NK.dtype
    amax_N = weight_NK.abs().amax(dim=1).float()
    _check_finite(amax_N)
    scale_N = _divided(amax_N, MAX_INT8).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    int8_NK = (weight_NK.float() / scale_N.float()[:, None]).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
    return int8_NK, scale_N


def quantize_float8(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, K], scales [N, 1] in float32): the largest of each row becomes 448."""
    amax_N1 = x_NK.abs().amax(dim=1, keepdim=True).float().clamp_min_(SMALLEST_AMAX)
    scale_N1 = _divided(amax_N1, MAX_FLOAT8)
    return saturated_float8(x_NK.float() / scale_N1), scale_N1


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """`x / by`, to the nearest on every device: by a number of the host, a GPU multiplies with the reciprocal, which is
    a bit off now and then."""
    return x / torch.full_like(x, by)


def _narrowed(scale_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, which the faster products take, where no bit is lost by it; not in float16, as in `quantize_int8`."""
    narrow_N = scale_N.to(dtype)
    return narrow_N if dtype != torch.float16 and torch.equal(narrow_N.float(), scale_N) else scale_N


def _check_finite(amax: torch.Tensor) -> None:
    if not bool(amax.isfinite().all()):
        raise ValueError("weights that are not finite (NaN, infinity) cannot be quantised; give quantization none")


class Int8Linear(Linear):
    """`x @ (weight * scale).T + bias`, the weight in int8, everything else in x's dtype."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        if isinstance(weight, ScaledWeight):
            assert not weight.has_groups
            self.weight_NK, self.scale_N = weight.weight, _narrowed(weight.scale[:, 0], weight.dtype)
        else:
            self.weight_NK, self.scale_N = quantize_int8(dequantized(weight))
        self.bias = bias
        self._dtype = weight.dtype
        self._can_pack = self.weight_NK.device.type == "cpu" and self.weight_NK.shape[1] % PACKED_GRAIN == 0
        self._can_pack &= self.scale_N.dtype == weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        if not self._can_pack or len(x_TK) > MAX_PACKED_ROWS:
            return F.linear(x, self.dequantized(), self.bias)
        x_TK = x_TK.contiguous()
        if x_TK.data_ptr() % PACKED_ALIGNMENT:
            x_TK = x_TK.clone()
        y_TN = torch._weight_int8pack_mm(x_TK, self.weight_NK, self.scale_N)
        return (y_TN if self.bias is None else y_TN + self.bias).view(*x.shape[:-1], -1)

    def dequantized(self) -> torch.Tensor:
        """[N, K], in the dtype that the weight had."""
        return (self.weight_NK * self.scale_N[:, None]).to(self._dtype)


class Float8Linear(Linear):
    """`(x8 @ weight8.T) * scale of row * scale of output + bias`: both operands in 8 bits, added up in float32."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        if isinstance(weight, ScaledWeight):
            assert not weight.has_groups
            self.weight_NK, self.scale_1N = weight.weight, weight.scale.T.contiguous()
        else:
            plain = dequantized(weight)
            _check_finite(plain.abs().amax(dim=1))
            self.weight_NK, scale_N1 = quantize_float8(plain)
            self.scale_1N = scale_N1.T.contiguous()
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x8_TK, scale_T1 = self._quantize_rows(x.reshape(-1, x.shape[-1]))
        # The second operand column by column: the weight as it is stored, seen the other way.
        y_TN = torch._scaled_mm(
            x8_TK, self.weight_NK.T, scale_a=scale_T1, scale_b=self.scale_1N, bias=self.bias, out_dtype=x.dtype
        )
        return y_TN.view(*x.shape[:-1], -1)

    def _quantize_rows(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_float8(x_TK)


class GroupScaledLinear(Linear):
    """`x @ (weight * scale).T + bias`, a scale for each output and group of inputs; all but the weight in x's dtype."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        assert isinstance(weight, ScaledWeight)
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantized(), self.bias)


class Int4Linear(Linear):
    """`x @ (integers * scale + offset).T + bias`; all but the weight in x's dtype."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        self.weight = as_int4(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.dequantized(), self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedLinears:
    """What multiplies with weights in fewer bits, and those left plain beside them, on some device."""

    plain: MakeLinear = Linear
    int8: type[Int8Linear] = Int8Linear
    fp8: type[Float8Linear] = Float8Linear
    groups: type[GroupScaledLinear] = GroupScaledLinear
    int4: type[Int4Linear] = Int4Linear

    def of(self, quantization: str) -> MakeLinear:
        """For all products of layers. `quantization`: resolved, and not "none"."""
        makers: dict[str, MakeLinear] = {
            "int8": self.int8, "fp8": self.fp8, "int4": self.int4, AS_STORED: self.as_stored,
        }  # fmt: skip
        return makers[quantization]

    def as_stored(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, torch.Tensor):
            return self.plain(weight, bias)
        if isinstance(weight, Int4Weight):
            return self.int4(weight, bias)
        if weight.has_groups:
            return self.groups(weight, bias)
        return self.int8(weight, bias) if weight.weight.dtype == torch.int8 else self.fp8(weight, bias)


QUANTIZED_LINEARS = QuantizedLinears()
