"""Paged attention to latents in plain torch, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import LENS
from latent_cases import MIXES, HeadsCase, LatentCase

from engine.attention import torch_unfolded
from engine.attention.latent_forms import Unfolding
from engine.attention.torch_latents import MixedTorchPlan, TorchLatentAttention

FLOAT8 = torch.float8_e4m3fn


def attend(case: LatentCase) -> torch.Tensor:
    backend = TorchLatentAttention(
        kv_lora_rank=case.latent_dim, latent_dim=case.q.shape[2], block_size=case.block_size, device="cpu"
    )
    plan = backend.prepare(case.layout)
    backend.store(case.new_latents, case.kv, plan)
    return backend.attend_absorbed(case.q, case.kv, plan, case.scale)


@pytest.mark.parametrize(("latent_dim", "rotated_dim", "block_size"), [(24, 8, 4), (16, 2, 16)])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_all_kinds_of_steps(lens: list[tuple[int, int]], latent_dim: int, rotated_dim: int, block_size: int) -> None:
    case = LatentCase(lens, num_heads=5, latent_dim=latent_dim, rotated_dim=rotated_dim, block_size=block_size)
    torch.testing.assert_close(attend(case).double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_pool_of_8_bit_floats(dtype: torch.dtype, tolerance: float) -> None:
    case = LatentCase(LENS["mixed"], num_heads=4, latent_dim=24, rotated_dim=8, dtype=dtype, kv_dtype=FLOAT8)
    torch.testing.assert_close(attend(case).double(), case.expected(), rtol=tolerance, atol=tolerance)


# -- unfolded -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_unfolded(case: HeadsCase, tolerance: float = 1e-5, max_bytes: int = 1 << 28) -> None:
    backend = TorchLatentAttention(
        kv_lora_rank=case.latent_dim, latent_dim=case.q.shape[2], block_size=case.block_size, device="cpu",
        unfolding=Unfolding(16, case.query_dim, case.value_dim, max_bytes),
    )  # fmt: skip
    plan, kv = backend.prepare(case.layout), case.kv.clone()
    assert isinstance(plan, MixedTorchPlan)
    actual = backend.attend(case.q_TX, case.new_latents, kv, plan, case.heads, case.cos_sin, case.scale)
    torch.testing.assert_close(actual.double(), case.expected_of(kv), rtol=tolerance, atol=tolerance)
    alone = case.kv.clone()
    backend.write(case.new_latents, alone, plan, case.heads, case.cos_sin)
    torch.testing.assert_close(alone, kv, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("lens", MIXES.values(), ids=MIXES.keys())
def test_long_ones_are_unfolded(lens: list[tuple[int, int]], block_size: int) -> None:
    assert_unfolded(HeadsCase(lens, block_size=block_size))


@pytest.mark.usefixtures("_fresh_memory_is_nan")
@pytest.mark.parametrize(("query_dim", "value_dim"), [(16, 24), (7, 15), (5, 40)])
def test_keys_and_values_of_other_sizes(query_dim: int, value_dim: int) -> None:
    """With as many numbers in both, fewer, and more."""
    assert_unfolded(HeadsCase(MIXES["decodes, short and long ones"], query_dim=query_dim, value_dim=value_dim))


@pytest.mark.parametrize("num_heads_at_once", [1, 2, 3])
def test_some_heads_at_a_time(num_heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the limit allows for the keys and values of a context of 176 slots, with 20 numbers each."""
    case, counts = HeadsCase([(131, 37)], num_heads=5), []
    attend = torch_unfolded.F.scaled_dot_product_attention

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts.append(q.shape[1])
        return attend(q, *args, **kwargs)

    monkeypatch.setattr(torch_unfolded.F, "scaled_dot_product_attention", counted)
    assert_unfolded(case, max_bytes=num_heads_at_once * 176 * 2 * 20 * 4)
    assert max(counts) == num_heads_at_once
    assert sum(counts) == 5


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float16, 4e-3),
        (torch.float32, FLOAT8, 1e-5),
        (torch.bfloat16, FLOAT8, 2e-2),
    ],
    ids=str,
)
def test_unfolded_in_other_types(dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float) -> None:
    case = HeadsCase(MIXES["decodes, short and long ones"], dtype=dtype, kv_dtype=kv_dtype)
    assert_unfolded(case, tolerance)
