"""Measures steps of one engine with Llama-3.1-8B's shapes: the bytes that decoding reads and the operations of prompts,
compared with the floors; and the share of a decoding step in which the device is idle. In bfloat16, and in fewer bits,
compared with the floor of their bytes.

The idle share is 1 - busy / step. `step` is the median time of normal steps. `busy` is the time per step covered by
kernels and copies, in some further steps under the profiler (`profiling.py`). A file among the results lists these
kernels and their times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.profiling import profiled, write_table
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import INT4_BYTES, Sizes, write_model
from benchmarks.gpu_parts.timing import synchronize, waiting_seconds_of
from benchmarks.stepping import new_prompt, timed_step
from engine.attention.flash_calls import FlashUnavailable, load_flash_calls
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running.model_runner import make_sampler
from engine.sampling.logprobs import RawLogits
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence

NUM_WARM_UP_STEPS = 4
NUM_STEPS = 40
NUM_PROFILED_STEPS = 8
NUM_PREFILLS = 3
KERNELS = "gpu-steps-kernels.txt"

_ids = count()


def measure(setting: Setting) -> Iterator[Row]:
    return measure_with(setting, setting.sizes)


def measure_int8(setting: Setting) -> Iterator[Row]:
    """Weights of layers in int8. Prompts are compared with the same limit, of products in bfloat16."""
    sizes = replace(setting.sizes, model=replace(setting.sizes.model, layer_item_bytes=1))
    return measure_with(setting, sizes, "int8: ", quantization="int8")


def measure_int4(setting: Setting) -> Iterator[Row]:
    """The same in int4."""
    sizes = replace(setting.sizes, model=replace(setting.sizes.model, layer_item_bytes=INT4_BYTES))
    return measure_with(setting, sizes, "int4: ", quantization="int4")


def measure_mixture(setting: Setting) -> Iterator[Row]:
    """An engine with a mixture of experts whose checkpoint is in int4."""
    sizes = replace(setting.sizes, model=setting.sizes.mixture)
    return measure_with(setting, sizes, "int4 experts: ")


def measure_fp8(setting: Setting) -> Iterator[Row]:
    """Weights of layers and KV in fp8. Prompts are compared with the same limit, of products in bfloat16."""
    if setting.device != "cuda":
        raise NotRun("it needs a GPU")
    sizes = replace(setting.sizes, model=replace(setting.sizes.model, layer_item_bytes=1, kv_item_bytes=1))
    return measure_with(setting, sizes, "fp8: ", quantization="fp8", kv_cache_dtype="fp8")


def measure_invariant(setting: Setting) -> Iterator[Row]:
    """With the same bits in any batch: products by our kernels, contexts in pieces of fixed length."""
    if setting.device != "cuda":
        raise NotRun("it needs a GPU")
    return measure_with(setting, setting.sizes, "batch invariant: ", batch_invariant=True)


def measure_flash(setting: Setting) -> Iterator[Row]:
    """With prompts computed by the installed FlashAttention."""
    _, _, head_dim = setting.sizes.attention_heads
    try:
        calls = load_flash_calls(
            device=setting.device, dtype="bfloat16", kv_dtype="bfloat16", head_dim=head_dim,
            block_size=EngineArgs.block_size,
        )  # fmt: skip
    except FlashUnavailable as error:
        raise NotRun(str(error)) from error
    yield from measure_with(setting, setting.sizes, f"{calls.name}: ", attention_backend="flash_attn")


def measure_cublaslt(setting: Setting) -> Iterator[Row]:
    """With torch's products by cuBLASLt, which torch itself uses only for few of them."""
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    except RuntimeError as error:
        raise NotRun(str(error)) from error
    yield from measure_with(setting, setting.sizes, "cuBLASLt: ")


def measure_with(setting: Setting, sizes: Sizes, label: str = "", **settings: Any) -> Iterator[Row]:
    """`settings`: of the engine. `label`: prefix of the rows, empty for the usual engine. `sizes`: for the counted
    bytes and operations."""
    with TemporaryDirectory() as name:
        engine = open_engine(write_model(Path(name), sizes.model.config), setting, **settings)
        steps_ms: list[float] = []
        rows = chain(decode_rows(engine, setting, sizes, steps_ms), prefill_rows(engine, setting, sizes))
        for row in chain(rows, () if label else sampling_rows(engine, setting)):
            yield replace(row, what=label + row.what)
        if not label:
            (setting.results / KERNELS).unlink(missing_ok=True)
        with (setting.results / KERNELS).open("a") as log:
            print(f"\n{label or 'bfloat16: '}what steps are made of", file=log)
        for row in idle_rows(engine, setting, sizes, steps_ms):
            yield replace(row, what=label + row.what)
        if not label:
            log_prefills(engine, setting)


def open_engine(folder: Path, setting: Setting, **settings: Any) -> LLMEngine:
    sizes = setting.sizes
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16", device=setting.device, enable_prefix_caching=False,
        kv_cache_gib=sizes.kv_cache_gib, max_model_len=sizes.max_model_len,
        max_num_seqs=max(batch for batch, _, _ in sizes.decode_steps),
        max_num_batched_tokens=sizes.max_model_len, max_itl_ms=0, **settings,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


def decode_rows(engine: LLMEngine, setting: Setting, sizes: Sizes, steps_ms: list[float]) -> Iterator[Row]:
    """Also appends the times to `steps_ms`."""
    for batch, context, target in sizes.decode_steps:
        with decoding(engine, batch, context):
            step_ms = 1e3 * statistics.median(timed_step(engine) for _ in range(NUM_STEPS))
        steps_ms.append(step_ms)
        yield Row(
            what=f"decode step, {batch} x {context}", value=step_ms, unit="ms", target=target,
            limit=decode_limit_ms(sizes, batch, context, setting.known.get(floors.COPY)),
            note=f"{1e3 * batch / step_ms:,.0f} tokens/s",
        )  # fmt: skip


@contextmanager
def decoding(engine: LLMEngine, batch: int, context: int) -> Iterator[None]:
    """Keep `batch` requests decoding, with contexts of about `context` tokens each."""
    names = begin_decoding(engine, batch, context)
    for _ in range(NUM_WARM_UP_STEPS):
        engine.step()
    yield
    assert engine.load().num_running == batch, "the pool is too small for the batch"
    for name in names:
        engine.abort(name)
    while engine.has_unfinished_requests():
        engine.step()


def begin_decoding(engine: LLMEngine, batch: int, context: int) -> list[str]:
    """Start requests and compute their prompts; they have more tokens to generate than are measured. Returns their
    names."""
    names = [f"decode-{next(_ids)}" for _ in range(batch)]
    num_steps = 2 * NUM_WARM_UP_STEPS + NUM_STEPS + NUM_PROFILED_STEPS + batch + 8
    for name in names:
        add_request(engine, name, context, num_steps)
    while engine.load().num_waiting_tokens:
        engine.step()
    return names


def add_request(engine: LLMEngine, name: str, num_tokens: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, new_prompt(num_tokens, engine.config.model.vocab_size), params)


def decode_limit_ms(sizes: Sizes, batch: int, context: int, copy_gb_s: float | None) -> float | None:
    """The time to read everything that a step must read, at the speed of a copy."""
    return None if copy_gb_s is None else sizes.model.decode_bytes(batch, context) / copy_gb_s / 1e6


def prefill_limit_ms(sizes: Sizes, num_prompts: int, length: int, tflop_s: float | None) -> float | None:
    """The time for all operations, at the speed of matrix products."""
    return None if tflop_s is None else num_prompts * sizes.model.prefill_flop(length) / tflop_s / 1e9


def prefill_rows(engine: LLMEngine, setting: Setting, sizes: Sizes) -> Iterator[Row]:
    for num_prompts, length, target in sizes.prefill_steps:
        prefill_seconds(engine, num_prompts, length, setting.device)  # compiles
        times_s = [prefill_seconds(engine, num_prompts, length, setting.device) for _ in range(NUM_PREFILLS)]
        value_ms = 1e3 * statistics.median(times_s)
        yield Row(
            what=f"prefill, {num_prompts} x {length}", value=value_ms, unit="ms", target=target,
            limit=prefill_limit_ms(sizes, num_prompts, length, setting.known.get(floors.PRODUCTS)),
            note=f"{1e3 * num_prompts * length / value_ms:,.0f} tokens/s",
        )  # fmt: skip


def prefill_seconds(engine: LLMEngine, num_prompts: int, length: int, device: str) -> float:
    for _ in range(num_prompts):
        add_request(engine, f"prefill-{next(_ids)}", length, 1)
    seconds = 0.0
    while engine.has_unfinished_requests():
        seconds += timed_step(engine)
    synchronize(device)
    return seconds


# -- what follows the logits ------------------------------------------------------------------------------------------

SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=1, seed=1),
    "drawn, top_p 0.9": SamplingParams(temperature=1, top_p=0.9, seed=1),
}


def sampling_rows(engine: LLMEngine, setting: Setting) -> Iterator[Row]:
    """Sampling is part of every step; the rows above only include greedy sampling. Measured from launch to result, one
    step at a time."""
    batch, vocab_size = setting.sizes.decode_steps[-1][0], setting.sizes.model.config["vocab_size"]
    sampler = make_sampler(engine.config)
    logits_SV = torch.randn(batch, vocab_size, device=setting.device) * 4
    if engine.config.device.attention_backend != "cpu":  # whose kernels compute logits in float32
        logits_SV = logits_SV.bfloat16()
    last_ids_S = torch.zeros(batch, dtype=torch.int64, device=setting.device)
    for what, params in SAMPLING.items():
        seqs = [Sequence(number, str(number), [0], 1, params) for number in range(batch)]
        seconds = waiting_seconds_of(lambda seqs=seqs: sampler.sample(logits_SV, seqs, last_ids_S), setting.device)
        yield Row(what=f"sampling {batch} rows, {what}", value=1e3 * seconds, unit="ms")
    asking = [Sequence(number, str(number), [0], 1, SamplingParams(logprobs=5)) for number in range(batch)]

    def tell() -> None:
        raw_logits = RawLogits.of(logits_SV, asking)
        assert raw_logits is not None
        raw_logits.logprobs(last_ids_S).read()

    value = 1e3 * waiting_seconds_of(tell, setting.device)
    yield Row(what=f"logprobs of {batch} rows, 5", value=value, unit="ms")


# -- how long the device has nothing to do --------------------------------------------------------------------------


def idle_share(step_ms: float, busy_ms: float) -> float:
    """If it is negative, one of the numbers is wrong; it is shown unchanged."""
    return 1 - busy_ms / step_ms


def idle_rows(engine: LLMEngine, setting: Setting, sizes: Sizes, steps_ms: Seq[float]) -> Iterator[Row]:
    """`steps_ms`: the time of a step of each kind without the profiler."""
    for (batch, context, _), step_ms in zip(sizes.decode_steps, steps_ms, strict=True):
        with decoding(engine, batch, context):
            row = idle_row(f"device idle, {batch} x {context}", step_ms, engine, setting)
        yield row


def idle_row(what: str, step_ms: float, engine: LLMEngine, setting: Setting) -> Row:
    """If the machine's profiler sees nothing, the row says so, and the rest is still measured."""
    unit = "% of a step"
    try:
        work = profiled(engine.step, NUM_PROFILED_STEPS, setting.device, num_warm_up_calls=NUM_WARM_UP_STEPS)
    except RuntimeError as error:
        return Row(what=what, value=None, unit=unit, note=f"not known: {error}")
    write_table(setting.results / KERNELS, what.removeprefix("device idle, "), work)
    note = f"busy for {work.busy_ms:.3f} ms" + ("" if setting.device == "cuda" else " (a CPU's operations)")
    return Row(what=what, value=100 * idle_share(step_ms, work.busy_ms), unit=unit, note=note)


def log_prefills(engine: LLMEngine, setting: Setting) -> None:
    """Write the kernels of prompts' steps, only to that file."""
    for num_prompts, length, _ in setting.sizes.prefill_steps:
        prefill = partial(prefill_seconds, engine, num_prompts, length, setting.device)
        with suppress(RuntimeError):  # the decoding rows already say that the profiler sees nothing
            work = profiled(prefill, 1, setting.device, num_warm_up_calls=1)
            write_table(setting.results / KERNELS, f"{num_prompts} x {length}", work)
