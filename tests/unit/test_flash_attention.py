"""The FlashAttention backend compared with float64 and plain torch, over functions that have the libraries' parameters,
demands and semantics (tests/flash_reference.py); torch's own is the real `varlen_attn` down to the ATen operator.

With a GPU, the libraries that are installed there are tested as well.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flash_reference
import numpy as np
import pytest
import torch
from attention_cases import LENS, Case
from engine_steps import arguments, logits_of_steps
from recorder import RelaunchingRecorder

from engine import attention
from engine.attention import choice
from engine.attention.flash_backend import FlashAttention, paged_batch
from engine.attention.flash_calls import (
    FLASH_ATTN_4_HEAD_DIMS,
    TORCH_WITH_PAGES,
    FlashCalls,
    flash_attn_2_calls,
    flash_attn_3_calls,
    flash_attn_4_calls,
    load_flash_attn_2,
    load_flash_attn_3,
    load_flash_attn_4,
    load_torch,
    release_of,
    torch_calls,
)
from engine.attention.torch_backend import TorchAttention
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running import model_runner
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.attention.triton_flash import TritonFlashAttention

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton_device  # noqa: F401 - before the kernels: it chooses the interpreter where there is no GPU
HAS_GPU = torch.cuda.is_available()

KINDS = ["FlashAttention-3", "FlashAttention-4", "FlashAttention-2", "torch's"]
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
LONG = [(300, 1), (511, 1), (512, 1), (0, 1), (255, 3), (0, 300), (520, 9)]
"""Several pages of 256. Contexts end before, at and after page ends."""


@pytest.fixture(autouse=True)
def real_varlen_attn_on_cpu() -> Iterator[None]:
    with flash_reference.aten_on_cpu():
        yield


def calls_of(kind: str) -> FlashCalls:
    """From here on the calls are the same as with the real functions."""
    if kind == "FlashAttention-3":
        return flash_attn_3_calls(flash_reference.flash_attn_3_with_kvcache)
    if kind == "FlashAttention-4":
        return flash_attn_4_calls(flash_reference.flash_attn_4_varlen_func, FLASH_ATTN_4_HEAD_DIMS[9])
    if kind == "FlashAttention-2":
        reference = flash_reference
        return flash_attn_2_calls(reference.flash_attn_varlen_func, reference.flash_attn_with_kvcache)
    if release_of(torch.__version__) < TORCH_WITH_PAGES:
        pytest.skip(f"varlen_attn of torch {torch.__version__} takes no pages")
    from torch.nn.attention.varlen import varlen_attn  # imports all of torch's compiler

    return torch_calls(varlen_attn)


def case_of(
    lens: list[tuple[int, int]],
    num_groups: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float16,
    block_size: int = 256,
    num_kv_heads: int = 2,
) -> Case:
    return Case(
        lens, num_heads=num_kv_heads * num_groups, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype,
    )  # fmt: skip


def backend_of(case: Case, calls: FlashCalls, device: str = "cpu") -> FlashAttention:
    return FlashAttention(plain_backend_of(case, device), calls, device)


def plain_backend_of(case: Case, device: str = "cpu") -> TorchAttention:
    return TorchAttention(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, block_size=case.block_size,
        device=device,
    )  # fmt: skip


def written_pool(case: Case) -> torch.Tensor:
    """The pool after plain torch has written the step's keys and values to it."""
    plain = plain_backend_of(case)
    kv = case.kv.clone()
    plain.write_kv(kv, case.k, case.v, plain.prepare(case.layout))
    return kv


def attend(
    case: Case, calls: FlashCalls, window: int = 0, device: str = "cpu", scale: float | None = None
) -> torch.Tensor:
    return attend_with(backend_of(case, calls, device), case, window, device, scale)


def attend_with(
    backend: FlashAttention | TritonFlashAttention, case: Case, window: int, device: str, scale: float | None = None
) -> torch.Tensor:
    kv = written_pool(case).to(device)
    return backend.attend(case.q.to(device), kv, backend.prepare(case.layout), case.scores(window, scale=scale)).cpu()


def assert_close(case: Case, calls: FlashCalls, window: int = 0, device: str = "cpu") -> None:
    tolerance = TOLERANCES[case.kv.dtype]
    actual, expected = attend(case, calls, window, device).double(), case.expected(window)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# -- against float64 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 5, 1000])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind: str, lens: list[tuple[int, int]], window: int) -> None:
    assert_close(case_of(lens, num_kv_heads=1), calls_of(kind), window)


@pytest.mark.parametrize("kind", KINDS)
def test_another_scale(kind: str) -> None:
    case = case_of(LENS["mixed"])
    actual = attend(case, calls_of(kind), scale=0.4).double()
    torch.testing.assert_close(actual, case.expected(0, scale=0.4), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("window", [0, 260])
@pytest.mark.parametrize("kind", KINDS)
def test_several_pages(kind: str, window: int) -> None:
    assert_close(case_of(LONG, 1, 16, torch.bfloat16), calls_of(kind), window)


@pytest.mark.parametrize("num_groups", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [8, 80, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_head_shapes(kind: str, head_dim: int, num_groups: int) -> None:
    calls = calls_of(kind)
    if head_dim not in calls.head_dims:
        pytest.skip("it has no such heads")
    assert_close(case_of([(20, 1), (0, 1), (0, 9), (10, 7)], num_groups, head_dim), calls)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("kind", ["FlashAttention-3", "FlashAttention-4"])
def test_some_take_pages_of_any_size(kind: str, block_size: int) -> None:
    calls = calls_of(kind)
    assert calls.page_multiple == 1
    assert_close(case_of([(40, 1), (0, 1), (20, 5), (0, 17)], block_size=block_size), calls, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_plain_torch(kind: str) -> None:
    case = case_of(LENS["mixed"])
    plain = plain_backend_of(case)
    expected = plain.attend(case.q, written_pool(case), plain.prepare(case.layout), case.scores(11))
    torch.testing.assert_close(attend(case, calls_of(kind), 11), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_one_token_that_is_not_called_a_decode(kind: str) -> None:
    case = case_of([(9, 1), (31, 1)])
    case.layout = replace(case.layout, num_decodes=1)
    assert_close(case, calls_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_is_read_where_it_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(LENS["mixed"])
    kv = written_pool(case)
    backend, real = backend_of(case, calls_of(kind)), flash_reference._attend
    seen: list[int] = []

    def watching(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object) -> torch.Tensor:
        seen.extend(pages.data_ptr() for pages in (k, v))
        return real(q, k, v, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(flash_reference, "_attend", watching)
    backend.attend(case.q, kv, backend.prepare(case.layout), case.scores())
    assert seen == [kv[:, 0].data_ptr(), kv[:, 1].data_ptr()] * 2  # for decodes, for prefills


# -- plans ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_buffer_of_aligned_arrays() -> None:
    case = case_of(LENS["mixed"])
    for members in (slice(0, 2), slice(2, None)):
        batch = paged_batch(case.layout, members, "cpu")
        assert batch is not None
        arrays = [batch.query_starts, batch.context_starts, batch.context_lens, batch.block_tables]
        query_lens, context_lens = case.layout.query_lens[members], case.layout.context_lens[members]
        expected = [
            [0, *np.cumsum(query_lens)], [0, *np.cumsum(context_lens)], context_lens, case.layout.block_tables[members],
        ]  # fmt: skip
        for array, numbers in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, numbers)
            assert (array.data_ptr() - batch.query_starts.data_ptr()) % 16 == 0  # in bytes
            assert array.untyped_storage().data_ptr() == batch.query_starts.untyped_storage().data_ptr()
        assert (batch.max_query_len, batch.max_context_len) == (query_lens.max(), context_lens.max())


def test_no_decodes_and_no_prefills_are_both_steps() -> None:
    case = case_of([(0, 5)])
    backend = backend_of(case, calls_of("torch's"))
    plan = backend.prepare(case.layout)
    assert plan.decodes is None
    assert backend.prepare(case_of([(4, 1)]).layout).prefills is None


# -- prompts alone, beside our kernels ------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def mixed_backend_of(case: Case, calls: FlashCalls, device: str = "cpu") -> TritonFlashAttention:
    from engine.attention.triton_backend import TritonAttention
    from engine.attention.triton_flash import TritonFlashAttention
    from engine.kernels.gpu.gpu_kind import gpu_kind

    ours = TritonAttention(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, block_size=case.block_size,
        dtype="float16", kv_dtype="float16", device=device, kind=gpu_kind(device),
    )  # fmt: skip
    return TritonFlashAttention(ours, calls, device)


@needs_triton
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_alone_against_float64(kind: str, lens: list[tuple[int, int]], window: int) -> None:
    case = case_of(lens, num_kv_heads=1)
    actual = attend_with(mixed_backend_of(case, calls_of(kind)), case, window, "cpu").double()
    torch.testing.assert_close(actual, case.expected(window), rtol=2e-3, atol=2e-3)


@needs_triton
def test_who_computes_which_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of one new token that is not marked as a decode counts as a prompt."""
    case = case_of([(9, 1), (31, 1), (4, 3)])
    case.layout = replace(case.layout, num_decodes=1)
    backend, real = mixed_backend_of(case, calls_of("FlashAttention-4")), flash_reference._attend
    nums_queries: list[int] = []

    def watching(q: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        nums_queries.append(len(q))
        return real(q, *args, **rest)

    monkeypatch.setattr(flash_reference, "_attend", watching)
    actual = attend_with(backend, case, 0, "cpu").double()
    torch.testing.assert_close(actual, case.expected(0), rtol=2e-3, atol=2e-3)
    assert nums_queries == [4]


@needs_triton
def test_decoding_steps_have_the_plans_of_our_kernels() -> None:
    cases = [case_of(lens, 3, 64) for lens in ([(299, 1), (3, 1), (256, 1)], [(519, 1)])]
    backend = mixed_backend_of(cases[0], calls_of("FlashAttention-3"))
    plan = backend.reserve_decode_plan(3, 520)
    for case in cases:
        backend.refill(plan, case.layout)
        q = torch.cat([case.q, torch.zeros(3 - len(case.q), *case.q.shape[1:], dtype=case.q.dtype)])
        out = backend.attend(q, written_pool(case), plan, case.scores()).double()
        torch.testing.assert_close(out[: len(case.q)], case.expected(0), rtol=2e-3, atol=2e-3)


# -- an engine ------------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 1, "tie_word_embeddings": True, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of library that an engine finds."""
    for module in (attention, choice):
        monkeypatch.setattr(module, "load_flash_calls", lambda **_: calls_of(request.param))
    return str(request.param)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_no_triton", lambda device: "there is none")


def flash_arguments(folder: Path, kind: str, backend: str, device: str = "cpu") -> EngineArgs:
    """Arguments with the page size that the library needs."""
    block_size = 4 if calls_of(kind).page_multiple == 1 else 256
    return arguments(
        folder, backend, device, num_kv_blocks=64, max_model_len=60, block_size=block_size, max_num_batched_tokens=16
    )


def assert_same_logits(folder: Path, kind: str, *, records: bool, device: str = "cpu") -> None:
    ours = logits_of_steps(flash_arguments(folder, kind, "flash_attn", device), records=records)
    plain = logits_of_steps(flash_arguments(folder, kind, "torch", device), records=False)
    for flash_logits, torch_logits in zip(ours, plain, strict=True):
        assert torch_logits.std() > 0.05
        torch.testing.assert_close(flash_logits.float(), torch_logits.float(), rtol=1e-2, atol=5e-3)


def test_an_engine_computes_what_it_does_with_plain_torch(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms of heads, biases, and a window in one layer."""
    without_triton(monkeypatch)
    assert_same_logits(folder, kind, records=False)


@pytest.mark.skipif(not HAS_TRITON or HAS_GPU, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["FlashAttention-3"], indirect=True)
def test_an_engine_with_triton_kernels_around_it_replays_its_steps(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "CudaRecorder", RelaunchingRecorder)
    assert_same_logits(folder, kind, records=True)


def tokens_of(args: EngineArgs) -> dict[str, list[int]]:
    engine = LLMEngine(create_engine_config(args))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(4):
        engine.add_request(str(number), [(17 * number + 5 * i) % 90 + 5 for i in range(5 + 9 * number)], params)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_an_engine_gives_the_tokens_of_plain_torch(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    tokens = tokens_of(flash_arguments(folder, kind, "flash_attn"))
    assert tokens == tokens_of(flash_arguments(folder, kind, "torch"))
    assert [len(answer) for answer in tokens.values()] == [8] * 4


# -- the real libraries, where there is a GPU -----------------------------------------------------------------------

LOADERS = {
    "FlashAttention-3": load_flash_attn_3, "FlashAttention-4": load_flash_attn_4,
    "FlashAttention-2": load_flash_attn_2, "torch's": load_torch,
}  # fmt: skip


@pytest.fixture(params=KINDS)
def installed(request: pytest.FixtureRequest) -> FlashCalls:
    if not HAS_GPU:
        pytest.skip("needs a GPU")
    calls = LOADERS[request.param](torch.cuda.get_device_capability())
    if isinstance(calls, str):
        pytest.skip(calls)
    return calls


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [0, 1, 5, 260, 1000])
def test_installed_against_float64(installed: FlashCalls, window: int, dtype: torch.dtype) -> None:
    for lens in (*LENS.values(), LONG):
        assert_close(case_of(lens, 4, 64, dtype), installed, window, "cuda")


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_installed_page_sizes(installed: FlashCalls, block_size: int) -> None:
    """With 128, a page has as many keys as a tile of FlashAttention-4 for such heads, which it then loads in another
    way."""
    if block_size % installed.page_multiple:
        pytest.skip("its pages are larger")
    for window in (0, 200):
        assert_close(case_of(LONG, 4, 128, torch.bfloat16, block_size), installed, window, "cuda")


@pytest.mark.parametrize("num_groups", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_installed_head_shapes(installed: FlashCalls, head_dim: int, num_groups: int) -> None:
    if head_dim not in installed.head_dims:
        pytest.skip("it has no such heads")
    assert_close(case_of(LONG, num_groups, head_dim), installed, 0, "cuda")


@needs_triton
@pytest.mark.parametrize("window", [0, 260])
def test_installed_beside_our_kernels(installed: FlashCalls, window: int) -> None:
    case = case_of(LONG, 4, 64)
    actual = attend_with(mixed_backend_of(case, installed, "cuda"), case, window, "cuda").double()
    torch.testing.assert_close(actual, case.expected(window), rtol=2e-3, atol=2e-3)


def test_installed_gives_a_decoding_sequence_the_same_bits_in_any_batch(installed: FlashCalls) -> None:
    alone = case_of([(300, 1)], 4, 64)
    q_of_all = torch.zeros(301, *alone.q.shape[1:], dtype=torch.float16)
    q_of_all[300] = alone.q[0]
    for others in ([(5, 1)], [(1500, 1)] * 3, [(40, 1)] * 90):
        among = Case(
            [*others, (300, 1)], num_heads=8, num_kv_heads=2, head_dim=64, block_size=256, dtype=torch.float16,
            last=(q_of_all, *alone.history[-1]),
        )  # fmt: skip
        assert torch.equal(attend(among, installed, 0, "cuda")[-1:], attend(alone, installed, 0, "cuda"))


def test_installed_in_an_engine(installed: FlashCalls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, choice):
        monkeypatch.setattr(module, "load_flash_calls", lambda **_: installed)
    assert_same_logits(folder, installed.name, records=HAS_TRITON, device="cuda")


@pytest.mark.parametrize(
    ("module", "name", "reference"),
    [
        ("flash_attn.cute", "flash_attn.cute.flash_attn_varlen_func", flash_reference.flash_attn_4_varlen_func),
        ("flash_attn_2_cuda", "flash_attn.flash_attn_varlen_func", flash_reference.flash_attn_varlen_func),
        ("flash_attn_2_cuda", "flash_attn.flash_attn_with_kvcache", flash_reference.flash_attn_with_kvcache),
        (
            "flash_attn_interface", "flash_attn_interface.flash_attn_with_kvcache",
            flash_reference.flash_attn_3_with_kvcache,
        ),
    ],
)  # fmt: skip
def test_the_reference_takes_what_the_real_function_does(
    module: str, name: str, reference: Callable[..., torch.Tensor]
) -> None:
    pytest.importorskip(module)
    package, _, function = name.rpartition(".")
    real = getattr(pytest.importorskip(package), function)
    assert list(inspect.signature(real).parameters) == list(inspect.signature(reference).parameters)
