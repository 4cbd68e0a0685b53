"""Which quantization an engine uses, and why another one cannot work here. No torch.

`engine.quantization` has the formats and their layers.
"""

from __future__ import annotations

from engine.cache_dir import report
from engine.float8 import why_no_float8
from engine.grains import FLOAT8_GRAIN, GROUP_GRAIN, INT4_GROUP_SIZE, INT8_GRAIN
from engine.models.model_shape import ModelShape
from engine.models.stored_weights import AS_STORED, StoredWeights
from engine.models.transformers_config import TransformersConfig

Size = tuple[int, int]
"""(outputs, inputs)"""
FEWEST_OUTPUTS = 128
"""In models by transformers' code, weights of fewer outputs stay plain. Among them are the gates of experts and of
states, for which rounding matters most; they take little memory."""


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
    """Resolve the quantization of layers' products: "none", "int8", "fp8", "int4" or "stored". "auto" becomes "stored"
    if the checkpoint has quantised weights and they can be kept. If they cannot, all are dequantised, and that is
    reported.

    `capability`: the GPU's; None without a GPU. `has_kernels`: whether our kernels for the device can serve. Raises
    `ValueError` if a quantization given by name cannot work.
    """
    if asked != "auto":
        check_quantization(asked, capability, dtype, model)
        return asked
    if not stored.quantizations:
        return "none"
    why = _why_widened(stored, device=device, capability=capability, dtype=dtype, model=model, has_kernels=has_kernels)
    if why:
        report(f"weights in {stored.name} are widened to {dtype}: {why}")
    return "none" if why else AS_STORED


def check_quantization(asked: str, capability: tuple[int, int] | None, dtype: str, model: ModelShape) -> None:
    """Raise `ValueError` if a quantization given by name cannot work."""
    why_not = why_no_quantization(asked, capability=capability, dtype=dtype, model=model)
    if isinstance(model, TransformersConfig):
        why_no_experts = _why_no_experts(asked, model)
        advice = "int8 or none" if why_no_experts else "none"
        if asked != "none":
            why_not = why_not or why_no_experts or _why_no_product(asked, model)
    else:
        advice = "int8 or none"
        why_not = why_not or _why_no_grain(asked, model)
    if why_not:
        raise ValueError(f"quantization {asked} cannot work here: {why_not}; give {advice}")


def quantizes(quantization: str, whole: Size, own: Size) -> bool:
    """Whether a weight is quantised in a model that transformers' code computes; others stay plain. `whole`, `own`: the
    product's size, and that of this rank's part."""
    if quantization == "none" or whole[0] < FEWEST_OUTPUTS:
        return False
    outputs, inputs = own
    if quantization == "fp8":
        return outputs % FLOAT8_GRAIN == 0 and inputs % FLOAT8_GRAIN == 0
    return inputs % (INT4_GROUP_SIZE if quantization == "int4" else INT8_GRAIN) == 0


def _why_no_product(asked: str, model: TransformersConfig) -> str:
    """Why no weight of the model would be quantised, as a clause; empty if some would, or all that count."""
    if model.num_fixed_expert_tensors:
        return "only transformers' code can compute its experts, which would stay plain: most of its weights"
    if model.has_experts:
        return ""
    if not any(quantizes(asked, size, size) for size in model.products):
        sizes = ", ".join(f"{outputs}x{inputs}" for outputs, inputs in model.products)
        return f"none of the model's products, of sizes {sizes}, fits it"
    return ""


def _why_no_experts(asked: str, model: TransformersConfig) -> str:
    """Why experts cannot be quantised, as a clause; empty if they can. They are most of the weights."""
    sizes = tuple(sorted({size for both in model.expert_sizes for size in both}, reverse=True))
    return _why_not_multiples("inputs of experts' products", INT4_GROUP_SIZE, sizes) if asked == "int4" else ""


def _why_widened(
    stored: StoredWeights,
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    model: ModelShape,
    has_kernels: bool,
) -> str:
    """Why a checkpoint's quantised weights cannot be kept, as a clause; empty if they can."""
    if device == "cpu" and not (has_kernels and _fits_cpu_kernels(stored)):
        is_for_dtype = dtype != "bfloat16" and _fits_cpu_kernels(stored)
        return "the CPU kernels for them need dtype bfloat16" if is_for_dtype else "that is faster on a CPU"
    for own in stored.quantizations:
        if why_not := why_no_quantization(own, capability=capability, dtype=dtype, model=model):
            return why_not
    needs_kernels = stored.block is not None or {"int8", "int4"} & {*stored.quantizations} or model.has_experts
    if needs_kernels and not has_kernels:
        return "without Triton kernels they would be widened in each step"
    if stored.block is not None and stored.block[1] % GROUP_GRAIN:
        return f"inputs that share a scale must be a multiple of {GROUP_GRAIN}, are {stored.block[1]}"
    return ""


def _fits_cpu_kernels(stored: StoredWeights) -> bool:
    """Whether the CPU kernels support these weights: int8 with a scale per output, or int4 with a scale per group."""
    if stored.quantizations == ("int4",):
        return True
    return stored.quantizations == ("int8",) and stored.block is None


def _why_no_grain(asked: str, model: ModelShape) -> str:
    """Why sizes of weights that are quantised when they are loaded do not fit, as a clause; empty if they do. Beyond
    those of `why_no_quantization`: a checkpoint's weights of latents, and of experts, may stay plain."""
    mla, moe = model.mla, model.moe
    if asked == "int4":
        heads = model.num_heads * (model.head_dim if mla is None else mla.v_head_dim)
        latents = (mla.q_lora_rank,) if mla is not None and mla.q_lora_rank else ()
        experts = () if moe is None else (moe.intermediate_size,)
        inputs = model.hidden_size, heads, *latents, *_feed_forward_sizes(model), *experts
        return _why_not_multiples("inputs of products", INT4_GROUP_SIZE, inputs)
    if asked == "fp8" and mla is not None:
        query = model.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down = mla.q_lora_rank + mla.latent_dim
        hidden_size, heads, *others = _sizes_of_products(model)
        sizes = (hidden_size, heads, *((mla.q_lora_rank,) if mla.q_lora_rank else ()), down, query, *others)
        return _why_not_multiples("inputs and outputs of products", FLOAT8_GRAIN, sizes)
    return ""


def _why_not_multiples(what: str, grain: int, sizes: tuple[int, ...]) -> str:
    if all(size % grain == 0 for size in sizes):
        return ""
    return f"{what} must be multiples of {grain}, are {sizes} (with several ranks, of each one's part)"


def why_no_quantization(quantization: str, *, capability: tuple[int, int] | None, dtype: str, model: ModelShape) -> str:
    """Why products cannot use this quantization, as a clause; empty if they can."""
    if quantization == "none":
        return ""
    if quantization != "fp8":
        return ""
    if why_not := why_no_float8(capability):
        return why_not
    if dtype != "bfloat16":
        return f"it computes bfloat16, and dtype is {dtype}"
    sizes = () if isinstance(model, TransformersConfig) else _sizes_of_products(model)
    return _why_not_multiples("inputs and outputs of products", FLOAT8_GRAIN, sizes)


def _sizes_of_products(model: ModelShape) -> tuple[int, ...]:
    """Input and output sizes of products that `MakeLinear` makes: without those of latents, which are plain, and those
    of routed experts, whose kernel takes any size."""
    if model.mla is None:
        q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return model.hidden_size, q_size, q_size + 2 * kv_size, *_feed_forward_sizes(model)
    return model.hidden_size, model.num_heads * model.mla.v_head_dim, *_feed_forward_sizes(model)


def _feed_forward_sizes(model: ModelShape) -> tuple[int, ...]:
    """Intermediate sizes of dense feed-forwards, and of shared experts."""
    moe, (_, intermediate_size) = model.moe, model.product_inputs
    if moe is None:
        return (intermediate_size,)
    dense = (intermediate_size,) if moe.first_layer else ()
    return (*dense, moe.num_shared_experts * moe.intermediate_size) if moe.num_shared_experts else dense
