"""Compiles the Triton kernels as their callers launch them, for GPUs of any kind, on a machine without one.

    triton_compile.py 90 "128 bfloat16" normed 120     # two cases for an H200, all for an RTX 50

A process of its own: where Triton interprets, it does not compile.

Prints a JSON object: per kind, kernel and case, what a program takes: registers of a thread, bytes of stack (registers
that did not fit), bytes of shared memory; how it stores to the device's; by what it multiplies, but for the number of
columns; and of Hopper's tensor cores, products whose first operand lies in registers, instructions that write to such
registers too early, and products that no fence keeps from reading too early (`machine_code.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
import triton
from gpu_kinds import GPU_KINDS
from machine_code import early_writes, num_from_registers, unfenced_products
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from engine.attention.base import StepLayout
from engine.attention.triton_backend import TritonAttention
from engine.attention.triton_invariant import InvariantTritonAttention
from engine.attention.triton_latents import TritonLatentAttention
from engine.float8 import why_no_float8
from engine.int4_weight import INT4_GROUP_SIZE
from engine.kernels.gpu.choose import choose_experts
from engine.kernels.gpu.copy_rows import copy_rows
from engine.kernels.gpu.digest import block_digests
from engine.kernels.gpu.draw import draw
from engine.kernels.gpu.eight_bits import quantize_rows, scaled_product, widen
from engine.kernels.gpu.experts import expert_config, expert_product, sum_of_experts, tiles_of
from engine.kernels.gpu.four_bits import clamped_gate, four_bit_product
from engine.kernels.gpu.gpu_kind import H200
from engine.kernels.gpu.int4 import ScaledInt4, int4_config, int4_product, widen_int4
from engine.kernels.gpu.int4_experts import int4_expert_product
from engine.kernels.gpu.lora import StackedAdapters, add_adapters
from engine.kernels.gpu.one_row import one_row_product
from engine.kernels.gpu.pointwise import add_rms_norm, silu_multiply
from engine.kernels.gpu.product import (
    expert_row_product,
    head_row_products,
    row_config,
    row_product,
    scaled_row_config,
)
from engine.kernels.gpu.rotate import rotate_and_store
from engine.kernels.gpu.unfolded import UnfoldedConfig, attend_unfolded
from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding
from engine.lora.adapters import AddedPart
from engine.models.expert_products import ScaledStack
from engine.models.experts_config import ExpertsConfig
from engine.models.four_bit_experts import GROUP, ClampedGate, FourBitStack
from engine.models.rope_config import RopeConfig
from engine.models.scores import Scores
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

OPTIONS = ("num_warps", "num_stages")
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
MULTIPLIES = r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, MAX_CONTEXT = 32, 8, 16, 8192

kind = H200
found: dict[str, dict[str, Any]] = {}
case = ""


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Takes the place of a launch."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False))
    absent = {name: None for name, value in given.items() if value is None}  # known when it is compiled
    types = {name: type_of(value) for name, value in given.items() if name not in absent}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=False))
        if isinstance(value, torch.Tensor)
        or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize)
    }
    target = GPUTarget("cuda", 10 * kind.capability[0] + kind.capability[1], 32)
    compiled = triton.compile(ASTSource(kernel, signature, kwargs | absent, aligned), target=target, options=options)
    stores = sorted(set(re.findall(r"\bst\.global\S*", compiled.asm["ptx"])))
    multiplies = {re.sub(r"(m64)n\d+", r"\1", each) for each in re.findall(MULTIPLIES, compiled.asm["ptx"])}
    usage = resources_of(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared, "stores": stores}
    usage["multiplies"] = sorted(multiplies)
    if "wgmma" in compiled.asm["ptx"]:
        # Without the branches that it would infer, for half of its time: `machine_code.py` follows those that it reads.
        code = output_of(["nvdisasm", "-c", "-ndf"], compiled.asm["cubin"])
        usage |= {"operands": num_from_registers(code), "early_writes": len(early_writes(code))}
        usage["unfenced"] = len(unfenced_products(code))
    found[f"{kernel.__name__.strip('_')} {case}"] = usage


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def resources_of(cubin: bytes) -> dict[str, Any]:
    text = output_of(["cuobjdump", "-res-usage"], cubin)
    return {name.lower(): int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK")}  # type: ignore[index]


def output_of(command: list[str], cubin: bytes) -> str:
    tool, *options = command
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def compile_attention(
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    kv_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    make: type[TritonAttention | InvariantTritonAttention] = TritonAttention,
) -> None:
    kv_dtype = kv_dtype or dtype
    backend = make(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=BLOCK_SIZE,
        dtype=name_of(dtype), kv_dtype=name_of(kv_dtype), device="cpu", kind=kind,
    )  # fmt: skip
    kv = torch.zeros(1, 2, num_kv_heads, BLOCK_SIZE, head_dim, dtype=kv_dtype)
    backend.attend(
        torch.zeros(4, num_heads, head_dim, dtype=dtype),
        kv,
        backend.prepare(mixed_layout()),
        Scores.of(head_dim, window, soft_cap),
        torch.zeros(num_heads) if has_sinks else None,
    )


def compile_latents(num_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """DeepSeek's: latents of 512 numbers, rotated keys of 64."""
    backend = TritonLatentAttention(
        num_heads=num_heads, kv_lora_rank=512, block_size=BLOCK_SIZE, dtype=name_of(dtype), kv_dtype=name_of(kv_dtype),
        device="cpu", kind=kind,
    )  # fmt: skip
    plan = backend.prepare(mixed_layout())
    kv = torch.zeros(1, 1, 1, BLOCK_SIZE, 576, dtype=kv_dtype)
    norm, up_key = RMSNorm(torch.ones(512, dtype=dtype), 1e-6), torch.zeros(num_heads, 128, 512, dtype=dtype)
    rotary = RotaryEmbedding(RopeConfig(theta=10_000.0, rope_type="default"), 64, 8, dtype, "cpu")
    backend.project(
        torch.zeros(4, num_heads * 192, dtype=dtype), torch.zeros(4, 576, dtype=dtype), kv, plan,
        LatentProjection(rotary, norm, HeadProducts(up_key), HeadProducts(up_key.mT)), rotary.select(torch.arange(4)),
    )  # fmt: skip
    backend.attend_absorbed(torch.zeros(4, num_heads, 576, dtype=dtype), kv, plan, 0.1)


def compile_unfolded(
    dtype: torch.dtype, query_dim: int = 128, rotated_dim: int = 64, value_dim: int = 128, latent_dim: int = 512
) -> None:
    """By default DeepSeek's."""
    num_heads = 16
    k, v = (torch.zeros(num_heads, 128, size, dtype=dtype) for size in (query_dim, value_dim))
    attend_unfolded(
        torch.zeros(4, num_heads * (query_dim + rotated_dim), dtype=dtype),
        torch.zeros(4, num_heads, rotated_dim, dtype=dtype), k, v,
        torch.zeros(128, latent_dim + rotated_dim, dtype=dtype), torch.zeros(1, 6, dtype=torch.int32),
        torch.zeros(4, num_heads, value_dim, dtype=dtype), torch.zeros(1), scale=0.1,
        config=UnfoldedConfig.of(kind, dtype.itemsize),
    )  # fmt: skip


def mixed_layout() -> StepLayout:
    """A sequence that decodes, of the longest context, and a prompt of three tokens."""
    return StepLayout(
        query_lens=np.array([1, 3]), context_lens=np.array([MAX_CONTEXT, 3]),
        block_tables=np.zeros((2, MAX_CONTEXT // BLOCK_SIZE), dtype=np.int64), slot_mapping=np.zeros(4, dtype=np.int64),
        num_decodes=1,
    )  # fmt: skip


def compile_rotation(head_dim: int, dtype: torch.dtype, has_norms: bool, kv_dtype: torch.dtype) -> None:
    kv = torch.zeros(1, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim, dtype=kv_dtype)
    qkv, one = torch.zeros(2, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype)
    cos_sin = (torch.ones(2, 1, head_dim, dtype=dtype),) * 2
    slots = torch.zeros(2, dtype=torch.int64)
    rotate_and_store(qkv, cos_sin, (one, one) if has_norms else None, 1e-6, kv, slots, num_heads=NUM_HEADS)


def compile_rest(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 4096, dtype=dtype)
    add_rms_norm(x, x.clone(), x[0], 1e-6)
    silu_multiply(x)
    if not why_no_float8(kind.capability):
        quantize_rows(x, 1e-12)
    block_digests(torch.zeros(1, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, 128, dtype=dtype), [0])
    compile_copy(1 << 40)


def compile_copy(target_address: int) -> None:
    copy_rows(torch.zeros(1, 8192, dtype=torch.int64), target_address, np.array([[0], [0]]))


def compile_int8_products(num_rows: int) -> None:
    """Of a decoding step of Llama-3.1-8B: q, k and v."""
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
    """The same in 8-bit floats, blocks of 128 inputs."""
    x, scale = torch.zeros(num_rows, 4096, dtype=torch.bfloat16), torch.ones(6144, 32)
    weight = torch.zeros(6144, 4096, dtype=torch.float8_e4m3fn)
    scaled_product(x, weight, scale, None, 128)
    widen(weight, scale, 128, torch.bfloat16)


def compile_float8_products(num_rows: int) -> None:
    """The same with a scale for each output."""
    x, weight = torch.zeros(num_rows, 4096, dtype=torch.bfloat16), torch.zeros(6144, 4096, dtype=torch.float8_e4m3fn)
    scaled_product(x, weight, torch.ones(6144), None)


def int4_weight(group_size: int, has_words: bool, num_outputs: int = 6144, num_inputs: int = 4096) -> ScaledInt4:
    """By default of q, k and v, too. `has_words`: of scales and offsets in one."""
    scale = torch.zeros(num_outputs, num_inputs // group_size, dtype=torch.int32 if has_words else torch.float32)
    packed = torch.zeros(num_outputs, num_inputs // 2, dtype=torch.uint8)
    return ScaledInt4(packed, scale, None if has_words else scale.clone(), torch.bfloat16)


def compile_int4_products(
    num_rows: int, group_size: int, dtype: torch.dtype = torch.bfloat16, has_words: bool = False
) -> None:
    x, weight = torch.zeros(num_rows, 4096, dtype=dtype), int4_weight(group_size, has_words)
    int4_product(x, weight, None, int4_config(kind, num_rows, dtype.itemsize))
    widen_int4(weight)


def compile_row_products(num_rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Whose bits depend on no other row: of a layer, of heads, of experts, and with weights in 8 bits."""
    global case
    name, config = case, row_config(kind, num_rows, dtype.itemsize)
    x, weight = torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(1, 6144, 4096, dtype=dtype)
    row_product(x, weight[0], None, config)
    expert_row_product(x, weight, torch.zeros(3, 3, dtype=torch.int32), config)
    case = f"{name}, int8"
    scaled = scaled_row_config(kind, num_rows, dtype.itemsize)
    scaled_product(x, weight[0].to(torch.int8), torch.ones(6144, dtype=dtype), None, config=scaled)
    case = f"{name}, int4"
    int4_product(x, int4_weight(INT4_GROUP_SIZE, dtype == torch.bfloat16), None, scaled)
    case = f"{name}, logits"
    row_product(x, weight[0], None, config, torch.float32)
    case = f"{name}, heads"
    head_row_products(
        x.view(num_rows, 16, 256)[:, :, :192],
        weight[0, :, :192].view(16, -1, 192),
        x.new_empty(num_rows, 16, 384),
        config,
    )


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a model, and the form of their weights; `group_size` 0: a scale for each output."""

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
    global case
    num_rows, name = num_tokens * experts.num_chosen, case
    config = expert_config(kind, num_rows, experts.num_experts, dtype.itemsize)
    tiles = tiles_of(torch.zeros(experts.num_experts, dtype=torch.int32), num_rows, config.block_t)
    groups = replace(experts.config, num_groups=8, num_chosen_groups=4)
    for bias, choice in ((None, experts.config), (torch.zeros(experts.num_experts), groups)):
        choose_experts(torch.zeros(num_tokens, experts.num_experts), bias, choice)
    order = torch.zeros(num_rows, dtype=torch.int64)
    sum_of_experts(torch.zeros(num_rows, 7168, dtype=dtype), order, torch.zeros(num_tokens, experts.num_chosen))
    down = experts.hidden_size, experts.intermediate_size
    for product, (size_n, size_k) in {"gate_up": (2 * down[1], down[0]), "down": down}.items():
        case = f"{name}, {product}"
        num_groups = -(-size_k // experts.group_size) if experts.group_size else 1
        weight = torch.zeros(1, size_n, size_k, dtype=experts.form)  # one will do
        stack = ScaledStack(weight, torch.ones(1, size_n, num_groups), experts.group_size, dtype)
        expert_product(torch.zeros(num_rows, size_k, dtype=dtype), stack, tiles, config)


def compile_int4_experts(
    num_tokens: int,
    group_size: int,
    dtype: torch.dtype = torch.bfloat16,
    has_words: bool = False,
    intermediate_size: int = 768,
) -> None:
    """Both products of a layer's experts, by default Qwen3-30B-A3B's. `has_words`: see `int4_weight`."""
    global case
    num_rows, num_experts, hidden_size, name = num_tokens * 8, 128, 2048, case
    config = expert_config(kind, num_rows, num_experts, dtype.itemsize)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    for product, (size_n, size_k) in {
        "gate_up": (2 * intermediate_size, hidden_size),
        "down": (hidden_size, intermediate_size),
    }.items():
        case = f"{name}, {product}"
        weight = int4_weight(group_size, has_words, size_n, size_k)  # of one expert, which will do
        int4_expert_product(torch.zeros(num_rows, size_k, dtype=dtype), weight, 1, tiles, config)


GPT_OSS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
"""Experts of 2,880 of 2,880, 4 of them for a token."""


def compile_four_bits(num_experts: int, num_tokens: int, dtype: torch.dtype, size: int = 2880) -> None:
    """Both products of a layer's experts in MXFP4."""
    global case
    num_rows, name = num_tokens * 4, case
    config = expert_config(kind, num_rows, num_experts, dtype.itemsize)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    for product, size_n in {"gate_up": 2 * size, "down": size}.items():
        case = f"{name}, {product}"
        pairs = torch.zeros(1, size_n, size // 2, dtype=torch.uint8)  # one will do
        scales, bias = torch.zeros(1, size_n, size // GROUP, dtype=torch.uint8), torch.zeros(1, size_n, dtype=dtype)
        x = torch.zeros(num_rows, size, dtype=dtype)
        four_bit_product(x, FourBitStack(pairs, scales, bias), tiles, config)
    case = name
    clamped_gate(torch.zeros(num_rows, 2 * size, dtype=dtype), ClampedGate(alpha=1.702, limit=7.0))


def compile_adapters(rank: int, dtype: torch.dtype) -> None:
    """What is added to q, k and v of Llama-3.1-8B."""
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


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for head_dim, dtype, window, soft_cap in (
        (8, torch.bfloat16, 0, 0.0),
        (80, torch.float16, 0, 30.0),
        (96, torch.bfloat16, 0, 0.0),
        (128, torch.bfloat16, 0, 0.0),
        (128, torch.bfloat16, 4096, 50.0),
        (192, torch.bfloat16, 0, 0.0),
        (256, torch.bfloat16, 0, 0.0),
        (256, torch.bfloat16, 4096, 50.0),
        (128, torch.float32, 0, 0.0),
        (256, torch.float32, 0, 0.0),
    ):
        name = f"{head_dim} {name_of(dtype)}" + (f" window {window} cap" if window else "")
        cases[name] = partial(compile_attention, head_dim, dtype, window, soft_cap)
    cases["64 bfloat16 sinks"] = partial(compile_attention, 64, torch.bfloat16, 0, 0.0, has_sinks=True)  # gpt-oss's
    for head_dim in (64, 256):
        cases[f"{head_dim} bfloat16, 64 heads of a key's"] = partial(
            compile_attention, head_dim, torch.bfloat16, 0, 0.0, num_heads=64, num_kv_heads=1
        )
    for head_dim in (64, 128, 256):
        cases[f"{head_dim} bfloat16, 8-bit pool"] = partial(
            compile_attention, head_dim, torch.bfloat16, 0, 0.0, torch.float8_e4m3fn
        )
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            cases[f"{head_dim} bfloat16, pool of {name_of(kv_dtype)}, batch invariant"] = partial(
                compile_attention, head_dim, torch.bfloat16, 4096, 50.0, kv_dtype, make=InvariantTritonAttention
            )
    for num_heads, dtype, kv_dtype in (
        (16, torch.bfloat16, torch.bfloat16),
        (20, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.bfloat16),
        (128, torch.float16, torch.float16),
        (16, torch.float32, torch.float32),
        (16, torch.bfloat16, torch.float8_e4m3fn),
        (32, torch.bfloat16, torch.float8_e4m3fn),
        (128, torch.bfloat16, torch.float8_e4m3fn),
    ):
        name = f"{num_heads} heads {name_of(dtype)}, pool of {name_of(kv_dtype)}"
        cases[name] = partial(compile_latents, num_heads, dtype, kv_dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cases[f"{name_of(dtype)}, unfolded"] = partial(compile_unfolded, dtype)
    cases["bfloat16, unfolded, of other sizes"] = partial(compile_unfolded, torch.bfloat16, 96, 32, 80, 384)
    cases["plain"] = partial(compile_rotation, 128, torch.bfloat16, False, torch.bfloat16)
    cases["normed"] = partial(compile_rotation, 128, torch.bfloat16, True, torch.bfloat16)
    cases["8-bit pool"] = partial(compile_rotation, 128, torch.bfloat16, True, torch.float8_e4m3fn)
    return cases


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
    return cases


def has_float8(name: str) -> bool:
    marks = ("8-bit", "float8", "groups", "DeepSeek-V3", "in blocks")
    return any(mark in name for mark in marks)


def compile_for(capability: tuple[int, int], chosen: list[str]) -> dict[str, dict[str, Any]]:
    """`chosen`: names of cases. Empty: all that such a GPU is given."""
    global kind, found, case
    kind, found = GPU_KINDS[capability], {}
    cases = attention_cases() | other_cases()
    if why_no_float8(capability):
        cases = {name: compile_case for name, compile_case in cases.items() if not has_float8(name)}
    for case in chosen or cases:
        cases[case]()
    return found


def main(arguments: list[str]) -> None:
    """Numbers are kinds of GPUs, without the point; cases follow theirs."""
    JITFunction.run = compile_instead
    chosen: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.isdigit():
            chosen[argument] = cases = []
        else:
            cases.append(argument)
    usage = {number: compile_for((int(number[:-1]), int(number[-1])), cases) for number, cases in chosen.items()}
    json.dump(usage, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
