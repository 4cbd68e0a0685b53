"""Checks that `batch_invariant` holds, and measures what it costs.

Check: an engine with some of Llama-3.1-8B's layers must give each logprob of its answers with the same bits for all
requests at once, one by one and in chunks. For comparison, counts how many differ without it: a check that cannot fail
would find none.

Cost: the speed of its products, in decoding compared with the copy and in prompts with the library's products; and of
its attention (attention without it is in the part `attention`). Whole steps are in the part `steps-invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.attention import random_pool
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import NotRun, Setting
from benchmarks.gpu_parts.shapes import attention_bytes, attention_flop, write_model
from benchmarks.gpu_parts.timing import cache_bytes, num_sets
from benchmarks.gpu_parts.variants import Choice, Job, launches_over_weights, rows_in_use, rows_of_variants
from benchmarks.stepping import new_prompt
from engine.engine_args import EngineArgs
from engine.kernels.gpu import why_no_triton
from engine.kernels.gpu.gpu_kind import gpu_kind
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.models.scores import Scores
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.kernels.gpu.eight_bits import ProductConfig
    from engine.kernels.gpu.pieces import PiecesCall, PiecesConfig

NUM_LAYERS = 4
NUM_TOKENS = 24
"""Tokens of an answer."""
PRODUCT_VARIANTS: tuple[dict[str, int], ...] = (
    {"num_stages": 3}, {"num_stages": 6}, {"num_warps": 8}, {"num_warps": 4}, {"block_n": 128, "num_warps": 8},
    {"block_t": 128}, {"block_t": 256, "num_stages": 3},
)  # fmt: skip
"""Differences from the configuration in use. Not the inputs of a tile, which determine the order of addition."""

Told = dict[str, list[tuple[int, float]]]
"""Tokens of each request with their logprobs."""


def measure(setting: Setting) -> Iterator[Row]:
    check_triton(setting)
    yield from bits_rows(setting)
    yield from rows_in_use(choices(setting), setting)


def measure_variants(setting: Setting) -> Iterator[Row]:
    check_triton(setting)
    yield from rows_of_variants(choices(setting), setting)


def check_triton(setting: Setting) -> None:
    """Raises `NotRun` without Triton."""
    why_not = why_no_triton(setting.device)
    if why_not:
        raise NotRun(why_not)


def choices(setting: Setting) -> Iterator[Choice]:
    from engine.kernels.gpu.pieces import PiecesConfig
    from engine.kernels.gpu.product import row_config

    # Triton's interpreter does not compute bfloat16.
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    kind = gpu_kind(setting.device)
    for name, num_outputs, num_inputs in setting.sizes.model.products:
        # A prompt has logits only for its last token.
        many = () if name == "logits" else (setting.sizes.prompt_rows,)
        for num_rows in (*setting.sizes.product_rows, *many):
            what = f"invariant, {name} {num_outputs} x {num_inputs}, {num_rows} rows"
            job = product_job(what, num_rows, num_outputs, num_inputs, dtype, setting)
            yield Choice(job, row_config(kind, num_rows, dtype.itemsize), PRODUCT_VARIANTS)
    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    config = PiecesConfig.of(kind, head_dim, dtype.itemsize, num_heads // num_kv_heads)
    for num_seqs, context, _ in setting.sizes.decode_attention:
        yield Choice(decode_job(setting, dtype, num_seqs, context), config)
    for num_prompts, length in setting.sizes.prefill_attention:
        yield Choice(prefill_job(setting, dtype, num_prompts, length), config)


# -- bits -----------------------------------------------------------------------------------------------------------


def bits_rows(setting: Setting) -> Iterator[Row]:
    """How many logprobs differ from those of all requests at once in any bit."""
    config = {**setting.sizes.model.config, "num_hidden_layers": min(NUM_LAYERS, setting.sizes.model.num_layers)}
    lengths = (30, 3, 18) if setting.is_tiny else (700, 3, 300, 65, 1500, 17)
    prompts = {str(i): new_prompt(length, config["vocab_size"]) for i, length in enumerate(lengths)}
    with TemporaryDirectory() as name:
        folder = write_model(Path(name), config)
        for is_kept in (True, False):
            for what, (num_other, num_all) in compared(folder, prompts, setting, batch_invariant=is_kept):
                yield Row(
                    what=f"logprobs of other bits {what}{'' if is_kept else ', without batch_invariant'}",
                    value=num_other, unit=f"of {num_all}", at_most=0 if is_kept else None, is_check=is_kept,
                )  # fmt: skip


def compared(
    folder: Path, prompts: dict[str, list[int]], setting: Setting, *, batch_invariant: bool
) -> Iterator[tuple[str, tuple[int, int]]]:
    """(way of computing, (number that differ, number of all))"""
    settings: dict[str, Any] = {"batch_invariant": batch_invariant}
    engine = engine_of(folder, setting, **settings)
    together = told_by(engine, prompts)
    one_by_one = {name: told_by(engine, {name: prompt})[name] for name, prompt in prompts.items()}
    yield "one by one", differing(together, one_by_one)
    del engine
    in_chunks = engine_of(folder, setting, **settings, prefill_chunk_tokens=7 if setting.is_tiny else 100)
    yield "in chunks", differing(together, told_by(in_chunks, prompts))


def engine_of(folder: Path, setting: Setting, **settings: Any) -> LLMEngine:
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16" if setting.device == "cuda" else "float32",
        device=setting.device, attention_backend="triton", kv_cache_gib=setting.sizes.kv_cache_gib,
        max_model_len=setting.sizes.max_model_len, max_num_seqs=8, enable_prefix_caching=False, **settings,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


def told_by(engine: LLMEngine, prompts: dict[str, list[int]]) -> Told:
    """All at once."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    told: Told = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            told.setdefault(output.request_id, []).extend(
                (each.sampled.token_id, each.sampled.logprob) for each in output.logprobs or ()
            )
    return told


def differing(ours: Told, theirs: Told) -> tuple[int, int]:
    """(number that differ, number of all)"""
    pairs = [pair for name in ours for pair in zip(ours[name], theirs[name], strict=True)]
    return sum(one != other for one, other in pairs), len(pairs)


# -- speed ----------------------------------------------------------------------------------------------------------


def product_job(
    what: str, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, setting: Setting
) -> Job:
    """Measures the weight's bytes for few rows, and operations for many."""
    from engine.kernels.gpu.product import row_product

    num_bytes = num_outputs * num_inputs * dtype.itemsize

    def launches(config: ProductConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        product = partial(row_product, bias_N=None, config=config)
        return launches_over_weights(product, (num_rows, num_outputs, num_inputs), dtype, setting)

    if num_rows < setting.sizes.prompt_rows:
        amount, unit, limit, target = num_bytes / 1e9, "GB/s", floors.COPY, 0.8
    else:
        amount, unit, limit, target = 2e-12 * num_rows * num_outputs * num_inputs, "TFLOP/s", floors.PRODUCTS, 0.6
    return Job(
        what=what, amount=amount, unit=unit, limit=setting.known.get(limit), target=target, launches=launches
    )  # fmt: skip


def decode_job(setting: Setting, dtype: torch.dtype, num_seqs: int, context: int) -> Job:
    """Like `attention.decode_job`."""
    from engine.kernels.gpu.pieces import partial_size

    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads
    num_bytes = num_seqs * attention_bytes(num_kv_heads, head_dim, context, dtype.itemsize)

    def launches(config: PiecesConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        scratch = torch.empty(partial_size(num_seqs, num_heads, head_dim, context), device=setting.device)
        calls = [
            attention_call(setting, dtype, [1] * num_seqs, context, config, scratch)
            for _ in range(num_sets(num_bytes, cache_bytes(setting.device)))
        ]
        return [lambda call=call: call.decode(num_seqs, context) for call in calls], calls[0].out  # type: ignore[misc]

    return Job(
        what=f"invariant, decode attention {num_seqs} x {context}", amount=num_bytes / 1e9, unit="GB/s",
        limit=setting.known.get(floors.COPY), target=None, launches=launches,
    )  # fmt: skip


def prefill_job(setting: Setting, dtype: torch.dtype, num_prompts: int, length: int) -> Job:
    """Like `attention.prefill_job`."""
    from engine.kernels.gpu.prefill import list_tiles

    num_heads, num_kv_heads, head_dim = setting.sizes.attention_heads

    def launches(config: PiecesConfig) -> tuple[list[Callable[[], object]], torch.Tensor]:
        lens = [length] * num_prompts
        call = attention_call(setting, dtype, lens, length, config, torch.empty(0, device=setting.device))
        tiles = list_tiles(np.array(lens), np.array(lens), 0, config.block_m // (num_heads // num_kv_heads))
        on_device = torch.from_numpy(tiles).to(setting.device)
        return [lambda: call.prefill(on_device)], call.out

    return Job(
        what=f"invariant, prefill attention {num_prompts} x {length}",
        amount=num_prompts * attention_flop(num_heads, head_dim, length) / 1e12, unit="TFLOP/s",
        limit=setting.known.get(floors.PRODUCTS), target=None, launches=launches,
    )  # fmt: skip


def attention_call(
    setting: Setting, dtype: torch.dtype, lens: list[int], context: int, config: PiecesConfig, scratch: torch.Tensor
) -> PiecesCall:
    """`lens`: new tokens of each sequence."""
    from engine.kernels.gpu.pieces import PiecesCall

    num_heads, _, head_dim = setting.sizes.attention_heads
    kv, tables = random_pool(len(lens), context, setting, dtype)
    q = torch.randn(sum(lens), num_heads, head_dim, device=setting.device).to(dtype)
    starts = torch.from_numpy(np.cumsum([0, *lens])).int().to(setting.device)
    return PiecesCall(
        q=q, kv=kv, block_tables=tables, context_lens=torch.full_like(starts[1:], context), query_starts=starts,
        out=torch.empty_like(q), scratch=scratch, scores=Scores.of(head_dim), config=config,
    )  # fmt: skip
