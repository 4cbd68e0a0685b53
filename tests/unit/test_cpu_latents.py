"""Attention to latents by the CPU kernels, compared with float64, over odd shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import LENS
from byte_inputs import rounds_inputs
from latent_cases import HeadsCase

from engine.attention import StepLayout
from engine.attention.cpu_latents import CpuLatentAttention
from engine.kernels.cpu_products import PanelHeadProducts
from engine.layers import HeadProducts, LatentProjection
from engine.quantization import as_int8
from engine.weight import dequantized

BFLOAT16 = torch.bfloat16
LITE = {"num_heads": 16, "latent_dim": 512, "rotated_dim": 64, "query_dim": 128, "value_dim": 128}
"""DeepSeek-V2-Lite's."""
SMALL = {"num_heads": 3, "latent_dim": 48, "rotated_dim": 16, "query_dim": 6, "value_dim": 10}

pytestmark = pytest.mark.usefixtures("cpu_threads")


def to_paired(kv: torch.Tensor) -> torch.Tensor:
    """Convert a layer [block, 1, 1, slot, R] from LATENT_KV_ORDER to PAIRED_LATENT_KV_ORDER."""
    B, _, _, S, R = kv.shape
    return kv.view(B, S, R // 2, 2).transpose(1, 2).reshape(kv.shape).contiguous()


def from_paired(kv: torch.Tensor) -> torch.Tensor:
    B, _, _, S, R = kv.shape
    return kv.view(B, R // 2, S, 2).transpose(1, 2).reshape(kv.shape).contiguous()


def in_panels(heads: LatentProjection, make: Any = PanelHeadProducts) -> LatentProjection:
    up_key, up_value = (make(each._weight_NKO) for each in (heads.up_key, heads.up_value))
    return LatentProjection(heads.norm, up_key, up_value)


def attend(case: HeadsCase, kv: torch.Tensor, heads: LatentProjection | None = None) -> torch.Tensor:
    """`kv`: in the kernels' order; written."""
    backend = CpuLatentAttention()
    plan, heads = backend.prepare(case.layout), heads or in_panels(case.heads)
    return backend.attend(case.q_TX, case.new_latents, kv, plan, heads, case.cos_sin, case.scale)


def assert_close(case: HeadsCase) -> None:
    kv = to_paired(case.kv)
    actual, expected = attend(case, kv), case.expected_of(from_paired(kv))
    # Absorbed queries, weights and sums of latents are rounded to bfloat16.
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)
    assert (actual.double() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("sizes", [LITE, SMALL], ids=["lite", "small"])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_latents_against_float64(lens: list[tuple[int, int]], sizes: dict[str, int]) -> None:
    assert_close(HeadsCase(lens, dtype=BFLOAT16, **sizes))


@pytest.mark.parametrize("num_heads", [1, 2, 5, 20, 64, 96, 97, 128])
def test_latents_of_any_number_of_heads(num_heads: int) -> None:
    """More than an item takes are divided among items, if need be one by one."""
    assert_close(HeadsCase(LENS["mixed"], dtype=BFLOAT16, **SMALL | {"num_heads": num_heads}))


@pytest.mark.parametrize(
    "sizes",
    [
        {"latent_dim": 16},
        {"num_heads": 1, "latent_dim": 64, "value_dim": 32},
        {"latent_dim": 80, "rotated_dim": 32},
        {"query_dim": 34, "value_dim": 33},
        {"value_dim": 1},
    ],
    ids=str,
)
def test_latents_of_all_sizes(sizes: dict[str, int]) -> None:
    assert_close(HeadsCase(LENS["mixed"], dtype=BFLOAT16, **SMALL | sizes))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_latents_of_larger_blocks(block_size: int) -> None:
    assert_close(HeadsCase([(9, 1), (200, 1), (0, 40), (30, 70)], dtype=BFLOAT16, block_size=block_size, **SMALL))


def test_latents_of_long_contexts_that_are_split_and_put_together() -> None:
    assert_close(HeadsCase([(900, 1), (60, 1), (1020, 1)], dtype=BFLOAT16, **SMALL))


def test_latents_in_the_pool() -> None:
    """Its slots: the latents' norm and the rotated keys, as plain torch computes them."""
    case = HeadsCase(LENS["mixed"], dtype=BFLOAT16, **SMALL)
    case.kv = case.kv.nan_to_num(7.0)
    kv = to_paired(case.kv)
    attend(case, kv)
    written = from_paired(kv).flatten(0, 3)
    slots = torch.from_numpy(case.layout.slot_mapping)
    latents = case.heads.latents(case.new_latents, case.cos_sin)
    assert torch.equal(written[slots, :48], latents[:, :48])
    torch.testing.assert_close(written[slots, 48:], latents[:, 48:], rtol=1e-2, atol=1e-2)
    written[slots] = case.kv.flatten(0, 3)[slots]
    assert torch.equal(written, case.kv.flatten(0, 3)), "nothing else"


@pytest.mark.parametrize("sizes", [LITE, SMALL | {"num_heads": 128}], ids=["lite", "128 heads"])
def test_latents_row_does_not_depend_on_what_is_computed_with_it(sizes: dict[str, int]) -> None:
    """A token has the same bits whether it decodes or belongs to a prompt, alone and in any batch or chunk."""
    whole = HeadsCase([(0, 1100)], dtype=BFLOAT16, **sizes)
    kv, heads = to_paired(whole.kv), in_panels(whole.heads)
    expected, table, backend = attend(whole, kv, heads), whole.layout.block_tables[0], CpuLatentAttention()
    for parts in (
        [(0, 1)],
        [(511, 1)],
        [(512, 1)],
        [(1099, 1)],
        [(500, 77)],
        [(1023, 40)],
        [(700, 1), (63, 1), (3, 90)],
    ):
        ends = np.array([before + new for before, new in parts])
        tokens = np.concatenate([np.arange(before, before + new) for before, new in parts])
        layout = StepLayout(
            query_lens=np.array([new for _, new in parts]),
            context_lens=ends,
            block_tables=np.stack([table] * len(parts)),
            slot_mapping=whole.layout.slot_mapping[tokens],
            num_decodes=sum(new == 1 for _, new in parts),
        )
        cos_sin = whole.cos_sin[0][tokens], whole.cos_sin[1][tokens]
        rows = backend.attend(
            whole.q_TX[tokens],
            whole.new_latents[tokens],
            kv.clone(),
            backend.prepare(layout),
            heads,
            cos_sin,
            whole.scale,
        )
        assert torch.equal(rows, expected[tokens]), parts


def test_latents_stay_finite_with_scores_of_any_size() -> None:
    case = HeadsCase([(0, 90), (600, 1)], dtype=BFLOAT16, **SMALL)
    case.q_TX.mul_(1e4)
    case.kv.mul_(1e4)
    case.heads.norm.weight.mul_(1e4)
    assert attend(case, to_paired(case.kv)).isfinite().all()


def test_latents_in_the_middle_of_a_wider_product() -> None:
    """They come from one product, beside the queries' latents."""
    case = HeadsCase(LENS["mixed"], dtype=BFLOAT16, **SMALL)
    expected = attend(case, to_paired(case.kv))
    beside = torch.randn(len(case.q_TX), 20).bfloat16()
    case.new_latents = torch.cat((beside, case.new_latents), dim=1)[:, 20:]
    assert not case.new_latents.is_contiguous()
    assert torch.equal(attend(case, to_paired(case.kv)), expected)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(6, 48), (64, 33), (128, 512), (512, 1)])
def test_head_product_against_plain_torch(num_tokens: int, num_inputs: int, num_outputs: int) -> None:
    weight = torch.randn(3, num_inputs, num_outputs).bfloat16()
    x = torch.randn(num_tokens, 3, num_inputs + 2).bfloat16()[:, :, :num_inputs]
    actual, expected = (torch.full((num_tokens, 3, num_outputs + 5), 7.0).bfloat16() for _ in range(2))
    PanelHeadProducts(weight)(x, actual[:, :, :num_outputs])
    HeadProducts(weight.float())(x.float(), plain := torch.empty(num_tokens, 3, num_outputs))
    expected[:, :, :num_outputs] = plain
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "sizes", [LITE, SMALL | {"value_dim": 33}, SMALL | {"num_heads": 1, "latent_dim": 64, "value_dim": 32}], ids=str
)
def test_latents_with_each_heads_products_in_8_bits(sizes: dict[str, int]) -> None:
    case = HeadsCase(LENS["mixed"], dtype=BFLOAT16, **sizes)
    quantised = attend(case, to_paired(case.kv), in_panels(case.heads, partial(PanelHeadProducts, quantise=as_int8)))

    def rounded(products: HeadProducts) -> HeadProducts:
        weight = products._weight_NKO
        by_outputs = weight.mT.reshape(-1, weight.shape[1])
        return HeadProducts(dequantized(as_int8(by_outputs)).view(weight.mT.shape).mT)

    heads = LatentProjection(case.heads.norm, rounded(case.heads.up_key), rounded(case.heads.up_value))
    near = attend(case, to_paired(case.kv), in_panels(heads))
    plain = attend(case, to_paired(case.kv))
    assert (quantised - near).norm() < (1.5e-2 if rounds_inputs() else 5e-3) * plain.norm()
    assert 3e-3 * plain.norm() < (quantised - plain).norm() < 2e-2 * plain.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 2}, "a head's weight must have 17 inputs"),
        ({"kv": torch.zeros(4, 1, 1, 16, 80, dtype=BFLOAT16)}, "latents and the pool must have C \\+ P numbers"),
        ({"up_key": torch.zeros(4, 8, 32, 2, dtype=BFLOAT16)}, "a head's weight must have 6 inputs"),
        ({"up_key": torch.zeros(4, 3, 32, 2, dtype=BFLOAT16)}, "each head must have its own panels, of 48 outputs"),
    ],
    ids=["heads", "pool", "inputs", "panels"],
)
def test_latents_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    case = HeadsCase([(0, 5)], dtype=BFLOAT16, **SMALL)
    heads, plan = in_panels(case.heads), CpuLatentAttention().prepare(case.layout)
    cos, sin = case.cos_sin
    given = {
        "q": case.q_TX, "latent": case.new_latents, "cos": cos, "sin": sin, "norm": heads.norm.weight, "eps": 1e-6,
        "up_key": heads.up_key.panels, "up_key_scale": None, "num_heads": 3, "kv": to_paired(case.kv),
        "slot_mapping": plan.slot_mapping,
    }  # fmt: skip
    torch.ops.tandem_cpu.absorb(*given.values())
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tandem_cpu.absorb(*(given | changes).values())


def test_latents_alone_are_written_as_with_queries() -> None:
    case = HeadsCase([(21, 1), (0, 5), (3, 30)], dtype=BFLOAT16, **SMALL)
    heads, backend = in_panels(case.heads), CpuLatentAttention()
    plan, pool = backend.prepare(case.layout), to_paired(case.kv)
    attended, alone = pool.clone(), pool.clone()
    backend.attend(case.q_TX, case.new_latents, attended, plan, heads, case.cos_sin, 1.0)
    backend.write(case.new_latents, alone, plan, heads, case.cos_sin)
    assert torch.equal(alone.view(torch.int16), attended.view(torch.int16))
    assert not torch.equal(alone.view(torch.int16), pool.view(torch.int16))
    with pytest.raises(RuntimeError, match="one row per token"):
        backend.write(case.new_latents[:-1], alone, plan, heads, case.cos_sin)
