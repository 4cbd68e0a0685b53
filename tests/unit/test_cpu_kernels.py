"""The CPU kernels against float64 and against plain torch, over odd shapes; and what happens where there are none."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import LENS, QKV, Case

from engine.attention import Needs, choice, choose_attention_backend
from engine.attention.cpu_backend import CpuAttention
from engine.kernels import build
from engine.kernels.build import KernelsUnavailable, load_cpu_kernels
from engine.kernels.cpu import PanelGatedLinear, PanelLinear, PanelLogits
from engine.kernels.sampling import choose_largest as kernel_largest
from engine.kernels.sampling import draw as kernel_draw
from engine.layers import GatedLinear, HeadProjection, Linear, RMSNorm, RotaryEmbedding
from engine.models.decoder_config import RopeConfig
from engine.sampling.sampler import HOPELESS, Sampler, choose_largest, draw, filtered_weights
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import INVALID_TOKEN, Sequence

BFLOAT16 = torch.bfloat16


@pytest.fixture(autouse=True, params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    load_cpu_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def to_paired(kv: torch.Tensor) -> torch.Tensor:
    """A layer [block, 2, K, slot, H] from KV_ORDER to PAIRED_KV_ORDER."""
    B, _, K, S, H = kv.shape
    keys = kv[:, 0].reshape(B, K, S, H // 2, 2).transpose(2, 3).reshape(B, K, S, H)
    values = kv[:, 1].reshape(B, K, S // 2, 2, H).transpose(3, 4).reshape(B, K, S, H)
    return torch.stack((keys, values), dim=1).contiguous()


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int, norms: tuple[RMSNorm, RMSNorm] | None = None):
    rotary = RotaryEmbedding(RopeConfig(rope_type="default", theta=10_000.0), head_dim, 4096, BFLOAT16, "cpu")
    q_norm, k_norm = norms or (None, None)
    return HeadProjection(num_heads, num_kv_heads, head_dim, rotary, q_norm, k_norm)


def attend(case: Case, window: int, scale: float | None = None, sinks_N: torch.Tensor | None = None) -> torch.Tensor:
    """Through the backend, with a rotation that does nothing: what is written is what is read."""
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
    """Of heads one by one and together, of contexts that are split among threads, and of ones that are not."""
    for lens in ([(70, 1), (15, 1), (0, 19), (30, 35)], [(1299, 1)], [(9, 1)] * 9):
        case = case_of(lens)
        actual, expected = attend(case, window, sinks_N=case.sinks()), case.expected(window, sinks_N=case.sinks())
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_groups", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
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
    """With a window the pieces of a sequence do not begin at its first key."""
    case = Case([(650, 1), (900, 1), (870, 1)], num_heads=4, num_kv_heads=2, head_dim=64, block_size=32, dtype=BFLOAT16)
    assert_close(case, window)


def test_scores_of_any_size_stay_finite() -> None:
    case = case_of([(40, 1), (0, 20)])
    case.q *= 300
    assert attend(case, 0).isfinite().all()
    assert attend(case, 7).isfinite().all()


def test_a_key_that_is_no_number_is_seen_by_all_rows_behind_it_and_by_no_other() -> None:
    """In tiles that a row's own position cuts, too."""
    case = case_of([(0, 90)])
    case.k[20] = float("nan")
    actual = attend(case, 0)
    assert actual[:20].isfinite().all()
    assert actual[20:].isnan().all()


@pytest.mark.parametrize("window", [0, 100, 600])
def test_a_row_does_not_depend_on_what_is_computed_with_it(window: int) -> None:
    """The same token gives the same bits alone and in any batch or chunk: what exact streams rest on."""
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


# -- what comes before ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_against_plain_torch(head_dim: int, has_norms: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    norms = tuple(RMSNorm(torch.rand(head_dim, generator=generator).to(BFLOAT16), 1e-6) for _ in range(2))
    heads = heads_of(6, 2, head_dim, norms if has_norms else None)  # type: ignore[arg-type]
    case = Case([(33, 1), (0, 40)], num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=BFLOAT16)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).flatten(1)
    cos_sin = heads.rotary.select(torch.tensor([33, *range(40)]))
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
def test_norms_are_those_of_plain_torch_to_the_bit(num_tokens: int, size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, delta, weight = (torch.randn(n, size, generator=generator).to(BFLOAT16) for n in (num_tokens, num_tokens, 1))
    plain, kernels = RMSNorm(weight[0], 1e-5), torch.ops.tandem_cpu
    # The sum of squares is added up in another order: a value between two others may be rounded the other way.
    torch.testing.assert_close(kernels.add_rms_norm(x, None, weight[0], 1e-5), plain(x), rtol=2**-7, atol=2**-6)
    expected_sum, expected = plain.add(x, delta)
    total = x.clone()
    torch.testing.assert_close(kernels.add_rms_norm(total, delta, weight[0], 1e-5), expected, rtol=2**-7, atol=2**-6)
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


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (64, 15), (64, 16), (130, 33), (576, 1536)])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_gated_products_against_float64(num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    x, weight, bias = product_case(num_rows, num_inputs, 2 * num_outputs)
    x /= num_inputs**0.5
    (gate, up), (gate_bias, up_bias) = weight.chunk(2), bias.chunk(2) if has_bias else (None, None)
    y = PanelGatedLinear(gate, up, gate_bias, up_bias)(x)
    linear = torch.nn.functional.linear
    gated, upper = (
        linear(x.double(), w.double(), None if b is None else b.double()) for w, b in ((gate, gate_bias), (up, up_bias))
    )
    expected = torch.nn.functional.silu(gated) * upper
    torch.testing.assert_close(y.double(), expected, rtol=2**-5, atol=1e-4)


@pytest.mark.parametrize("value", [100.0, -100.0, 3e38, -3e38, float("inf"), float("-inf"), 0.0, -0.0])
def test_gates_of_extreme_values(value: float) -> None:
    x, one = torch.tensor([[value, 1.0]], dtype=BFLOAT16), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=BFLOAT16)
    arguments = (one[:1], one[1:], None, None)
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
    """With the matrix unit, in parts: 520 rows of 5,000 inputs are 5 MB."""
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


def test_how_it_adds_up_is_said() -> None:
    """Tiles where the compiler was told of them, unless Linux refuses them."""
    flags = os.environ.get("CXXFLAGS", "")
    vectors = ("pairs", "floats16", "floats8", "floats4")
    expected = ("tiles",) if "PRETEND_TILES" in flags else ("tiles", "pairs") if has_amx(flags) else vectors
    found = re.fullmatch(r"(\w+) \(version \d+\)", build.cpu_arithmetic())
    assert found is not None
    assert found[1] in expected


def has_amx(flags: str) -> bool:
    """Whether the compiler says so of this machine."""
    command = [*build.find_compiler(), "-march=native", *flags.split(), "-E", "-dM", "-xc++", os.devnull]
    return "__AMX_BF16__" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 50, 49_152])
@pytest.mark.parametrize("temperature", [1e-45, 0.01, 0.9, 3.0])
def test_draws_are_those_of_the_sampler_to_the_token(vocab_size: int, temperature: float) -> None:
    logits = 4 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1))
    seqs = [
        Sequence(
            0, "r", [1, 2, *[3] * (i % 7)], 2, SamplingParams(temperature=temperature, seed=(-1) ** i * i * 7919**4)
        )
        for i in range(40)
    ]
    assert kernel_draw(logits, seqs).tolist() == draw(logits, seqs).tolist()


FILTERS = {
    "top_k": (-1, 1, 2, 20, 64, 999, 2**40), "top_p": (1e-9, 0.3, 0.9, 0.999), "min_p": (1e-300, 1e-10, 0.05, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("names", [("top_k",), ("top_p",), ("min_p",), tuple(FILTERS)], ids="+".join)
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 300, 49_152])
def test_filters_keep_what_those_of_the_sampler_keep(vocab_size: int, names: tuple[str, ...]) -> None:
    """Of tokens that could win: all that are as likely as the last one kept, at temperatures that level all, too."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(3)
    for spread in (0.0, 0.01, 1.0, 8.0, 1e4):
        logits = spread * torch.randn(8, vocab_size, generator=generator)
        logits[2] = logits[2].bfloat16().float()
        logits[3] = (2 * logits[3]).round() / 2  # many of them equal
        logits[4, torch.rand(vocab_size, generator=generator) < 0.9] = float("-inf")
        logits[4, vocab_size // 2], logits[5] = 1.0, logits[5] - 1e4
        params: list[dict[str, Any]] = [{name: rng.choice(FILTERS[name]) for name in names} for _ in logits]
        temperatures = [5e-324, 0.3, 1.0, 1.0, 1.0, 1.7, 1e5, 1e300]
        settings = [SamplingParams(temperature=t, seed=7, **p) for t, p in zip(temperatures, params, strict=True)]
        seqs, plain = (
            [Sequence(0, "r", [1] * (2 + i), 2, each) for i, each in enumerate(some)]
            for some in (settings, [SamplingParams(temperature=t) for t in temperatures])
        )
        can_win = filtered_weights(logits, plain) > HOPELESS
        kept, expected = logits.clone(), filtered_weights(logits, seqs) > HOPELESS
        assert kernel_draw(kept, seqs).tolist() == draw(logits, seqs).tolist()
        assert torch.equal((kept > float("-inf")) & can_win, expected)


def test_a_row_with_a_nan_has_no_next_token() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 99], logits[2] = float("nan"), float("-inf")
    seqs = [Sequence(0, "r", [1], 1, SamplingParams(seed=i)) for i in range(3)]
    seqs += [Sequence(0, "r", [1], 1, SamplingParams(seed=i, top_k=3, top_p=0.9, min_p=0.1)) for i in range(3)]
    assert kernel_draw(logits.repeat(2, 1), seqs)[[1, 2, 4, 5]].tolist() == [INVALID_TOKEN] * 4


@pytest.mark.parametrize("vocab_size", [1, 3, 50, 49_152])
def test_the_largest_is_that_of_the_sampler(vocab_size: int) -> None:
    logits = torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(4))
    logits[1], logits[2], logits[3], logits[4] = 0.0, -0.0, float("-inf"), -3e38
    logits[5, : vocab_size // 2] = -0.0
    logits[5, vocab_size // 2 :] = 0.0  # equal to those before
    logits[6, -1], logits[7, -1], logits[8, -1] = float("nan"), -float("nan"), float("inf")
    assert kernel_largest(logits).tolist() == choose_largest(logits).tolist()


def test_greedy_rows_draw_nothing() -> None:
    asked: list[str] = []

    def kernel(logits: torch.Tensor, seqs: Sequence_[Sequence]) -> torch.Tensor:
        asked.extend(seq.request_id for seq in seqs)
        return kernel_draw(logits, seqs)

    settings: dict[str, dict[str, float]] = {
        "plain": {}, "greedy": {"temperature": 0.0}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.1},
    }  # fmt: skip
    seqs = [Sequence(0, name, [1], 1, SamplingParams(seed=3, **s)) for name, s in settings.items()]  # type: ignore[arg-type]
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    last_token_ids = torch.tensor([1] * len(seqs))
    with_kernel = Sampler(frozenset(), draw_rows=kernel).sample(logits.clone(), seqs, last_token_ids)
    assert with_kernel.tolist() == Sampler(frozenset()).sample(logits, seqs, last_token_ids).tolist()
    assert asked == ["plain", "top_k", "top_p", "min_p"]


# -- where they cannot be had ---------------------------------------------------------------------------------------

SHAPE = {
    "device": "cpu", "dtype": "bfloat16", "head_dim": 64, "block_size": 16, "num_groups": 3,
    "product_inputs": (576, 1536), "has_soft_cap": False,
}  # fmt: skip


KNOWN = ("device", "dtype", "block_size", "quantization", "kv_dtype")


def choose(name: str, **change: object) -> str:
    """The backend behind `name`, for `SHAPE` but for what is changed."""
    shape = {**SHAPE, **change}
    known = {key: shape.pop(key) for key in KNOWN if key in shape}
    model = SimpleNamespace(num_heads=shape.pop("num_groups"), num_kv_heads=1, mla=None, moe=None, **shape)
    known = {"kv_dtype": known["dtype"], **known}
    return choose_attention_backend(name, Needs(model=model, capability=None, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "cuda"}, "the device is cuda"),
        ({"dtype": "float32"}, "it computes bfloat16, and dtype is float32"),
        ({"block_size": 8}, "block_size must be a multiple of 16, is 8"),
        ({"head_dim": 72}, "head size must be a multiple of 16 up to 256, is 72"),
        ({"num_groups": 97}, "at most 96 query heads may share a key head, and 97 do"),
        ({"product_inputs": (161, 1536)}, "must be even, are 161 and 1536"),
        ({"product_inputs": (576, 203)}, "must be even, are 576 and 203"),
        ({"has_soft_cap": True}, "the model caps its scores"),
        ({"quantization": "fp8"}, "it multiplies with weights in bfloat16, int8 or int4, and quantization is fp8"),
        ({"kv_dtype": "float8_e4m3fn"}, "its pool holds bfloat16, and kv_cache_dtype makes it float8_e4m3fn"),
    ],
)
def test_what_they_cannot_do_is_done_by_plain_torch(change: dict[str, object], why: str) -> None:
    assert choose("auto") == choose("auto", quantization="int8") == "cpu"
    if "device" not in change:  # a GPU may get other kernels: tests/unit/test_triton_attention.py
        assert choose("auto", **change) == "torch"
    with pytest.raises(ValueError, match=why):
        choose("cpu", **change)


@pytest.mark.parametrize("change", [{"quantization": "fp8"}, {"kv_dtype": "float8_e4m3fn"}])
def test_who_asks_for_8_bits_hears_what_that_costs(
    change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("auto", **change) == "torch"
    assert re.search("plain torch computes, several times slower than the CPU kernels, .*: it", capsys.readouterr().err)


def test_without_a_compiler_plain_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(choice, "load_cpu_kernels", load_cpu_kernels.__wrapped__)
    assert choose("auto") == "torch"
    assert "plain torch computes, several times slower than the CPU kernels" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"there is no C\+\+ compiler .*: install g"):
        choose("cpu")


def test_source_that_does_not_compile_says_why_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "cpu.cpp"
    source.write_text("int main() { return nonsense; }")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(KernelsUnavailable, match="nonsense"):
        build.cpu_library(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_library_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "source" / "small.cpp"
    source.parent.mkdir()
    source.write_text("int answer() { return 42; }")
    monkeypatch.setattr(build, "SOURCE", source)
    library = build.cpu_library(tmp_path)
    whole = library.read_bytes()
    library.chmod(0o644)
    library.write_bytes(whole[:4096])
    assert build.cpu_library(tmp_path).read_bytes()[:4] == whole[:4]
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("nonsense", "there is no C++ compiler (nonsense)"),
        ("true", "has written nothing"),
        ("false", "cannot compile them: it ended with 1"),
        ("g++ --nonsense", "compile"),
    ],
)
def test_a_compiler_that_is_none_is_named(
    compiler: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelsUnavailable, match=re.escape(why)):
        build.cpu_library(tmp_path)


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="cannot be kept in"):
        build.cpu_library(tmp_path / "file" / "kernels")


def test_rows_are_laid_out_by_the_plan() -> None:
    case = case_of(LENS["mixed"])
    plan = CpuAttention().prepare(case.layout)
    assert plan.block_tables.dtype == torch.int32
    np.testing.assert_array_equal(plan.slot_mapping.numpy(), case.layout.slot_mapping)
