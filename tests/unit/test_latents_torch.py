"""Plain torch's paged attention to latents, against float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import LENS
from latent_cases import LatentCase

from engine.attention.torch_latents import TorchLatentAttention

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
