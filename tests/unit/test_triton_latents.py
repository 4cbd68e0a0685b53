"""The Triton kernels of attention to latents, compared with float64. docs/gpu.md says what has run where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_steps
import numpy as np
import pytest
import torch
from attention_cases import LENS
from deepseek_cases import UNFOLDS_EARLY, V3
from engine_steps import arguments, logits_of_steps
from gpu_kinds import GPU_KINDS
from latent_cases import LatentCase
from model_shapes import shape_of
from recorder import RelaunchingRecorder
from triton_device import DEVICE  # must come before the kernels

from engine.attention import Needs, choose_attention_backend, triton_unfolded, why_no_graphs
from engine.attention.torch_latents import TorchLatentAttention
from engine.attention.triton_latents import TritonLatentAttention
from engine.kernels.gpu.decode import partial_size
from engine.kernels.gpu.gpu_kind import H200, GpuKind, gpu_kind
from engine.kernels.gpu.latents import LatentTileConfig, decode_latents
from engine.layers import HeadProducts, LatentProjection, RMSNorm, RotaryEmbedding
from engine.model_loader.weights import DummyWeights
from engine.models import expert_products, load_decoder_config
from engine.models.experts import ExpertsFeedForward
from engine.models.experts_config import GROUPED_MAJORS
from engine.models.parts import PLAIN_PARTS, PartsFactory
from engine.models.rope_config import RopeConfig
from engine.running import model_runner

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL_PIECES = LatentTileConfig(block_m=16, block_n=16, min_piece=16, num_warps=4, num_stages=2)
FLOAT8 = torch.float8_e4m3fn


def backend_of(
    case: LatentCase, kind: GpuKind | None = None, *, batch_invariant: bool = False
) -> TritonLatentAttention:
    return TritonLatentAttention(
        num_heads=case.num_heads, kv_lora_rank=case.latent_dim, block_size=case.block_size,
        dtype=str(case.q.dtype).removeprefix("torch."), kv_dtype=str(case.kv.dtype).removeprefix("torch."),
        device=DEVICE, kind=kind or gpu_kind(DEVICE), batch_invariant=batch_invariant,
    )  # fmt: skip


def attend(case: LatentCase, kind: GpuKind | None = None, *, batch_invariant: bool = False) -> torch.Tensor:
    backend = backend_of(case, kind, batch_invariant=batch_invariant)
    plan = backend.prepare(case.layout)
    return backend.attend_absorbed(case.q.to(DEVICE), case.written_pool().to(DEVICE), plan, case.scale).cpu()


def assert_close(case: LatentCase) -> None:
    tolerance = TOLERANCES[case.q.dtype]
    torch.testing.assert_close(attend(case).double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.one_in(2)
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is of a kind of its own")
@pytest.mark.parametrize("kv_dtype", [torch.float16, FLOAT8])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_with_the_sizes_for_other_gpus(capability: tuple[int, int], kv_dtype: torch.dtype) -> None:
    case = LatentCase(
        [(260, 1), (15, 1), (0, 5)], num_heads=70, latent_dim=32, rotated_dim=8, dtype=torch.float16,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    actual = attend(case, GPU_KINDS[capability]).double()
    torch.testing.assert_close(actual, case.expected(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_all_kinds_of_steps(lens: list[tuple[int, int]]) -> None:
    assert_close(LatentCase(lens, num_heads=6, latent_dim=32, rotated_dim=8))


@pytest.mark.parametrize(
    ("num_heads", "latent_dim", "rotated_dim"), [(1, 24, 8), (5, 8, 2), (16, 96, 16), (33, 16, 8), (16, 512, 64)]
)
def test_all_head_counts_and_sizes(num_heads: int, latent_dim: int, rotated_dim: int) -> None:
    lens = [(20, 1), (7, 6)]
    assert_close(LatentCase(lens, num_heads=num_heads, latent_dim=latent_dim, rotated_dim=rotated_dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads", [3, 20, 70])
def test_16_bits(dtype: torch.dtype, num_heads: int) -> None:
    """Tiles of many tokens, of three, and of a part of one token's heads."""
    lens = [(37, 1), (0, 1), (20, 5), (0, 3)]
    assert_close(LatentCase(lens, num_heads=num_heads, latent_dim=64, rotated_dim=16, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_of_8_bit_floats(dtype: torch.dtype) -> None:
    lens = [(37, 1), (0, 1), (20, 9)]
    assert_close(LatentCase(lens, num_heads=20, latent_dim=32, rotated_dim=8, dtype=dtype, kv_dtype=FLOAT8))


@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_all_block_sizes(block_size: int) -> None:
    assert_close(LatentCase([(37, 1), (20, 9)], num_heads=4, latent_dim=16, rotated_dim=8, block_size=block_size))


# -- before attention -----------------------------------------------------------------------------------------------


def project(case: LatentCase, *, uses_triton: bool, largest: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and the pool as one kind of backend computes them. The latents are part of the rows of a wider
    product."""
    C, P, N, dtype = case.latent_dim, case.q.shape[2] - case.latent_dim, case.num_heads, case.q.dtype
    generator = torch.Generator().manual_seed(3)
    q, wide, weight, up_key = (
        torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
        for shape in ((len(case.q), N * (12 + P)), (len(case.q), 7 + C + P), (C,), (N, 12, C))
    )
    rotary = RotaryEmbedding(RopeConfig(theta=100.0, rope_type="default"), P, 64, dtype, DEVICE)
    heads = LatentProjection(RMSNorm(weight * largest, 1e-3), HeadProducts(up_key), HeadProducts(up_key.mT))
    plain = TorchLatentAttention(kv_lora_rank=C, latent_dim=C + P, block_size=case.block_size, device=DEVICE)
    backend: Any = backend_of(case) if uses_triton else plain
    kv, alone = (case.kv.clone().to(DEVICE) for _ in range(2))
    cos_sin = rotary.select(torch.arange(len(q), device=DEVICE) * 5)
    plan = backend.prepare(case.layout)
    queries = backend.project(q, wide[:, 7:], kv, plan, heads, cos_sin)
    backend.write(wide[:, 7:], alone, plan, heads, cos_sin)
    assert torch.equal(alone.view(torch.uint8), kv.view(torch.uint8)), "without queries, the pool is the same"
    return queries.cpu(), kv.cpu()


@pytest.mark.parametrize(("num_heads", "latent_dim", "rotated_dim"), [(1, 8, 2), (5, 24, 6), (130, 32, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection(num_heads: int, latent_dim: int, rotated_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_heads": num_heads, "latent_dim": latent_dim, "rotated_dim": rotated_dim, "dtype": dtype}
    case = LatentCase([(5, 1), (0, 3)], **shape)
    (queries, kv), (plain_queries, plain_kv) = (project(case, uses_triton=each) for each in (True, False))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(queries, plain_queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kv, plain_kv, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_what_is_too_large_for_8_bits_is_saturated() -> None:
    case = LatentCase([(5, 1), (0, 3)], num_heads=2, latent_dim=16, rotated_dim=8, kv_dtype=FLOAT8)
    (_, kv), (_, plain_kv) = (project(case, uses_triton=each, largest=1e4) for each in (True, False))
    ours, plain = kv.float(), plain_kv.float()
    assert (ours[ours.isfinite()].abs() == 448).sum() > 20
    # Numbers near a midpoint may be rounded to either side: 1/8 apart.
    torch.testing.assert_close(ours, plain, rtol=0.13, atol=2e-3, equal_nan=True)


def test_tokens_without_a_slot_are_not_written() -> None:
    case = LatentCase([(5, 1), (0, 3)], num_heads=2, latent_dim=16, rotated_dim=8)
    case.layout.slot_mapping[[1, 2]] = -1
    _, kv = project(case, uses_triton=True)
    same = (kv == case.kv) | (kv.isnan() & case.kv.isnan())
    changed = (~same).flatten(0, 3).any(dim=1).nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(case.layout.slot_mapping[[0, 3]].tolist())


# -- split contexts -------------------------------------------------------------------------------------------------


def decode(case: LatentCase, max_context_len: int, config: LatentTileConfig = SMALL_PIECES) -> torch.Tensor:
    plan = backend_of(case).prepare(case.layout)
    out = torch.full((len(case.q), case.num_heads, case.latent_dim), float("nan"), dtype=case.q.dtype, device=DEVICE)
    size = partial_size(len(case.q), case.num_heads, case.latent_dim, max_context_len, config)
    decode_latents(
        case.q.to(DEVICE), case.written_pool().to(DEVICE), plan.block_tables, plan.context_lens, out,
        torch.full((size,), float("nan"), device=DEVICE), scale=case.scale, max_context_len=max_context_len,
        config=config,
    )  # fmt: skip
    return out.cpu()


def test_split_contexts_are_put_together() -> None:
    case = LatentCase([(50, 1), (15, 1), (16, 1), (0, 1), (599, 1)], num_heads=17, latent_dim=24, rotated_dim=8)
    torch.testing.assert_close(decode(case, 600).double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_a_sequence_gets_the_same_bits_in_any_batch_and_from_any_graph() -> None:
    alone = LatentCase([(100, 1)], num_heads=3, latent_dim=32, rotated_dim=8, dtype=torch.bfloat16)
    among = LatentCase(
        [(300, 1), (5, 1), (100, 1)], num_heads=3, latent_dim=32, rotated_dim=8, dtype=torch.bfloat16, last=alone
    )
    expected = decode(alone, 101)
    for max_context_len in (301, 400, 100_000):
        assert torch.equal(decode(among, max_context_len)[-1:], expected)


@pytest.mark.parametrize("num_heads", [5, pytest.param(70, marks=pytest.mark.slow)])
def test_batch_invariant_a_token_gets_the_same_bits_in_a_prompt_and_while_its_sequence_decodes(num_heads: int) -> None:
    shape = {"num_heads": num_heads, "latent_dim": 32, "rotated_dim": 8}
    whole = LatentCase([(0, 300)], **shape)
    chunk = LatentCase([(290, 10)], **shape, last=whole)
    expected = attend(chunk, batch_invariant=True)
    torch.testing.assert_close(expected.double(), chunk.expected(), rtol=1e-5, atol=1e-5)
    for before, new in ((290, 1), (299, 1), (295, 3)):
        step = LatentCase([(70, 1), (before, new)], **shape, last=whole)
        actual = attend(step, batch_invariant=True)[1:]
        assert torch.equal(actual, expected[before - 290 : before - 290 + new]), (before, new)


def test_a_token_gets_the_same_bits_however_its_prompt_is_cut() -> None:
    whole = LatentCase([(0, 90)], num_heads=5, latent_dim=32, rotated_dim=8, dtype=torch.bfloat16)
    expected = attend(whole)
    for before, new in ((0, 64), (63, 2), (32, 58), (7, 60)):
        chunk = LatentCase(
            [(5, 3), (before, new)], num_heads=5, latent_dim=32, rotated_dim=8, dtype=torch.bfloat16, last=whole
        )
        assert torch.equal(attend(chunk)[3:], expected[before : before + new]), (before, new)


# -- plans ----------------------------------------------------------------------------------------------------------


def test_a_reserved_plan_serves_any_step_that_fits() -> None:
    """As when a CUDA graph replays it: the same tensors and grid, with other numbers in them."""
    shape = {"num_heads": 6, "latent_dim": 32, "rotated_dim": 8}
    cases = [LatentCase(lens, **shape) for lens in ([(40, 1), (3, 1), (16, 1)], [(299, 1)], [(0, 1), (15, 1)])]
    backend = backend_of(cases[0])
    plan = backend.reserve_decode_plan(3, 320)
    larger = backend.reserve_decode_plan(3, 20_000)  # needs more scratch than the first one has
    assert plan.scratch.data_ptr() != larger.scratch.data_ptr()
    assert backend.reserve_decode_plan(2, 20_000).scratch.data_ptr() == larger.scratch.data_ptr()
    address = plan.buffer.data_ptr()
    for case in cases:
        backend.refill(plan, case.layout)
        q = torch.zeros(3, 6, 40, device=DEVICE)
        q[: len(case.q)] = case.q
        out = backend.attend_absorbed(q, case.written_pool().to(DEVICE), plan, case.scale).cpu()
        torch.testing.assert_close(out[: len(case.q)].double(), case.expected(), rtol=1e-5, atol=1e-5)
        assert (out[len(case.q) :] == 0).all()
    assert plan.buffer.data_ptr() == address


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_other_steps() -> None:
    shape = {"num_heads": 6, "latent_dim": 32, "rotated_dim": 8}
    cases = [LatentCase(lens, **shape) for lens in ([(299, 1), (3, 1), (16, 1)], [(40, 1)], [(0, 1), (275, 1)])]
    backend = backend_of(cases[0])
    plan = backend.reserve_decode_plan(3, 320)
    q, kv = torch.zeros(3, 6, 40, device=DEVICE), torch.zeros_like(cases[0].kv, device=DEVICE)
    backend.attend_absorbed(q, kv, plan, cases[0].scale)  # compiles, which cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend_absorbed(q, kv, plan, cases[0].scale)
    for case in cases:
        backend.refill(plan, case.layout)
        q[: len(case.q)] = case.q.to(DEVICE)
        kv.copy_(case.written_pool())
        graph.replay()
        torch.testing.assert_close(out[: len(case.q)].cpu().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has CUDA graphs")
def test_a_cuda_graph_replays_experts_of_other_tokens() -> None:
    if torch.cuda.get_device_capability()[0] not in GROUPED_MAJORS:
        pytest.skip("torch loops over experts here, and reads their sizes back")
    moe = load_decoder_config(V3).moe
    assert moe is not None
    factory = PartsFactory(DummyWeights(0, "bfloat16", DEVICE), PLAIN_PARTS, 1e-6)
    experts = ExpertsFeedForward(moe, factory, "model.layers.1.mlp", V3["hidden_size"], False)
    steps = torch.randn(3, 5, V3["hidden_size"], device=DEVICE).bfloat16()
    h = steps[0].clone()
    experts(h)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = experts(h)
    for step in steps:
        h.copy_(step)
        graph.replay()
        torch.testing.assert_close(out, experts(step))


# -- the choice -----------------------------------------------------------------------------------------------------


def needs_of(dtype: str = "bfloat16", capability: tuple[int, int] = (9, 0), **change: int) -> Needs:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} | change
    hidden_size = sizes.pop("hidden_size", 2048)
    latents: Any = SimpleNamespace(**sizes)
    experts: Any = SimpleNamespace()
    model = shape_of(num_heads=128, num_kv_heads=1, head_dim=576, hidden_size=hidden_size, mla=latents, moe=experts)
    return Needs(model=model, device="cuda", capability=capability, dtype=dtype, kv_dtype=dtype, block_size=16)


def choose(name: str, **change: int) -> str:
    return choose_attention_backend(name, needs_of(**change))


def test_a_gpu_gets_triton() -> None:
    assert choose("auto") == choose("triton") == "triton"
    assert choose("torch") == "torch"
    with pytest.raises(ValueError, match="flash_attn cannot work here: it is called for keys and values of heads"):
        choose("flash_attn")


def test_experts_can_be_recorded_where_nothing_is_read_back() -> None:
    assert why_no_graphs("triton", needs_of()) == ""
    for other in (needs_of(dtype="float16"), needs_of(capability=(8, 9))):
        assert "in bfloat16 on GPUs of compute capability 9.x and 10.x alone" in why_no_graphs("triton", other)
        assert why_no_graphs("triton", replace(other, quantization="stored")) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"kv_lora_rank": 1024},
            "at most 512 and its qk_rope_head_dim at most 64, are 1024 and 64",
        ),
        ({"qk_rope_head_dim": 128}, "kv_lora_rank must be at most 512 .*, are 512 and 128"),
        ({"hidden_size": 65536}, "hidden size must be at most 32768, is 65536"),
    ],
)
def test_what_it_cannot_do_is_done_by_plain_torch(
    change: dict[str, int], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("auto", **change) == "torch"
    assert "No Triton kernels" in capsys.readouterr().err
    with pytest.raises(ValueError, match=why):
        choose("triton", **change)


def test_tiles_of_prefill_have_whole_tokens_or_a_part_of_one() -> None:
    config = LatentTileConfig.of_prefill(H200, 2, 2)
    assert [config.tokens_per_tile(n) for n in (1, 16, 20, 64, 128)] == [64, 4, 3, 1, 1]
    assert np.prod(LatentTileConfig.of_decode(H200, 128, 2, 2).block_m) == 64


# -- an engine with them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, marks=pytest.mark.slow), UNFOLDS_EARLY], ids=["absorbed", "unfolded"]
)
def test_an_engine_computes_what_it_does_with_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Prompts are launched, and steps that only decode are replayed."""
    (tmp_path / "config.json").write_text(json.dumps(V3 | sizes))
    unfolded: list[int] = []
    launch, compute = triton_unfolded.attend_unfolded, engine_steps.logits_of
    monkeypatch.setattr(
        triton_unfolded, "attend_unfolded", lambda *args, **sizes: unfolded.append(1) or launch(*args, **sizes)
    )
    # The warm-up of a GPU is long, and unfolded in any case: it does not count.
    monkeypatch.setattr(engine_steps, "logits_of", lambda runner: unfolded.clear() or compute(runner))
    # On a GPU, too: experts in float32 cannot be captured there, and would not be.
    monkeypatch.setattr(model_runner, "CudaRecorder", RelaunchingRecorder)
    monkeypatch.setattr(expert_products, "reads_groups_back", lambda *_: False)
    ours = logits_of_steps(arguments(tmp_path, "triton", DEVICE), records=True)
    assert bool(unfolded) == bool(sizes)
    plain = logits_of_steps(arguments(tmp_path, "torch", DEVICE), records=False)
    for triton_logits, torch_logits in zip(ours, plain, strict=True):
        assert torch_logits.std() > 1e-3
        torch.testing.assert_close(triton_logits, torch_logits, rtol=1e-4, atol=1e-5)
