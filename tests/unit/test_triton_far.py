"""Pools of more than 2**31 numbers, or words: with 32-bit offsets, a kernel would reach other addresses.

Memory that is never touched takes no room: only the blocks of the case are ever real. The interpreter reports an
address outside of the pool, and a 32-bit sum or product that overflows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import LENS, Case
from latent_cases import LatentCase
from triton_accesses import known_by_address
from triton_device import DEVICE  # must come before the kernels

from engine.attention import StepLayout
from engine.attention.latent_forms import Unfolding
from engine.attention.triton_backend import TritonAttention
from engine.attention.triton_latents import TritonLatentAttention
from engine.attention.triton_plans import TritonPlan
from engine.kernels.gpu.copy_rows import copy_rows
from engine.kernels.gpu.digest import block_digests
from engine.kernels.gpu.experts import expert_config, expert_product, tiles_of
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.kernels.gpu.int4 import ScaledInt4
from engine.kernels.gpu.int4_experts import int4_expert_product
from engine.kernels.gpu.rotate import rotate_and_store
from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding
from engine.models.rope_config import RopeConfig
from engine.models.scores import Scores
from engine.scaled_weight import ScaledWeight

FAR = 2**31
BLOCK_SIZE = 16
MAP_NORESERVE = 0x4000
"""A flag of Linux: the memory is not checked against what is available. Python has a name for it from 3.13 on."""


SPARE_BYTES = 4 << 30
"""Memory of a GPU that is left for all else, and for tests that run beside."""


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    """On a GPU the memory is real, and other tests run beside, in processes of their own."""
    yield
    if DEVICE != "cpu":
        torch.cuda.empty_cache()


def untouched(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if DEVICE != "cpu":
        num_bytes = math.prod(shape) * dtype.itemsize
        if torch.cuda.mem_get_info()[0] < num_bytes + SPARE_BYTES:
            pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of the GPU's memory, which has not so much left")
        return torch.empty(*shape, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def with_far_blocks(near: torch.Tensor, layout: StepLayout) -> tuple[torch.Tensor, StepLayout, int]:
    """A pool with the blocks of `near` behind 2**31 other numbers, the step that uses these, and the number of blocks
    before them."""
    num_before = FAR // near[0].numel() + 1
    far = untouched(num_before + len(near), *near.shape[1:], dtype=near.dtype)
    far[num_before:] = near.to(DEVICE)
    far_layout = replace(
        layout,
        block_tables=layout.block_tables + num_before,
        slot_mapping=layout.slot_mapping + num_before * BLOCK_SIZE,
    )
    return far, far_layout, num_before


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lens", [LENS["decodes of very different lengths"], LENS["mixed"]], ids=["decode", "mixed"])
def test_keys_and_values_are_written_and_read(lens: list[tuple[int, int]]) -> None:
    case = Case(lens, num_heads=6, num_kv_heads=2, head_dim=64, block_size=BLOCK_SIZE, dtype=torch.float16)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1).to(DEVICE)
    positions = torch.cat([torch.arange(before, before + new) for before, new in lens])
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), 64, 4096, torch.float16, DEVICE)

    def attended(kv: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        slots = torch.from_numpy(layout.slot_mapping).to(DEVICE)
        q = rotate_and_store(qkv, rotary.select(positions.to(DEVICE)), None, 1e-6, kv, slots, num_heads=case.num_heads)
        backend = TritonAttention(
            num_heads=6, num_kv_heads=2, head_dim=64, block_size=BLOCK_SIZE, dtype="float16", kv_dtype="float16",
            device=DEVICE, kind=gpu_kind(DEVICE),
        )  # fmt: skip
        return backend.attend(q, kv, backend.prepare(layout), Scores.of(case.head_dim))

    near = case.kv.clone().to(DEVICE)
    expected = attended(near, case.layout)
    far, far_layout, num_before = with_far_blocks(case.kv, case.layout)
    assert_same(attended(far, far_layout), expected)
    assert_same(far[num_before:], near)


@pytest.mark.parametrize(
    ("lens", "unfolding"),
    [
        (LENS["decodes of very different lengths"], None),
        (LENS["mixed"], None),
        (LENS["mixed"], Unfolding(from_tokens=16, query_dim=12, value_dim=12)),
    ],
    ids=["decode", "mixed", "unfolded"],
)
def test_latents_are_written_and_read(lens: list[tuple[int, int]], unfolding: Unfolding | None) -> None:
    case = LatentCase(lens, num_heads=4, latent_dim=48, rotated_dim=16, dtype=torch.float16)
    q, wide, weight, up_key = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)
        for shape in ((len(case.q), 4 * 28), (len(case.q), 64), (48,), (4, 12, 48))
    )
    rotary = RotaryEmbedding(RopeConfig(theta=100.0, rope_type="default"), 16, 128, torch.float16, DEVICE)
    heads = LatentProjection(RMSNorm(weight, 1e-3), HeadProducts(up_key), HeadProducts(up_key.mT))
    cos_sin = rotary.select(torch.arange(len(q), device=DEVICE))

    def attended(kv: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        backend = TritonLatentAttention(
            num_heads=4, kv_lora_rank=48, block_size=BLOCK_SIZE, dtype="float16", kv_dtype="float16", device=DEVICE,
            kind=gpu_kind(DEVICE), unfolding=unfolding,
        )  # fmt: skip
        plan = backend.prepare(layout)
        assert isinstance(plan, TritonPlan) == (unfolding is None)
        return backend.attend(q, wide, kv, plan, heads, cos_sin, case.scale)

    near = case.kv.clone().to(DEVICE)
    expected = attended(near, case.layout)
    far, far_layout, num_before = with_far_blocks(case.kv, case.layout)
    assert_same(attended(far, far_layout), expected)
    assert_same(far[num_before:], near)


def test_digests_of_far_layers() -> None:
    num_blocks = FAR // 512 // 2 + 3  # 4 KB each: the second layer's last blocks lie behind 2**31 words of 8 bytes
    pool = untouched(2, num_blocks, 1, 1, 1, 4096, dtype=torch.uint8)
    near = torch.randint(0, 256, (2, 2, 1, 1, 1, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool[:, -2:] = near.to(DEVICE)
    far = [num_blocks - 2, num_blocks - 1]
    np.testing.assert_array_equal(block_digests(pool, far), block_digests(near.to(DEVICE), [0, 1]))


def test_weights_of_far_experts_are_read() -> None:
    num_experts, num_outputs, num_inputs = FAR // (64 * 4096) + 2, 64, 4096
    config = expert_config(gpu_kind(DEVICE), 2, num_experts, 2)
    x, near = (
        torch.randint(-9, 9, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        for shape in ((2, num_inputs), (num_outputs, num_inputs))
    )
    weight = untouched(num_experts * num_outputs, num_inputs, dtype=torch.int8)
    scale = untouched(num_experts * num_outputs, 1, dtype=torch.float32)
    weight[-num_outputs:], scale[-num_outputs:] = near, 0.5
    ends = torch.zeros(num_experts, dtype=torch.int32, device=DEVICE)
    ends[-1] = 2
    stack = ScaledWeight(weight, scale, num_inputs, torch.float16)
    y = expert_product(x.half(), stack, num_experts, tiles_of(ends, 2, config.block_t), config)
    assert_same(y, (x.double() @ near.double().T / 2).half())


def test_weights_in_4_bits_of_far_experts_are_read() -> None:
    num_experts, num_outputs, num_inputs = FAR // (64 * 2048) + 2, 64, 4096
    config = expert_config(gpu_kind(DEVICE), 2, num_experts, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (2, num_inputs), generator=generator).half().to(DEVICE)
    near = torch.randint(16, (num_outputs, num_inputs), generator=generator).to(DEVICE)
    packed = untouched(num_experts * num_outputs, num_inputs // 2, dtype=torch.uint8)
    scale, offset = (untouched(num_experts * num_outputs, 1, dtype=torch.float32) for _ in range(2))
    packed[-num_outputs:], scale[-num_outputs:], offset[-num_outputs:] = near[:, ::2] | near[:, 1::2] << 4, 0.5, -4
    ends = torch.zeros(num_experts, dtype=torch.int32, device=DEVICE)
    ends[-1] = 2
    weight = ScaledInt4(packed, scale, offset, torch.float16)
    y = int4_expert_product(x, weight, num_experts, tiles_of(ends, 2, config.block_t), config)
    assert_same(y, (x.double() @ (near.double() / 2 - 4).T).half())


def test_rows_are_copied_from_far_to_far() -> None:
    num_rows = FAR // 4096 + 4
    rows = untouched(num_rows, 4096, dtype=torch.int64)
    rows[-3:] = torch.tensor([0, -1, 0])[:, None]
    rows[-1] = torch.arange(4096)
    with known_by_address(rows):
        copy_rows(rows, rows.data_ptr(), np.array([[num_rows - 1], [num_rows - 2]]))
    assert_same(rows[-2], rows[-1])
    assert not rows[-3].any()
