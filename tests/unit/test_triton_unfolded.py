"""The Triton kernel of attention to keys and values unfolded from latents, compared with float64. docs/gpu.md says what
has run where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kinds import GPU_KINDS
from latent_cases import MIXES, HeadsCase
from triton_device import DEVICE  # must come before the kernels

from engine.attention.latent_forms import Unfolding
from engine.attention.triton_latents import MixedTritonPlan, TritonLatentAttention
from engine.attention.triton_plans import TritonPlan
from engine.kernels.gpu.gpu_kind import GpuKind, gpu_kind

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FLOAT8 = torch.float8_e4m3fn
ONE_BLOCK = 1
"""A limit in bytes with which slices are as small as they can be."""


def backend_of(
    case: HeadsCase,
    *,
    max_bytes: int = 1 << 28,
    kind: GpuKind | None = None,
    batch_invariant: bool = False,
) -> TritonLatentAttention:
    return TritonLatentAttention(
        num_heads=case.num_heads, kv_lora_rank=case.latent_dim, block_size=case.block_size,
        dtype=str(case.q.dtype).removeprefix("torch."), kv_dtype=str(case.kv.dtype).removeprefix("torch."),
        device=DEVICE, kind=kind or gpu_kind(DEVICE), batch_invariant=batch_invariant,
        unfolding=Unfolding(16, case.query_dim, case.value_dim, max_bytes),
    )  # fmt: skip


def attend(case: HeadsCase, backend: TritonLatentAttention) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The output, the pool and the plan."""
    plan, kv = backend.prepare(case.layout), case.kv.clone().to(DEVICE)
    latents = case.new_latents.to(DEVICE)
    out = backend.attend(case.q_TX, latents, kv, plan, case.heads, case.cos_sin, case.scale)
    return out.cpu(), kv.cpu(), plan


def assert_unfolded(case: HeadsCase, **settings: Any) -> MixedTritonPlan:
    backend = backend_of(case, **settings)
    out, kv, plan = attend(case, backend)
    assert isinstance(plan, MixedTritonPlan)
    alone = case.kv.clone().to(DEVICE)
    backend.write(case.new_latents.to(DEVICE), alone, plan, case.heads, case.cos_sin)
    torch.testing.assert_close(alone.cpu(), kv, rtol=0, atol=0, equal_nan=True)
    tolerance = TOLERANCES[case.q.dtype]
    torch.testing.assert_close(out.double(), case.expected_of(kv), rtol=tolerance, atol=tolerance)
    return plan


def heads_case(lens: list[tuple[int, int]], **settings: Any) -> HeadsCase:
    return HeadsCase(lens, device=DEVICE, **settings)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("lens", MIXES.values(), ids=MIXES.keys())
def test_long_ones_are_unfolded(lens: list[tuple[int, int]], block_size: int) -> None:
    assert_unfolded(heads_case(lens, block_size=block_size))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("query_dim", "rotated_dim", "value_dim"), [(16, 16, 32), (7, 6, 15), (5, 2, 40), (128, 64, 128)]
)
def test_keys_and_values_of_all_sizes(query_dim: int, rotated_dim: int, value_dim: int) -> None:
    """Powers of two, other sizes, and the largest; some slices are full to their last number."""
    sizes = {"query_dim": query_dim, "rotated_dim": rotated_dim, "value_dim": value_dim}
    assert_unfolded(heads_case([(9, 1), (140, 33), (0, 17), (20, 5)], **sizes), max_bytes=ONE_BLOCK)


@pytest.mark.parametrize("block_size", [16, pytest.param(24, marks=pytest.mark.slow)])
def test_what_is_longer_than_a_slice_goes_on_in_the_next(block_size: int) -> None:
    """Queries that see nothing of a slice, some of it, or all; tiles that begin in one slice and end in another."""
    far = 1 if block_size == 16 else 3  # a slice has whole blocks and whole tiles of 128: 384
    lens = [(9, 1), (0, 150 * far), (40, 3), (170 * far, 40), (0, 30), (200 * far, 8)]
    plan = assert_unfolded(heads_case(lens, num_heads=2, block_size=block_size), max_bytes=ONE_BLOCK)
    assert plan.unfolded.is_cut
    assert len(plan.unfolded.slices) == 4


def test_where_a_context_is_cut_changes_no_bit() -> None:
    case = heads_case([(170, 90)], dtype=torch.float16)
    expected, _, whole = attend(case, backend_of(case))
    actual, _, plan = attend(case, backend_of(case, max_bytes=ONE_BLOCK))
    assert (len(whole.unfolded.slices), len(plan.unfolded.slices)) == (1, 3)
    assert torch.equal(actual, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, FLOAT8),
        (torch.bfloat16, FLOAT8),
    ],
    ids=str,
)
def test_other_types(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert_unfolded(heads_case(MIXES["decodes, short and long ones"], dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.one_in(2)
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is of a kind of its own")
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_with_the_sizes_for_other_gpus(capability: tuple[int, int]) -> None:
    case = heads_case([(9, 1), (100, 150)], dtype=torch.float16)
    assert_unfolded(case, kind=GPU_KINDS[capability], max_bytes=ONE_BLOCK)


def test_steps_without_long_ones_are_absorbed() -> None:
    case = heads_case([(9, 1), (31, 1), (0, 15), (80, 3)])
    out, kv, plan = attend(case, backend_of(case))
    assert isinstance(plan, TritonPlan)
    torch.testing.assert_close(out.double(), case.expected_of(kv), rtol=1e-5, atol=1e-5)


def test_batch_invariant_nothing_is_unfolded() -> None:
    case = heads_case([(9, 1), (0, 40)])
    assert isinstance(backend_of(case, batch_invariant=True).prepare(case.layout), TritonPlan)


@pytest.mark.parametrize("sizes", [{"query_dim": 129}, {"value_dim": 129}])
def test_heads_that_a_tile_has_no_room_for_are_absorbed(sizes: dict[str, int]) -> None:
    case = heads_case([(0, 40)], **sizes)
    assert isinstance(backend_of(case).prepare(case.layout), TritonPlan)
