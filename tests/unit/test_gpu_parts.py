"""The parts of benchmarks/gpu.py that a CPU computes in a moment, with toys. For those that push KV, see
test_gpu_push.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import flash_reference
import pytest
import torch
from pretend_gpu import pretend_gpu

from benchmarks import gpu
from benchmarks.gpu_parts import (
    against_vllm,
    attention,
    deepseek,
    digests,
    drafts,
    flash,
    floors,
    gpt_oss,
    int4_experts,
    invariant,
    offload,
    products,
    profiling,
    states,
    steps,
    variants,
)
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import (
    FULL,
    INT4_BYTES,
    QWEN_30B,
    TINY,
    TOY,
    ModelShape,
    Sizes,
    attention_bytes,
    expert_numbers,
    write_model,
)
from benchmarks.gpu_parts.timing import MAX_SETS
from engine.attention.flash_calls import FlashUnavailable, flash_attn_4_calls
from engine.grains import INT4_GROUP_SIZE
from engine.kernels.gpu import why_no_triton
from engine.running.model_runner import MAX_TOKENS_READ_AGAIN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
def test_drafts_are_measured_as_rows(sizes: Sizes) -> None:
    """With more to read again, the sequences would stay whole, and their steps would be no recorded ones."""
    batch, context = max(drafts.batches(sizes)), sizes.decode_steps[0][1]
    longest = context + steps.NUM_WARM_UP_STEPS + steps.NUM_STEPS + 1 + drafts.NUM_DRAFTS
    assert batch * longest * drafts.NUM_DRAFTS <= MAX_TOKENS_READ_AGAIN


def test_beside_vllm_where_it_is_installed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotRun, match="not installed: vllm"):
        list(against_vllm.measure(setting))
    monkeypatch.setattr(against_vllm, "require", lambda *_: None)
    monkeypatch.setattr(
        against_vllm, "times",
        lambda _, engine, folder: [against_vllm.Time(engine, "prefill 2 x 64", 2.0 if engine == "tandem" else 6.0)],
    )  # fmt: skip
    theirs, ours = against_vllm.measure(setting)
    assert (theirs.what, theirs.note) == ("prefill 2 x 64, vllm", "")
    assert (ours.what, ours.note) == ("prefill 2 x 64, tandem", "vLLM takes 3.00 times as long")
    assert ours.group == theirs.group


@pytest.mark.slow
def test_an_engine_alone(setting: Setting) -> None:
    found = list(against_vllm.times(setting, "tandem", write_model(setting.results / "toy", TOY)))
    assert [(time.what, time.engine.split()[0]) for time in found] == [
        ("prefill 2 x 64", "Tandem"), ("decode step 1 x 8", "Tandem"), ("decode step 4 x 16", "Tandem"),
    ]  # fmt: skip


def test_an_engine_that_fails_is_an_error_with_its_words(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match=r"vllm ended with 1: .*No module named 'vllm'"):
        list(against_vllm.times(setting, "vllm", setting.results))


@pytest.mark.parametrize("damage", [1.0, 1.1, float("nan")])
def test_flash_attention_over_pages_of_each_size_that_it_takes(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, damage: float
) -> None:
    def varlen_func(q: torch.Tensor, *args: Any, **rest: Any) -> tuple[torch.Tensor, None]:
        out, _ = flash_reference.flash_attn_4_varlen_func(q, *args, **rest)
        if "cu_seqlens_q" in rest:
            out[-1] *= damage
        return out, None

    calls = flash_attn_4_calls(varlen_func, (16,))

    def load(*, block_size: int, **_: object) -> Any:
        if block_size == 128:
            raise FlashUnavailable("no such pages")
        return calls

    def two_seconds(works: list[Callable[[], torch.Tensor]], device: str) -> float:
        for work in works:
            is_right = work().isfinite().all() or damage != 1
            assert is_right, "queries, or keys, are more than it was told"
        return 2.0

    monkeypatch.setattr(flash, "load_flash_calls", load)
    monkeypatch.setattr(flash, "seconds_of", two_seconds)
    *rows, error = flash.measure(setting)
    assert error.is_wrong is (damage != 1)
    assert [row.what for row in rows] == [
        f"{what}, FlashAttention-4, blocks of {block_size}"
        for what in ("decode attention 2 x 40", "prefill attention 2 x 24")
        for block_size in (16, 256)
    ]
    _, num_kv_heads, head_dim = setting.sizes.attention_heads
    assert rows[0].value == attention_bytes(num_kv_heads, head_dim, 2 * 40) / 2 / 1e9


def test_why_there_is_no_flash_attention_is_said(setting: Setting) -> None:
    with pytest.raises(NotRun, match="the device is cpu"):
        list(flash.measure(setting))
    with pytest.raises(NotRun, match="the device is cpu"):
        list(steps.measure_flash(setting))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has cuBLASLt")
def test_what_torch_lacks_is_said(setting: Setting) -> None:
    with pytest.raises(NotRun, match="cuBLASLt"):
        list(steps.measure_cublaslt(setting))


def test_floors_and_steps(setting: Setting) -> None:
    found = {row.what: row for row in floors.measure(setting)}
    assert set(found) == {floors.COPY, floors.PRODUCTS}
    known = gpu.known_of(list(found.values()))
    assert known[floors.COPY] == found[floors.COPY].value
    rows = list(steps.measure(Setting(device="cpu", is_tiny=True, results=setting.results, known=known)))
    assert [row.what for row in rows] == [
        "decode step, 1 x 8", "decode step, 4 x 16", "prefill, 2 x 64",
        "sampling 4 rows, greedy", "sampling 4 rows, drawn", "sampling 4 rows, drawn, top_p 0.9",
        "logprobs of 4 rows, 5", "device idle, 1 x 8", "device idle, 4 x 16",
    ]  # fmt: skip
    assert all(row.value is not None for row in rows)
    assert all(row.limit is not None and row.limit > 0 for row in rows[:3])


def test_a_profiler_that_sees_nothing_costs_its_own_row_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 2)
    seen = SimpleNamespace(events=list, step=lambda: None)
    monkeypatch.setattr(profiling, "profile", lambda **_: nullcontext(seen))
    rows = {row.what: row for row in steps.measure(setting)}
    assert rows["device idle, 1 x 8"].value is None
    assert rows["device idle, 1 x 8"].note == "not known: the profiler saw no work on the device"
    assert rows["prefill, 2 x 64"].value


def test_products_of_a_step(setting: Setting) -> None:
    assert sum(num_outputs * num_inputs for _, num_outputs, num_inputs in FULL.model.products[:-1]) == 218_103_808
    assert FULL.model.products[-1] == ("logits", 128_256, 4096)
    if why_no_triton("cpu"):
        with pytest.raises(NotRun):
            list(products.measure(setting))
    measured = iter(products.measure(setting))
    rows = [next(measured) for _ in range(5)]
    assert [row.what for row in rows] == [
        "qkv 128 x 64, 2 rows, torch", "output 64 x 64, 2 rows, torch", "gate and up 256 x 64, 2 rows, torch",
        "down 64 x 128, 2 rows, torch", "logits 500 x 64, 2 rows, torch",
    ]  # fmt: skip
    assert all(row.value for row in rows)


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_products_of_weights_in_4_bits(setting: Setting) -> None:
    assert INT4_BYTES == 0.5 + 4 / INT4_GROUP_SIZE
    chosen = [choice for choice in products.choices(setting) if choice.job.what.endswith(", int4")]
    assert [(choice.job.what, 1e9 * choice.job.amount) for choice in chosen] == [
        ("qkv 128 x 64, 2 rows, int4", 128 * 64 * 0.625), ("output 64 x 64, 2 rows, int4", 64 * 64 * 0.625),
        ("gate and up 256 x 64, 2 rows, int4", 256 * 64 * 0.625), ("down 64 x 128, 2 rows, int4", 64 * 128 * 0.625),
    ]  # fmt: skip
    works, result = chosen[0].job.launches(chosen[0].in_use)
    assert torch.equal(works[0](), result)  # type: ignore[arg-type]


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_latents_and_experts(setting: Setting) -> None:
    known = {floors.COPY: 10.0, floors.PRODUCTS: 1.0}
    rows = list(deepseek.measure(replace(setting, known=known)))
    assert [(row.what, row.unit) for row in rows] == [
        ("decode attention to latents 2 x 40, 4 heads", "GB/s"),
        ("prefill attention to latents 1 x 24, 4 heads", "TFLOP/s"),
        ("prefill attention unfolded 1 x 24, 4 heads", "TFLOP/s"),
        ("experts 4 of 32, 3 tokens, float8_e4m3fn", "GB/s"),
        ("experts 4 of 32, 3 tokens, float32", "GB/s"),
    ]
    assert all(row.value and row.limit for row in rows)
    # Of DeepSeek-V3's 671 billion weights, the experts of 58 layers on eight ranks are 654 billion.
    assert expert_numbers(FULL.latents) * 58 * 8 == 653_908_770_816


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_experts_in_four_bits(setting: Setting) -> None:
    [row] = gpt_oss.measure(replace(setting, known={floors.COPY: 10.0}))
    assert (row.what, row.unit, row.limit) == ("experts in MXFP4, 4 of 32, 3 tokens", "GB/s", 10.0)
    assert row.value
    error, row = int4_experts.measure(replace(setting, known={floors.COPY: 10.0}))
    assert (error.what, error.is_check, error.is_met) == ("error of experts in int4", True, True)
    assert error.value is not None
    assert error.value < 1e-5, "in float32, where the order of sums is all that differs"
    assert (row.what, row.unit, row.limit) == ("experts in int4, 4 of 32, 3 tokens", "GB/s", 10.0)
    assert row.value


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_layers_that_keep_a_state(setting: Setting) -> None:
    rows = list(states.measure(replace(setting, known={floors.COPY: 10.0})))
    for name, (error, decode, in_spans, by_token) in (("delta rules", rows[:4]), ("Mamba-2", rows[4:])):
        assert (error.what, error.is_check, error.is_met) == (f"error of {name}", True, True)
        assert error.value is not None
        assert error.value < 1e-5, "in float32"
        assert (decode.what, decode.unit, decode.limit) == (f"{name}, decode 3", "GB/s", 10.0)
        assert (in_spans.what, in_spans.unit) == (f"{name}, prompt of 20 in spans", "ms")
        assert (by_token.what, by_token.unit) == (f"{name}, prompt of 20 token by token", "ms")
        assert decode.value
        assert in_spans.value
        assert by_token.value


def test_few_experts_rotate_among_more_weights_than_a_cache_holds(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that one token reads, 21 MB of int4, would otherwise stay in an H200's cache of 50 MB."""
    num_made, num_timed = 0, 0

    def make(*_: object) -> Callable[..., torch.Tensor]:
        nonlocal num_made
        num_made += 1
        return lambda x_RD, ends_E: x_RD

    def timed(works: list[Callable[[], object]], _: Setting) -> float:
        nonlocal num_timed
        num_timed = len(works)
        return 1.0

    monkeypatch.setattr(gpt_oss, "timed", timed)
    with pretend_gpu():
        gpt_oss.expert_row(replace(setting, device="cuda"), setting.sizes.int4_experts, 1, "int4", 0.5, make)  # type: ignore[arg-type]
    assert num_made == num_timed == MAX_SETS, "a toy's experts are small"


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_what_the_same_bits_cost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "bits_rows", lambda setting: iter(()))  # would interpret four engines
    known = {floors.COPY: 10.0, floors.PRODUCTS: 1.0}
    rows = {row.what: row for row in invariant.measure(replace(setting, known=known))}
    units = {what: row.unit for what, row in rows.items() if "=" not in what}
    assert units == {
        f"invariant, {name}, {rows} rows": unit
        for name in ("qkv 128 x 64", "output 64 x 64", "gate and up 256 x 64", "down 64 x 128")
        for rows, unit in ((2, "GB/s"), (40, "TFLOP/s"))
    } | {
        "invariant, logits 500 x 64, 2 rows": "GB/s",
        "invariant, decode attention 2 x 40": "GB/s",
        "invariant, prefill attention 2 x 24": "TFLOP/s",
    }  # fmt: skip
    assert all(row.value and row.limit for row in rows.values())


def test_other_bits_are_counted() -> None:
    told = {"a": [(5, -0.25), (6, -1.0)], "b": [(5, -0.5)]}
    assert invariant.differing(told, told) == (0, 3)
    assert invariant.differing(told, {"a": [(5, -0.25), (7, -1.0)], "b": [(5, -0.5000001)]}) == (2, 3)


def test_a_size_that_a_library_refuses_costs_its_own_row_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when\ncalling cublasLtMatmul")

        return product

    monkeypatch.setattr(products, "Float8Linear", refuse)
    row = products.float8_row("qkv, torch, fp8", 1, 16, 32, setting)
    assert row.value is None
    assert row.note == "failed: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"


def test_steps_in_fewer_bits_stand_beside_their_bytes(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 2)
    known = replace(setting, known={floors.COPY: 100.0, floors.PRODUCTS: 1.0})
    rows = {row.what: row for row in steps.measure_int8(known)}
    eight = replace(known.sizes.model, layer_item_bytes=1)
    assert rows["int8: decode step, 1 x 8"].limit == eight.decode_bytes(1, 8) / 100e6
    assert rows["int8: prefill, 2 x 64"].value
    rows = {row.what: row for row in steps.measure_int4(known)}
    num_fewer = eight.num_in_layers * 3 // 8  # 32 weights take 16 bytes, and 4 for scale and offset
    assert rows["int4: decode step, 1 x 8"].limit == pytest.approx((eight.decode_bytes(1, 8) - num_fewer) / 100e6)
    with pytest.raises(NotRun, match="it needs a GPU"):
        list(steps.measure_fp8(known))


def test_steps_of_a_mixture_stand_beside_the_bytes_of_the_experts_that_are_chosen(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "NUM_STEPS", 2)
    known = replace(setting, known={floors.COPY: 100.0, floors.PRODUCTS: 1.0})
    rows = {row.what: row for row in steps.measure_mixture(known)}
    shape = known.sizes.mixture
    assert rows["int4 experts: decode step, 1 x 8"].limit == pytest.approx(shape.decode_bytes(1, 8) / 100e6)
    assert rows["int4 experts: prefill, 2 x 64"].value
    # Two of four experts for one token, each of three products of 64 x 64, in two layers; for four tokens all but 1/16.
    experts = 4 * 3 * 64 * 64 * 2 * 0.625
    num_bytes = [shape.decode_bytes(batch, 8) - batch * shape.kv_bytes(8) for batch in (1, 4)]
    assert num_bytes[1] - num_bytes[0] == experts * (15 / 16 - 1 / 2)
    # Qwen3-30B-A3B has 30.5 billion weights. A token uses 3.3 billion, of which 0.3 are embeddings.
    whole = ModelShape({**QWEN_30B, "num_hidden_layers": 48})
    assert whole.num_in_layers + whole.num_in_logits == pytest.approx(3.04e9, rel=0.01)


@pytest.mark.skipif(bool(why_no_triton("cpu")), reason="Triton is not installed, or not interpreted")
def test_attention_and_digests_interpreted(setting: Setting) -> None:
    rows = list(attention.measure(setting))
    groups = ["decode attention 2 x 40", "prefill attention 2 x 24"]
    assert [row.group for row in rows] == groups
    rows += attention.measure_variants(setting)
    assert [row.group for row in rows[2:]] == [groups[0], groups[0], groups[1], groups[1]]
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert not any(row.is_wrong for row in digests.measure(setting))


def test_blocks_to_the_host_and_back(setting: Setting) -> None:
    rows = {row.what: row for row in offload.measure(setting)}
    assert not any(row.is_wrong for row in rows.values())
    assert rows["blocks unlike what was saved"].value == 0
    assert rows["first token of 64, computed"].value > 0
    assert rows["decode step, 1 x 8, beside copies"].share > 0


def test_a_share_of_the_copy_is_aimed_at_where_there_is_enough_to_read(setting: Setting) -> None:
    full = replace(setting, is_tiny=False)
    jobs = [attention.decode_job(full, torch.bfloat16, *size) for size in FULL.decode_attention]
    assert {job.what: job.target for job in jobs} == {
        "decode attention 64 x 4096": 0.8, "decode attention 1 x 8192": 0.8, "decode attention 64 x 2100": 0.8,
        "decode attention 1 x 1100": None,
    }  # fmt: skip


@dataclass(frozen=True)
class Config:
    size: int


def test_a_configuration_that_does_not_run_or_computes_something_else_is_no_choice(setting: Setting) -> None:
    def launches(config: Config) -> tuple[list[Callable[[], object]], torch.Tensor]:
        if config.size == 3:
            raise RuntimeError("out of resource: shared memory")
        out = torch.ones(4)
        return [lambda: out.fill_(2.0 if config.size == 4 else 1.0)], out

    job = variants.Job(what="job", amount=1.0, unit="GB/s", limit=None, target=0.8, launches=launches)
    sizes = ({"size": 2}, {"size": 3}, {"size": 4})
    setting = replace(setting, is_tiny=False)
    rows = list(
        variants.rows_of_variants([variants.Choice(job, Config(1), sizes), variants.Choice(job, None)], setting)
    )
    assert [row.what for row in rows] == ["job", "job, size=2", "job, size=3", "job, size=4"]
    assert [row.value is None for row in rows] == [False, False, True, True]
    assert "out of resource" in rows[2].note
    assert rows[3].note == "wrong: differs by 1"
