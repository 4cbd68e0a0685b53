"""The CPU kernels compared with float64 and with plain torch, over odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from attention_cases import LENS, QKV, Case

from engine.attention.cpu_backend import CpuAttention
from engine.kernels.cpu_products import PanelGatedLinear, PanelLinear, PanelLogits
from engine.layers import ACTIVATIONS, Activation, GatedLinear, HeadProjection, Linear, RMSNorm, RotaryEmbedding
from engine.models.rope_config import RopeConfig

BFLOAT16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("cpu_threads")


def to_paired(kv: torch.Tensor) -> torch.Tensor:
    """Convert a layer [block, 2, K, slot, H] from KV_ORDER to PAIRED_KV_ORDER."""
    B, _, K, S, H = kv.shape
    keys = kv[:, 0].reshape(B, K, S, H // 2, 2).transpose(2, 3).reshape(B, K, S, H)
    values = kv[:, 1].reshape(B, K, S // 2, 2, H).transpose(3, 4).reshape(B, K, S, H)
    return torch.stack((keys, values), dim=1).contiguous()


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int, norms: tuple[RMSNorm, RMSNorm] | None = None):
    q_norm, k_norm = norms or (None, None)
    return HeadProjection(num_heads, num_kv_heads, head_dim, q_norm, k_norm)


def attend(case: Case, window: int, scale: float | None = None, sinks_N: torch.Tensor | None = None) -> torch.Tensor:
    """Attend through the backend, with a rotation that changes nothing, so that it reads what it wrote."""
    backend, kv = CpuAttention(), to_paired(case.kv)
    plan = backend.prepare(case.layout)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1)
    one = torch.ones(len(case.q), 1, case.head_dim, dtype=BFLOAT16)
    heads = heads_of(case.num_heads, case.num_kv_heads, case.head_dim)
    q = backend.project(qkv, kv, plan, heads, (one, one * 0))
    torch.testing.assert_close(q, case.q, rtol=0, atol=0)
    return backend.attend(q, kv, plan, case.scores(window, scale=scale), sinks_N)


def case_of(
    lens: list[tuple[int, int]],
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    last: QKV | None = None,
) -> Case:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return Case(lens, **shape, block_size=16, dtype=BFLOAT16, last=last)


def assert_close(case: Case, window: int = 0) -> None:
    # Weights and sums are rounded to bfloat16, which keeps 8 bits.
    torch.testing.assert_close(attend(case, window).double(), case.expected(window), rtol=1e-2, atol=1e-2)


# -- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 5, 16, 1000])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_attention_against_float64(lens: list[tuple[int, int]], window: int) -> None:
    assert_close(case_of(lens), window)


def test_attention_with_another_scale() -> None:
    case = case_of([(70, 1), (15, 1), (0, 19), (30, 35)])
    actual, expected = attend(case, 0, scale=0.2).double(), case.expected(0, scale=0.2)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [0, 9])
def test_attention_with_sinks(window: int) -> None:
    """Heads one by one and together, with contexts that are split among threads, and with others that are not."""
    for lens in ([(70, 1), (15, 1), (0, 19), (30, 35)], [(1299, 1)], [(9, 1)] * 9):
        case = case_of(lens)
        actual, expected = attend(case, window, sinks_N=case.sinks()), case.expected(window, sinks_N=case.sinks())
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_groups", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_attention_of_all_head_shapes(num_groups: int, head_dim: int) -> None:
    lens = [(70, 1), (15, 1), (16, 1), (0, 1), (0, 19), (30, 35)]
    assert_close(case_of(lens, num_heads=2 * num_groups, num_kv_heads=2, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_attention_of_larger_blocks(block_size: int) -> None:
    case = Case(
        [(100, 1), (33, 1), (0, 50)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=block_size, dtype=BFLOAT16
    )
    assert_close(case)


@pytest.mark.parametrize("window", [0, 700])
def test_a_long_context_is_split_among_threads_and_put_together(window: int) -> None:
    assert_close(case_of([(1499, 1)], num_heads=3, num_kv_heads=1), window)
    assert_close(case_of([(1023, 1), (3, 1), (511, 1)], num_heads=3, num_kv_heads=1), window)


@pytest.mark.parametrize("window", [0, 513, 600, 800])
def test_split_contexts_beside_each_other_are_not_mixed(window: int) -> None:
    """With a window, the pieces of a sequence do not begin at its first key."""
    case = Case([(650, 1), (900, 1), (870, 1)], num_heads=4, num_kv_heads=2, head_dim=64, block_size=32, dtype=BFLOAT16)
    assert_close(case, window)


def test_scores_of_any_size_stay_finite() -> None:
    case = case_of([(40, 1), (0, 20)])
    case.q *= 300
    assert attend(case, 0).isfinite().all()
    assert attend(case, 7).isfinite().all()


def test_a_key_that_is_no_number_is_seen_by_all_rows_behind_it_and_by_no_other() -> None:
    """Also within tiles that the row's own position cuts."""
    case = case_of([(0, 90)])
    case.k[20] = float("nan")
    actual = attend(case, 0)
    assert actual[:20].isfinite().all()
    assert actual[20:].isnan().all()


@pytest.mark.parametrize("window", [0, 100, 600])
def test_a_row_does_not_depend_on_what_is_computed_with_it(window: int) -> None:
    """Exact streams rely on this: a token has the same bits alone and in any batch or chunk."""
    whole = case_of([(0, 1100)])
    sinks_N = whole.sinks() if window == 100 else None
    tokens, expected = (whole.q, whole.k, whole.v), attend(whole, window, sinks_N=sinks_N)
    for before, new in [(0, 1), (63, 1), (64, 1), (511, 1), (512, 1), (1099, 1), (500, 77), (1023, 40), (3, 1000)]:
        for others in ([], [(700, 1), (90, 1)]):
            case = case_of([*others, (before, new)], last=tokens)
            rows = attend(case, window, sinks_N=sinks_N)[len(others) :]
            assert torch.equal(rows, expected[before : before + new]), (before, new, others)


def test_only_its_slots_are_written() -> None:
    case = case_of(LENS["mixed"])
    kv = to_paired(case.kv.nan_to_num(7.0))
    before = kv.clone()
    backend = CpuAttention()
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1)
    one = torch.ones(len(case.q), 1, case.head_dim, dtype=BFLOAT16)
    backend.project(qkv, kv, backend.prepare(case.layout), heads_of(6, 2, 64), (one, one * 0))
    plain = case.kv.nan_to_num(7.0)
    blocks, slots = case.layout.slot_mapping // 16, case.layout.slot_mapping % 16
    plain[blocks, 0, :, slots], plain[blocks, 1, :, slots] = case.k, case.v
    torch.testing.assert_close(kv, to_paired(plain), rtol=0, atol=0)
    assert not torch.equal(kv, before)


def test_rows_are_laid_out_by_the_plan() -> None:
    case = case_of(LENS["mixed"])
    plan = CpuAttention().prepare(case.layout)
    assert plan.block_tables.dtype == torch.int32
    np.testing.assert_array_equal(plan.slot_mapping.numpy(), case.layout.slot_mapping)


# -- what comes before ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "num_rotated", "tables"),
    [*((size, size, BFLOAT16) for size in (64, 80, 96, 128, 256, 512)), (80, 20, torch.float32), (128, 0, BFLOAT16)],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_against_plain_torch(head_dim: int, num_rotated: int, tables: torch.dtype, has_norms: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    norms = tuple(RMSNorm(torch.rand(head_dim, generator=generator).to(BFLOAT16), 1e-6) for _ in range(2))
    heads = heads_of(6, 2, head_dim, norms if has_norms else None)  # type: ignore[arg-type]
    case = Case([(33, 1), (0, 40)], num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=BFLOAT16)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1)
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), num_rotated, 4096, tables, "cpu")
    cos_sin = rotary.select(torch.tensor([33, *range(40)]))
    q, k, v = heads(qkv, cos_sin)
    backend, kv = CpuAttention(), to_paired(case.kv)
    # Plain torch rounds both products and their sum, the kernel only the sum.
    torch.testing.assert_close(
        backend.project(qkv, kv, backend.prepare(case.layout), heads, cos_sin), q, rtol=2e-2, atol=2e-2
    )
    plain = case.kv.clone()
    blocks, slots = case.layout.slot_mapping // 16, case.layout.slot_mapping % 16
    plain[blocks, 0, :, slots], plain[blocks, 1, :, slots] = k, v
    torch.testing.assert_close(kv, to_paired(plain), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("size", [64, 576, 1000])
@pytest.mark.parametrize("size_of_rows", [1.0, 1e-3])
def test_norms_are_those_of_plain_torch_to_the_bit(num_tokens: int, size: int, size_of_rows: float) -> None:
    """Epsilon is a large part of the squares of rows of one about 0.001."""
    generator = torch.Generator().manual_seed(5)
    x, delta, weight = (torch.randn(n, size, generator=generator).to(BFLOAT16) for n in (num_tokens, num_tokens, 1))
    x, delta = x * size_of_rows, delta * size_of_rows
    plain, kernels = RMSNorm(weight[0], 1e-5), torch.ops.tandem_cpu
    expected_sum, expected_of_sum = plain.add(x, delta)
    total = x.clone()
    for found, expected in (
        (kernels.add_rms_norm(x, None, weight[0], 1e-5), plain(x)),
        (kernels.add_rms_norm(total, delta, weight[0], 1e-5), expected_of_sum),
    ):
        # The sum of squares is added up in another order, so values halfway between two others may round either way.
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=0)
        assert (found != expected).float().mean() < 0.02
    torch.testing.assert_close(total, expected_sum, rtol=0, atol=0)


# -- products -------------------------------------------------------------------------------------------------------

NUM_ROWS = [1, 12, 13, 33, 193]


def product_case(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + num_inputs + num_outputs)
    shapes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    x, weight, bias = (torch.randn(*shape, generator=generator).to(BFLOAT16) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (64, 31), (64, 32), (130, 33), (576, 960), (34, 500)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products_against_float64(num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    x, weight, bias = product_case(num_rows, num_inputs, num_outputs)
    y = PanelLinear(weight, bias if has_bias else None)(x)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4 * num_inputs**0.5)


@pytest.mark.parametrize("num_outputs", [1, 31, 500])
@pytest.mark.parametrize("num_rows", [1, 13, 33])
def test_logits_are_not_rounded(num_rows: int, num_outputs: int) -> None:
    x, weight, _ = product_case(num_rows, 576, num_outputs)
    logits = PanelLogits(weight)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (64, 15), (64, 16), (130, 33), (576, 1536)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products_against_float64(
    activation: Activation, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    x, weight, bias = product_case(num_rows, num_inputs, 2 * num_outputs)
    x /= num_inputs**0.5
    (gate, up), (gate_bias, up_bias) = weight.chunk(2), bias.chunk(2) if has_bias else (None, None)
    y = PanelGatedLinear(gate, up, gate_bias, up_bias, activation)(x)
    linear = torch.nn.functional.linear
    gated, upper = (
        linear(x.double(), w.double(), None if b is None else b.double()) for w, b in ((gate, gate_bias), (up, up_bias))
    )
    expected = ACTIVATIONS[activation](gated) * upper
    torch.testing.assert_close(y.double(), expected, rtol=2**-5, atol=1e-4)


@pytest.mark.parametrize("value", [100.0, -100.0, 3e38, -3e38, float("inf"), float("-inf"), 0.0, -0.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_extreme_values(value: float, activation: Activation) -> None:
    x, one = torch.tensor([[value, 1.0]], dtype=BFLOAT16), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=BFLOAT16)
    arguments = (one[:1], one[1:], None, None, activation)
    torch.testing.assert_close(
        PanelGatedLinear(*arguments)(x), GatedLinear(*arguments)(x), rtol=1e-2, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize(
    "linear", [PanelLinear, PanelLogits, lambda weight: PanelGatedLinear(*weight.chunk(2), None, None)]
)
def test_a_product_does_not_depend_on_the_rows_beside_it(linear: Callable[[torch.Tensor], Linear]) -> None:
    x, weight, _ = product_case(400, 576, 96)
    product = linear(weight)
    whole = product(x)
    for num_rows in NUM_ROWS:
        for part, expected in zip(x.split(num_rows), whole.split(num_rows), strict=True):
            assert torch.equal(product(part.contiguous()), expected)


def test_inputs_that_no_cache_holds_are_added_up_as_those_of_one_row() -> None:
    """The matrix unit adds them up in parts: 520 rows of 5,000 inputs are 5 MB."""
    x, weight, bias = product_case(520, 5000, 300)
    product = PanelLinear(weight, bias)
    whole = product(x)
    torch.testing.assert_close(whole.double(), (x.double() @ weight.double().T) + bias, rtol=2**-8, atol=1e-2)
    for row in (0, 31, 32, 259, 260, 300, 519):
        assert torch.equal(product(x[row : row + 1].contiguous()), whole[row : row + 1])


def test_no_rows_are_no_products() -> None:
    weight = torch.ones(40, 64, dtype=BFLOAT16)
    assert PanelLinear(weight)(torch.empty(0, 64, dtype=BFLOAT16)).shape == (0, 40)
    assert PanelLogits(weight)(torch.empty(0, 64, dtype=BFLOAT16)).shape == (0, 40)
