"""Measures KV between device and host memory: how fast blocks are saved and loaded (and that they are unchanged); how
this affects steps that run meanwhile; and a prompt that returns after others have evicted it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from benchmarks.gpu_parts.shapes import Sizes, write_model
from benchmarks.gpu_parts.steps import NUM_STEPS, decoding
from benchmarks.gpu_parts.timing import synchronize
from benchmarks.offloading import first_token
from benchmarks.stepping import new_prompt, timed_step
from engine.config import GIB
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running.host_copies import HostCopies
from engine.scheduling.offloading import BlockCopy

NUM_ROUNDS = 5
NUM_IN_POOL = 5
"""Prompts that the pool has room for. A quarter of the pool is always kept available."""
SHARE = 0.8
"""Target as a share of the transfer speed to the host and back."""


def measure(setting: Setting) -> Iterator[Row]:
    yield from copy_rows(setting)
    with TemporaryDirectory() as name:
        engine = open_engine(write_model(Path(name), setting.sizes.model.config), setting)
        yield from prompt_rows(engine, setting)
        yield from step_rows(engine, setting.sizes)
        engine.close()


def copy_rows(setting: Setting) -> Iterator[Row]:
    sizes = setting.sizes
    num_layers = sizes.model.config["num_hidden_layers"]
    block_bytes = sizes.model.kv_bytes(EngineArgs.block_size) // num_layers
    num_blocks = max(2, sizes.host_bytes // (num_layers * block_bytes))
    # In a pool of realistic size, the layers of a block are gigabytes apart.
    num_in_pool = max(num_blocks, int(sizes.kv_cache_gib * GIB) // (num_layers * block_bytes))
    pool = torch.zeros(num_layers, num_in_pool, block_bytes, dtype=torch.uint8, device=setting.device)
    before = torch.randint(0, 256, (num_layers, num_blocks, block_bytes), dtype=torch.uint8, device=setting.device)
    order = torch.randperm(num_in_pool)[:num_blocks].tolist()
    on_device = torch.tensor(order, device=setting.device)
    pool.index_copy_(1, on_device, before)
    copies = HostCopies(pool, num_blocks)
    for what, is_load, limit in (
        ("saved to the host", False, setting.known.get(floors.TO_HOST)),
        ("loaded from the host", True, setting.known.get(floors.TO_DEVICE)),
    ):
        if is_load:
            pool.zero_()
            synchronize(setting.device)
        seconds = [
            seconds_of(copies, [BlockCopy(is_load, b, h) for h, b in enumerate(order)]) for _ in range(NUM_ROUNDS)
        ]
        value = num_blocks * num_layers * block_bytes / statistics.median(seconds) / 1e9
        yield Row(what=f"blocks {what}", value=value, unit="GB/s", limit=limit, target=SHARE,
                  note=f"{num_blocks} of {num_layers} layers")  # fmt: skip
    num_wrong = int((pool.index_select(1, on_device) != before).any(dim=2).any(dim=0).sum())
    yield Row(what="blocks unlike what was saved", value=num_wrong, unit="of them", at_most=0, is_check=True)
    copies.close()


def seconds_of(copies: HostCopies, batch: Sequence[BlockCopy]) -> float:
    start_s = time.perf_counter()
    copies.begin(batch)
    while copies.wait():
        copies.take_done()
    return time.perf_counter() - start_s


def open_engine(folder: Path, setting: Setting) -> LLMEngine:
    """An engine whose pool has room for a few of the prompts, and whose host memory has room for all."""
    num_blocks = NUM_IN_POOL * (longest(setting.sizes) // EngineArgs.block_size + 1)
    args = EngineArgs(
        model=str(folder), load_format="dummy", dtype="bfloat16", device=setting.device, num_kv_blocks=num_blocks,
        kv_offloading_size=2 * NUM_IN_POOL * setting.sizes.model.kv_bytes(longest(setting.sizes)) / GIB, max_itl_ms=0,
        max_model_len=longest(setting.sizes) + 1, max_num_batched_tokens=longest(setting.sizes), max_num_seqs=8,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


def longest(sizes: Sizes) -> int:
    """Tokens of the longest prompts."""
    return max(length for _, length, _ in sizes.prefill_steps)


def prompt_rows(engine: LLMEngine, setting: Setting) -> Iterator[Row]:
    """The time to the first token of a new prompt, and of one that came before."""
    num_tokens, vocab_size = longest(setting.sizes), engine.config.model.vocab_size
    first_token(engine, "warm-up", new_prompt(num_tokens, vocab_size))
    times_ms: dict[str, list[float]] = {"computed": [], "from the host": []}
    for number in range(NUM_ROUNDS):
        prompts = [new_prompt(num_tokens, vocab_size) for _ in range(NUM_IN_POOL + 3)]
        for i, prompt in enumerate(prompts):
            times_ms["computed"].append(1e3 * first_token(engine, f"{number}-{i}", prompt)[1])
            let_copies_end(engine)
        before = engine.stats.num_loaded_tokens
        times_ms["from the host"].append(1e3 * first_token(engine, f"{number}-again", prompts[0])[1])
        assert engine.stats.num_loaded_tokens - before > 0.7 * num_tokens, "it was not found"
    for what, all_ms in times_ms.items():
        yield Row(what=f"first token of {num_tokens}, {what}", value=statistics.median(all_ms), unit="ms")


def let_copies_end(engine: LLMEngine) -> None:
    engine.step()
    while engine.executor.wait_for_copies():
        engine.step()


def step_rows(engine: LLMEngine, sizes: Sizes) -> Iterator[Row]:
    """Decoding alone, and during continuous copies."""
    _, context, _ = sizes.decode_steps[0]
    pool = engine.executor.kv_pool
    num_blocks = min(64, pool.shape[1])
    with decoding(engine, 1, min(context, longest(sizes) // 2)):
        alone = statistics.median(timed_step(engine) for _ in range(NUM_STEPS))
    copies = HostCopies(pool, num_blocks)
    batch = [BlockCopy(False, block_id, block_id) for block_id in range(num_blocks)]
    copies.on_done = lambda: copies.begin(batch[: len(copies.take_done())])
    with decoding(engine, 1, min(context, longest(sizes) // 2)):
        copies.begin(batch)
        beside = statistics.median(timed_step(engine) for _ in range(NUM_STEPS))
    copies.close()
    yield Row(
        what=f"decode step, 1 x {context}, beside copies", value=1e3 * beside, unit="ms", limit=1e3 * alone, target=0.9,
        note="limit: by itself",
    )  # fmt: skip
