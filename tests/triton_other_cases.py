"""Launches of all other kernels, mainly products, by case name: see triton_compile.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from triton_compiler import name_of, now

from engine.float8 import why_no_float8
from engine.grains import INT4_GROUP_SIZE
from engine.kernels.gpu.choose import choose_experts
from engine.kernels.gpu.convolution import convolve
from engine.kernels.gpu.copy_rows import copy_rows
from engine.kernels.gpu.delta_spans import delta_rule_in_spans
from engine.kernels.gpu.digest import block_digests
from engine.kernels.gpu.draw import draw
from engine.kernels.gpu.eight_bits import quantize_rows, scaled_product, widen
from engine.kernels.gpu.experts import expert_config, expert_product, sum_of_experts, tiles_of
from engine.kernels.gpu.four_bits import clamped_gate, four_bit_product
from engine.kernels.gpu.int4 import ScaledInt4, int4_config, int4_product, widen_int4
from engine.kernels.gpu.int4_experts import int4_expert_product
from engine.kernels.gpu.lora import StackedAdapters, add_adapters
from engine.kernels.gpu.one_row import one_row_product
from engine.kernels.gpu.pointwise import add_rms_norm, multiply_gated
from engine.kernels.gpu.product import (
    expert_row_product,
    head_row_products,
    row_config,
    row_product,
    scaled_row_config,
)
from engine.kernels.gpu.scan_spans import scan_in_spans
from engine.lora.adapters import AddedPart
from engine.models.experts_config import ExpertsConfig
from engine.models.four_bit_experts import GROUP, ClampedGate, FourBitStack
from engine.models.recurrent_ops import Convolution
from engine.models.recurrent_shape import Mamba2Layer
from engine.models.recurrent_states import RecurrentStep
from engine.sampling_params import SamplingParams
from engine.scaled_weight import ScaledWeight
from engine.scheduling.sequence import Sequence

NUM_KV_HEADS, BLOCK_SIZE = 8, 16


def compile_rest(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 4096, dtype=dtype)
    add_rms_norm(x, x.clone(), x[0], 1e-6)
    add_rms_norm(x, None, x[0].float(), 1e-6)
    multiply_gated(x)
    multiply_gated(x, "gelu_tanh")
    if not why_no_float8(now.kind.capability):
        quantize_rows(x, 1e-12)
    block_digests(torch.zeros(1, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, 128, dtype=dtype), [0])
    compile_copy(1 << 40)


def compile_copy(target_address: int) -> None:
    copy_rows(torch.zeros(1, 8192, dtype=torch.int64), target_address, np.array([[0], [0]]))


def compile_int8_products(num_rows: int) -> None:
    """q, k and v in a decode step of Llama-3.1-8B, with int8 weights."""
    x, scale = torch.zeros(num_rows, 4096, dtype=torch.bfloat16), torch.ones(6144, dtype=torch.bfloat16)
    scaled_product(x, torch.zeros(6144, 4096, dtype=torch.int8), scale, None)


def compile_one_row(dtype: torch.dtype, num_inputs: int, weight_dtype: torch.dtype | None = None) -> None:
    one_row_product(
        torch.zeros(1, num_inputs, dtype=dtype),
        torch.zeros(40, num_inputs, dtype=weight_dtype or dtype),
        torch.zeros(40, dtype=dtype),
        None if weight_dtype is None else torch.ones(40),
    )


def compile_products_of_groups(num_rows: int) -> None:
    """The same products with weights in 8-bit floats, a scale for each block of 128 inputs."""
    x, scale = torch.zeros(num_rows, 4096, dtype=torch.bfloat16), torch.ones(6144, 32)
    weight = torch.zeros(6144, 4096, dtype=torch.float8_e4m3fn)
    scaled_product(x, weight, scale, None, 128)
    widen(weight, scale, 128, torch.bfloat16)


def compile_float8_products(num_rows: int) -> None:
    """The same products with weights in 8-bit floats, a scale for each output."""
    x, weight = torch.zeros(num_rows, 4096, dtype=torch.bfloat16), torch.zeros(6144, 4096, dtype=torch.float8_e4m3fn)
    scaled_product(x, weight, torch.ones(6144), None)


def int4_weight(group_size: int, has_words: bool, num_outputs: int = 6144, num_inputs: int = 4096) -> ScaledInt4:
    """Return a weight, by default of q, k and v. `has_words`: scale and offset share one word."""
    scale = torch.zeros(num_outputs, num_inputs // group_size, dtype=torch.int32 if has_words else torch.float32)
    packed = torch.zeros(num_outputs, num_inputs // 2, dtype=torch.uint8)
    return ScaledInt4(packed, scale, None if has_words else scale.clone(), torch.bfloat16)


def compile_int4_products(
    num_rows: int, group_size: int, dtype: torch.dtype = torch.bfloat16, has_words: bool = False
) -> None:
    x, weight = torch.zeros(num_rows, 4096, dtype=dtype), int4_weight(group_size, has_words)
    int4_product(x, weight, None, int4_config(now.kind, num_rows, dtype.itemsize))
    widen_int4(weight)


def compile_row_products(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Products in which a row's bits depend on no other row: a layer's, with weights plain, in 8 and in 4 bits; heads';
    experts'; logits."""
    name, config = now.case, row_config(now.kind, num_rows, dtype.itemsize)
    x, weight = torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(1, 6144, 4096, dtype=dtype)
    row_product(x, weight[0], None, config)
    expert_row_product(x, weight, torch.zeros(3, 3, dtype=torch.int32), config)
    now.case = f"{name}, int8"
    scaled = scaled_row_config(now.kind, num_rows, dtype.itemsize)
    scaled_product(x, weight[0].to(torch.int8), torch.ones(6144, dtype=dtype), None, config=scaled)
    now.case = f"{name}, int4"
    int4_product(x, int4_weight(INT4_GROUP_SIZE, dtype == torch.bfloat16), None, scaled)
    now.case = f"{name}, logits"
    row_product(x, weight[0], None, config, torch.float32)
    now.case = f"{name}, heads"
    head_row_products(
        x.view(num_rows, 16, 256)[:, :, :192],
        weight[0, :, :192].view(16, -1, 192),
        x.new_empty(num_rows, 16, 384),
        config,
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """A model's experts and the form of their weights. `group_size` 0: one scale for each output."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    intermediate_size: int
    form: torch.dtype
    group_size: int

    @property
    def config(self) -> ExpertsConfig:
        return ExpertsConfig(
            first_layer=0, num_experts=self.num_experts, num_experts_per_token=self.num_chosen, num_shared_experts=0,
            intermediate_size=self.intermediate_size, num_groups=1, num_chosen_groups=1, scoring="softmax",
            norms_weights=True,
        )  # fmt: skip


EXPERTS = {
    "DeepSeek-V3": Experts(256, 8, 7168, 2048, torch.float8_e4m3fn, 128),
    "DeepSeek-V2-Lite": Experts(64, 6, 2048, 1408, torch.int8, 0),
    "DeepSeek-V2-Lite in blocks": Experts(64, 6, 2048, 1408, torch.float8_e4m3fn, 128),
}


def compile_experts(experts: Experts, num_tokens: int, dtype: torch.dtype) -> None:
    """Both products of a layer's experts."""
    num_rows, name = num_tokens * experts.num_chosen, now.case
    config = expert_config(now.kind, num_rows, experts.num_experts, dtype.itemsize)
    tiles = tiles_of(torch.zeros(experts.num_experts, dtype=torch.int32), num_rows, config.block_t)
    groups = replace(experts.config, num_groups=8, num_chosen_groups=4)
    for bias, choice in ((None, experts.config), (torch.zeros(experts.num_experts), groups)):
        choose_experts(torch.zeros(num_tokens, experts.num_experts), bias, choice)
    order = torch.zeros(num_rows, dtype=torch.int64)
    sum_of_experts(torch.zeros(num_rows, 7168, dtype=dtype), order, torch.zeros(num_tokens, experts.num_chosen))
    down = experts.hidden_size, experts.intermediate_size
    for product, (size_n, size_k) in {"gate_up": (2 * down[1], down[0]), "down": down}.items():
        now.case = f"{name}, {product}"
        num_groups = -(-size_k // experts.group_size) if experts.group_size else 1
        weight = torch.zeros(size_n, size_k, dtype=experts.form)  # one expert is enough
        stack = ScaledWeight(weight, torch.ones(size_n, num_groups), experts.group_size, dtype)
        expert_product(torch.zeros(num_rows, size_k, dtype=dtype), stack, 1, tiles, config)


def compile_int4_experts(
    num_tokens: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
    has_words: bool = False,
    intermediate_size: int = 768,
) -> None:
    """Both products of a layer's experts, by default Qwen3-30B-A3B's. `has_words`: see `int4_weight`."""
    num_rows, num_experts, hidden_size, name = num_tokens * 8, 128, 2048, now.case
    config = expert_config(now.kind, num_rows, num_experts, dtype.itemsize)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    for product, (size_n, size_k) in {
        "gate_up": (2 * intermediate_size, hidden_size),
        "down": (hidden_size, intermediate_size),
    }.items():
        now.case = f"{name}, {product}"
        weight = int4_weight(group_size, has_words, size_n, size_k)  # one expert is enough
        int4_expert_product(torch.zeros(num_rows, size_k, dtype=dtype), weight, 1, tiles, config)


GPT_OSS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
"""The number of experts. Each has 2,880 inputs and 2,880 inner numbers; a token uses 4."""


def compile_four_bits(num_experts: int, num_tokens: int, dtype: torch.dtype, size: int = 2880) -> None:
    """Both products of a layer's experts in MXFP4."""
    num_rows, name = num_tokens * 4, now.case
    config = expert_config(now.kind, num_rows, num_experts, dtype.itemsize)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    for product, size_n in {"gate_up": 2 * size, "down": size}.items():
        now.case = f"{name}, {product}"
        pairs = torch.zeros(1, size_n, size // 2, dtype=torch.uint8)  # one expert is enough
        scales, bias = torch.zeros(1, size_n, size // GROUP, dtype=torch.uint8), torch.zeros(1, size_n, dtype=dtype)
        x = torch.zeros(num_rows, size, dtype=dtype)
        four_bit_product(x, FourBitStack(pairs, scales, bias), tiles, config)
    now.case = name
    clamped_gate(torch.zeros(num_rows, 2 * size, dtype=dtype), ClampedGate(alpha=1.702, limit=7.0))


def compile_adapters(rank: int, dtype: torch.dtype) -> None:
    """The adapters' part of q, k and v of Llama-3.1-8B."""
    sizes, starts = [4096, 1024, 1024], [0, 4096, 5120]
    parts = [
        AddedPart(start, torch.zeros(rank, 4096, dtype=dtype), torch.zeros(size, rank, dtype=dtype))
        for start, size in zip(starts, sizes, strict=True)
    ]
    tiles = torch.zeros(3, 17, dtype=torch.int32)
    stacked = StackedAdapters.of({1: parts}, sizes, 4096, 1)
    add_adapters(torch.zeros(4, 4096, dtype=dtype), stacked, tiles, torch.zeros(4, 6144, dtype=dtype))


def compile_draws(dtype: torch.dtype) -> None:
    params = SamplingParams(top_k=50, top_p=0.9)
    draw(torch.zeros(1, 128256, dtype=dtype), [Sequence(0, "r", [1], 1, params)])


def mamba_2(num_heads: int, head_dim: int, state_dim: int, num_groups: int) -> Mamba2Layer:
    return Mamba2Layer(
        name="", num_heads=num_heads, head_dim=head_dim, state_dim=state_dim, num_groups=num_groups, num_taps=4
    )


NEMOTRON, FALCON_H1 = mamba_2(128, 80, 128, 8), mamba_2(24, 128, 256, 1)
"""Nemotron-Nano-9B-v2's layers, and Falcon-H1-7B's, whose states are larger."""


def compile_delta(num_tokens: int, dtype: torch.dtype) -> None:
    """A layer of Qwen3-Next-80B-A3B, with one sequence."""
    x, decay = torch.zeros(num_tokens, 8192, dtype=dtype), torch.zeros(num_tokens, 32)
    integer = torch.zeros(1, dtype=torch.int64)
    step = RecurrentStep(integer, integer + num_tokens, integer, integer == 0, np.array([num_tokens]))
    convolve(
        x, Convolution(torch.zeros(8192, 4, dtype=dtype), has_silu=True), torch.zeros(1, 3, 8192, dtype=dtype), step
    )
    delta_rule_in_spans(x, decay, decay, torch.zeros(1, 32, 128, 128), step, now.kind)


def compile_scan(layer: Mamba2Layer, num_tokens: int, dtype: torch.dtype) -> None:
    num_channels, num_heads = layer.num_channels, layer.num_heads
    x, decay = torch.zeros(num_tokens, num_channels, dtype=dtype), torch.zeros(num_tokens, num_heads)
    integer = torch.zeros(1, dtype=torch.int64)
    step = RecurrentStep(integer, integer + num_tokens, integer, integer == 0, np.array([num_tokens]))
    taps = Convolution(torch.zeros(num_channels, 4, dtype=dtype), torch.zeros(num_channels, dtype=dtype), has_silu=True)
    convolve(x, taps, torch.zeros(1, 3, num_channels, dtype=dtype), step)
    scan_in_spans(x, decay, decay, decay[0], torch.zeros(1, *layer.matrices_shape), step, now.kind)


def other_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for num_rows in (16, 32, 64, 256):
        cases[f"{num_rows} rows"] = partial(compile_int8_products, num_rows)
        cases[f"{num_rows} rows, groups"] = partial(compile_products_of_groups, num_rows)
        cases[f"{num_rows} rows, 8-bit floats"] = partial(compile_float8_products, num_rows)
        for group_size in (INT4_GROUP_SIZE, 64, 128):
            cases[f"{num_rows} rows, int4 {group_size}"] = partial(compile_int4_products, num_rows, group_size)
        cases[f"{num_rows} rows, int4 words"] = partial(
            compile_int4_products, num_rows, INT4_GROUP_SIZE, has_words=True
        )
    for dtype, num_inputs in ((torch.bfloat16, 4096), (torch.float16, 4096), (torch.bfloat16, 14336 // 4)):
        cases[f"1 row {name_of(dtype)}" + (f" {num_inputs}" if num_inputs != 4096 else "")] = partial(
            compile_one_row, dtype, num_inputs
        )
    for dtype in (torch.int8, torch.float8_e4m3fn):
        cases[f"1 row, {name_of(dtype)}"] = partial(compile_one_row, torch.bfloat16, 4096, dtype)
    for num_rows in (16, 32, 64, 256, 2048):
        cases[f"{num_rows} rows, batch invariant"] = partial(compile_row_products, num_rows)
    for dtype in (torch.float16, torch.float32):
        cases[f"16 rows, int4 {name_of(dtype)}"] = partial(compile_int4_products, 16, INT4_GROUP_SIZE, dtype)
    cases["float32, batch invariant"] = partial(compile_row_products, 16, torch.float32)
    cases["bfloat16"] = partial(compile_rest, torch.bfloat16)
    cases["at 8"] = partial(compile_copy, (1 << 40) + 8)
    for rank, dtype in ((16, torch.bfloat16), (64, torch.bfloat16), (16, torch.float16), (16, torch.float32)):
        cases[f"rank {rank} {name_of(dtype)}"] = partial(compile_adapters, rank, dtype)
    for model, experts in EXPERTS.items():
        for num_tokens in (1, 500, 1000, 4096):
            name = f"{model}, {num_tokens} token{'s' * (num_tokens > 1)}"
            cases[name] = partial(compile_experts, experts, num_tokens, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        cases[f"DeepSeek-V2-Lite, {name_of(dtype)}"] = partial(compile_experts, EXPERTS["DeepSeek-V2-Lite"], 1, dtype)
    for num_tokens in (1, 200, 500, 4096):
        for group_size, has_words in ((INT4_GROUP_SIZE, True), (128, False)):
            name = f"Qwen3-30B-A3B, {num_tokens} token{'s' * (num_tokens > 1)}, int4 {group_size}"
            cases[name] = partial(compile_int4_experts, num_tokens, group_size, has_words=has_words)
    cases["a rank's, 4096 tokens, int4 64"] = partial(compile_int4_experts, 4096, 64, intermediate_size=192)
    for dtype in (torch.float16, torch.float32):
        cases[f"Qwen3-30B-A3B, int4 {name_of(dtype)}"] = partial(compile_int4_experts, 1, INT4_GROUP_SIZE, dtype)
    for model, num_experts in GPT_OSS.items():
        for num_tokens in (1, 200, 1000, 4096):
            name = f"{model}, {num_tokens} token{'s' * (num_tokens > 1)}"
            cases[name] = partial(compile_four_bits, num_experts, num_tokens, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        cases[f"gpt-oss-20b, {name_of(dtype)}"] = partial(compile_four_bits, 32, 1, dtype)
    cases["gpt-oss-20b, 2048 inputs"] = partial(compile_four_bits, 32, 1, torch.bfloat16, 2048)
    for dtype in (torch.bfloat16, torch.float32):
        cases[f"draws {name_of(dtype)}"] = partial(compile_draws, dtype)
        cases[f"Qwen3-Next, {name_of(dtype)}"] = partial(compile_delta, 40, dtype)
        cases[f"Nemotron-Nano-9B-v2, {name_of(dtype)}"] = partial(compile_scan, NEMOTRON, 40, dtype)
        cases[f"Falcon-H1-7B, {name_of(dtype)}"] = partial(compile_scan, FALCON_H1, 40, dtype)
    return cases
