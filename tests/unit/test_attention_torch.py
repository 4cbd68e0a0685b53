"""The plain-torch backend compared with attention written out in float64, one query at a time, over odd shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attention_cases import LENS, NUM_BLOCKS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_gpu import pretend_gpu

from engine.attention import torch_backend
from engine.attention.paged_groups import MAX_PADDING, split_by_padding
from engine.attention.torch_backend import TorchAttention, weighted_values_head_by_head
from engine.attention.torch_latents import TorchLatentAttention
from engine.kernels.gpu.gpu_kind import GpuKind
from engine.models.scores import Scores


def run(
    case: Case, window: int, soft_cap: float = 0.0, scale: float | None = None, sinks_N: torch.Tensor | None = None
) -> torch.Tensor:
    backend = TorchAttention(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        device="cpu",
    )
    plan = backend.prepare(case.layout)
    backend.write_kv(case.kv, case.k, case.v, plan)
    return backend.attend(case.q, case.kv, plan, case.scores(window, soft_cap, scale), sinks_N)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 1000])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(6, 2, 8, 4), (3, 3, 16, 16)])
def test_against_float64(
    lens: list[tuple[int, int]], window: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = Case(lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("soft_cap", "scale"), [(20.0, None), (0.0, 0.5), (20.0, 0.5)])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_a_soft_cap_and_another_scale(
    lens: list[tuple[int, int]], window: int, soft_cap: float, scale: float | None
) -> None:
    case = Case(lens, num_heads=6, num_kv_heads=2, head_dim=8, block_size=4)
    case.q *= 15  # scores of several dozens, which the cap bends
    expected = case.expected(window, soft_cap, scale)
    torch.testing.assert_close(run(case, window, soft_cap, scale).double(), expected, rtol=1e-4, atol=1e-4)
    if len(case.q) > 1:
        assert not torch.allclose(run(case, window).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_sinks(lens: list[tuple[int, int]], window: int, soft_cap: float) -> None:
    case = Case(lens, num_heads=6, num_kv_heads=2, head_dim=8, block_size=4)
    expected = case.expected(window, soft_cap, sinks_N=case.sinks())
    actual = run(case, window, soft_cap, sinks_N=case.sinks())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(
    decodes=st.lists(st.integers(0, 30), max_size=4),
    prefills=st.lists(st.tuples(st.integers(0, 20), st.integers(2, 20)), max_size=4),
    num_kv_heads=st.sampled_from([1, 2]),
    num_groups=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 8]),
    window=st.sampled_from([0, 3, 9]),
)
def test_against_float64_any_shape(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    num_kv_heads: int,
    num_groups: int,
    block_size: int,
    window: int,
) -> None:
    lens = [(before, 1) for before in decodes] + prefills
    if not lens or sum(-(-(b + n) // block_size) for b, n in lens) > NUM_BLOCKS:
        return
    case = Case(lens, num_heads=num_kv_heads * num_groups, num_kv_heads=num_kv_heads, head_dim=4, block_size=block_size)
    torch.testing.assert_close(run(case, window).double(), case.expected(window), rtol=1e-5, atol=1e-5)


def test_bfloat16() -> None:
    case = Case(LENS["mixed"], num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.bfloat16)
    torch.testing.assert_close(run(case, 0).double(), case.expected(0), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_a_pool_of_8_bit_floats_against_float64(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """The keys and values are 8-bit floats themselves, so only the arithmetic between them rounds."""
    case = Case(lens, num_heads=6, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    out, tolerance = run(case, 7), 1e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.expected(7), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_writes_only_its_slots(kv_dtype: torch.dtype) -> None:
    case = Case(LENS["mixed"], num_heads=2, num_kv_heads=1, head_dim=4, block_size=4, kv_dtype=kv_dtype)
    before = case.kv.clone().float()
    run(case, 0)
    case.kv = case.kv.float()
    changed = (case.kv != before) & ~(case.kv.isnan() & before.isnan())
    slots = changed.any(dim=4).any(dim=2).any(dim=1).nonzero()  # [n, (block, slot)]
    assert sorted((slots[:, 0] * 4 + slots[:, 1]).tolist()) == sorted(case.layout.slot_mapping.tolist())


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 80)), min_size=1, max_size=40))
def test_padding_stays_bounded(shapes: list[tuple[int, int]]) -> None:
    query_lens, num_blocks = (np.array(column) for column in zip(*shapes, strict=True))
    groups = split_by_padding(np.arange(len(shapes)), query_lens, num_blocks)
    assert sorted(i for group in groups for i in group) == list(range(len(shapes)))
    for group in groups:
        padded = len(group) * query_lens[group].max() * num_blocks[group].max()
        assert padded <= MAX_PADDING * (query_lens[group] * num_blocks[group]).sum()


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("is_masked", [True, False])
def test_heads_that_share_keys_without_torch_knowing(num_seqs: int, is_masked: bool) -> None:
    """A GPU computes it this way."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(num_seqs, heads, length, 8, dtype=torch.float64, generator=generator)
        for heads, length in ((6, 5), (2, 12 if is_masked else 5), (2, 12 if is_masked else 5))
    )
    mask = torch.randn(num_seqs, 1, 5, 12, dtype=torch.float64, generator=generator) if is_masked else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not is_masked, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(weighted_values_head_by_head(q, k, v, mask, 0.3), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and none to be pretended")
@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 0), torch.float16, 2), ((8, 0), torch.float32, 6), ((7, 5), torch.float16, 6), ((7, 5), torch.float32, 6),
    ],
)  # fmt: skip
def test_key_heads_of_prompts_where_torch_has_no_flash_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, expected: int
) -> None:
    """Before 8.0, only the memory-efficient kernel is left, which takes as many key heads as query heads."""
    nums_keys: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> torch.Tensor:
        nums_keys.append(k.shape[0] * k.shape[1])
        return attend(q, k, v, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    with pretend_gpu(kind=GpuKind(capability, 64 << 10)):
        q, k, v = (torch.ones(1, heads, 5, 8, dtype=dtype, device="cuda") for heads in (6, 2, 2))
        torch_backend._weighted_values(q, k, v, None, Scores.of(8), None)
    assert nums_keys == [expected]


@pytest.fixture
def cudnn_is_as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_latents", [False, True])
@pytest.mark.usefixtures("cudnn_is_as_before")
def test_cudnn_which_plans_for_each_shape_is_not_asked_on_a_gpu(device: str, has_latents: bool) -> None:
    if has_latents:
        TorchLatentAttention(kv_lora_rank=8, latent_dim=12, block_size=4, device=device)
    else:
        TorchAttention(num_heads=2, num_kv_heads=1, head_dim=4, block_size=4, device=device)
    assert torch.backends.cuda.cudnn_sdp_enabled() == (device == "cpu")
