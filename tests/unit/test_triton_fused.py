"""What the Triton kernels do around attention, and a decoder made of them, compared with plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import LENS, Case
from engine_steps import arguments, logits_of_steps
from recorder import RelaunchingRecorder
from triton_device import DEVICE, ROUNDS_TWICE

from engine.kernels.gpu.parts import TritonGatedLinear, TritonRMSNorm
from engine.kernels.gpu.pointwise import multiply_gated
from engine.kernels.gpu.rotate import rotate_and_store
from engine.kv_cache import rounded_for_pool
from engine.layers import ACTIVATIONS, Activation, GatedLinear, HeadProjection, RMSNorm, RotaryEmbedding
from engine.models.rope_config import RopeConfig
from engine.running import model_runner

BFLOAT16 = torch.bfloat16
DTYPES = [torch.float32, torch.float16, BFLOAT16]
UNIT = {torch.float32: 2**-19, torch.float16: 2**-9, BFLOAT16: 2**-6}
"""A few roundings of numbers around 1 to 4. In float32, a GPU's exponentials and roots are off by a few units."""


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=DEVICE, dtype=dtype)


# -- norms and activations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 576), (3, 1000), (2, 8192)])
@pytest.mark.parametrize("has_float_weight", [False, True])
def test_norms_are_those_of_plain_torch(num_tokens: int, size: int, dtype: torch.dtype, has_float_weight: bool) -> None:
    x, delta = (randn(num_tokens, size, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = randn(size, dtype=torch.float32 if has_float_weight else dtype, seed=3)
    plain, fused = RMSNorm(weight, 1e-5), TritonRMSNorm(weight, 1e-5)
    # The sum of squares is added up in another order, so values halfway between two others may round either way.
    unit = {"rtol": UNIT[dtype], "atol": UNIT[dtype]}
    torch.testing.assert_close(fused(x), plain(x), **unit)
    torch.testing.assert_close(fused.add(x.clone(), None)[1], plain(x), **unit)
    expected_sum, expected = plain.add(x.clone(), delta)
    total, normed = fused.add(x.clone(), delta)
    torch.testing.assert_close(total, expected_sum, rtol=0, atol=0)
    torch.testing.assert_close(normed, expected, **unit)


def test_a_norm_of_a_row_does_not_depend_on_its_neighbours() -> None:
    x, norm = randn(40, 576, dtype=BFLOAT16), TritonRMSNorm(randn(576, dtype=BFLOAT16, seed=1), 1e-6)
    assert torch.equal(norm(x)[7:8], norm(x[7:8]))


def test_a_norm_of_columns_of_a_larger_tensor() -> None:
    x, norm = randn(4, 200, dtype=torch.float32), TritonRMSNorm(torch.ones(64, device=DEVICE), 1e-6)
    torch.testing.assert_close(norm(x[:, 50:114]), norm(x[:, 50:114].clone()))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (5, 1000), (2, 1536)])
def test_multiply_gated_against_float64(num_tokens: int, size: int, dtype: torch.dtype, activation: Activation) -> None:
    gate_up = randn(num_tokens, 2 * size, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-90.0, 90.0, 0.0, -0.0])  # exp of the first is infinite in float32
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    found = multiply_gated(gate_up, activation).double()
    torch.testing.assert_close(found, expected, rtol=UNIT[dtype], atol=UNIT[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_are_those_of_plain_torch(activation: Activation) -> None:
    gate, up = (randn(40, 32, dtype=torch.float32, seed=seed) for seed in (1, 2))
    biases = (randn(40, dtype=torch.float32, seed=3), randn(40, dtype=torch.float32, seed=4))
    x = randn(3, 32, dtype=torch.float32)
    for bias in (biases, (None, None)):
        plain, fused = GatedLinear(gate, up, *bias, activation), TritonGatedLinear(gate, up, *bias, activation)
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)


# -- rotation and the write into the pool ---------------------------------------------------------------------------


def heads_of(case: Case, has_norms: bool) -> HeadProjection:
    H, dtype = case.head_dim, case.q.dtype
    norms = [RMSNorm(randn(H, dtype=dtype, seed=seed), 1e-6) if has_norms else None for seed in (1, 2)]
    return HeadProjection(case.num_heads, case.num_kv_heads, H, *norms)


def store(
    case: Case,
    heads: HeadProjection,
    slots: torch.Tensor,
    num_rotated: int | None = None,
    tables: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """q and the pool as the kernel writes them; q, k, v by plain torch."""
    positions = torch.cat([torch.arange(before, before + new) for before, new in case.lens])
    R = case.head_dim if num_rotated is None else num_rotated
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), R, 4096, tables or case.q.dtype, DEVICE)
    cos_sin = rotary.select(positions.to(DEVICE))
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1).to(DEVICE)
    before_and_pool = torch.cat((case.kv[:1], case.kv)).to(DEVICE)
    kv = before_and_pool[1:]
    norms = None if heads.q_norm is None or heads.k_norm is None else (heads.q_norm.weight, heads.k_norm.weight)
    q = rotate_and_store(qkv, cos_sin, norms, 1e-6, kv, slots.to(DEVICE), num_heads=case.num_heads)
    torch.testing.assert_close(before_and_pool[0].cpu(), case.kv[0], rtol=0, atol=0, equal_nan=True)
    return q, kv, *heads(qkv, cos_sin)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize(
    ("head_dim", "num_rotated", "tables"),
    [*((size, size, None) for size in (64, 80, 96, 128, 256, 512)), (80, 20, torch.float32), (128, 0, None)],
)
def test_rotation_and_write(
    head_dim: int, num_rotated: int, tables: torch.dtype | None, dtype: torch.dtype, has_norms: bool
) -> None:
    case = Case([(33, 1), (0, 1), (6, 9)], num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=8, dtype=dtype)
    slots = torch.from_numpy(case.layout.slot_mapping)
    q, kv, expected_q, k, v = store(case, heads_of(case, has_norms), slots, num_rotated, tables)
    expected = case.kv.to(DEVICE)
    expected[slots // 8, 0, :, slots % 8], expected[slots // 8, 1, :, slots % 8] = k, v
    # Plain torch rounds both products and their sum, the kernel only the sum.
    unit = {"rtol": UNIT[dtype] * 2, "atol": UNIT[dtype] * 2}
    torch.testing.assert_close(q, expected_q, **unit)
    torch.testing.assert_close(kv, expected, equal_nan=True, **unit)
    torch.testing.assert_close(kv[slots // 8, 1, :, slots % 8], v, rtol=0, atol=0)


def test_into_a_pool_of_8_bit_floats_what_is_too_large_goes_as_the_largest() -> None:
    """It is rounded as plain torch does, wherever both round the rotation to the same bfloat16."""
    case = Case(
        LENS["mixed"], num_heads=4, num_kv_heads=2, head_dim=64, block_size=8, dtype=BFLOAT16,
        kv_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    case.v[0], case.v[1], case.k[2], case.v[3, 0, :2] = 1e4, -1e4, 3e4, torch.tensor([449.0, float("nan")])
    slots = torch.from_numpy(case.layout.slot_mapping)
    q, kv, expected_q, k, v = store(case, heads_of(case, False), slots)
    assert q.dtype == BFLOAT16
    torch.testing.assert_close(q, expected_q, rtol=2**-5, atol=2**-5)
    written = kv[slots // 8, :, :, slots % 8].float()  # [T, 2, K, H]
    assert torch.equal(written[0, 1], torch.full_like(written[0, 1], 448.0))
    assert torch.equal(written[1, 1], torch.full_like(written[1, 1], -448.0))
    expected = torch.stack([rounded_for_pool(x, torch.float8_e4m3fn).float() for x in (k, v)], dim=1)
    torch.testing.assert_close(written[:, 1], expected[:, 1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(written[:, 0], expected[:, 0], rtol=1 / 8, atol=2**-6)
    assert (written[:, 0] == expected[:, 0]).float().mean() > 0.9


def test_only_its_slots_are_written_and_none_where_there_is_none() -> None:
    case = Case(LENS["mixed"], num_heads=3, num_kv_heads=1, head_dim=64, block_size=4)
    case.kv.nan_to_num_(7.0)
    slots = torch.from_numpy(case.layout.slot_mapping)
    slots[[1, 5]] = -1
    _, kv, *_ = store(case, heads_of(case, False), slots)
    changed = (kv.cpu() != case.kv).any(dim=4).any(dim=2).any(dim=1).nonzero()  # [n, (block, slot)]
    assert sorted((changed[:, 0] * 4 + changed[:, 1]).tolist()) == sorted(slots[slots >= 0].tolist())


# -- a decoder made of them -----------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 1, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("records", [pytest.param(False, marks=pytest.mark.slow), True], ids=["launched", "replayed"])
def test_an_engine_computes_what_it_does_with_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    """With norms of heads, biases, and a window in one layer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if DEVICE == "cpu":
        monkeypatch.setattr(model_runner, "CudaRecorder", RelaunchingRecorder)
    ours = logits_of_steps(arguments(tmp_path, "triton", DEVICE), records=records)
    plain = logits_of_steps(arguments(tmp_path, "torch", DEVICE), records=False)
    for triton_logits, torch_logits in zip(ours, plain, strict=True):
        assert torch_logits.std() > 1e-3
        torch.testing.assert_close(triton_logits, torch_logits, rtol=1e-4, atol=1e-5)


def test_an_engine_in_8_bits_computes_what_it_does_with_plain_torch(tmp_path: Path) -> None:
    """Both weights and pool. Numbers that are rounded to 8 bits on different sides of a midpoint are up to 1/8
    apart."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = {"quantization": "int8", "kv_cache_dtype": "fp8"}
    ours = logits_of_steps(arguments(tmp_path, "triton", DEVICE, **settings), records=False)
    plain = logits_of_steps(arguments(tmp_path, "torch", DEVICE, **settings), records=False)
    exact = logits_of_steps(arguments(tmp_path, "torch", DEVICE), records=False)
    for triton_logits, torch_logits, exact_logits in zip(ours, plain, exact, strict=True):
        assert (triton_logits - torch_logits).norm() < (0.02 if ROUNDS_TWICE else 0.005) * torch_logits.norm()
        assert (exact_logits - torch_logits).norm() > 0.01 * torch_logits.norm()
