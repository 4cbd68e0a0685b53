"""What a device's first step of each kind costs, kernels compiled, algorithms chosen, decoding steps recorded, is spent
before the first request.

    pool allocated ──> recordings ──> prompts ──> one beside a sequence that decodes ──> what they wrote cleared

Owns nothing. On a CPU there is nothing to warm up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES, clear_blocks
from engine.running.model_runner import ModelRunner
from engine.running.pool_size import ASKS_FOR_ALL, GREEDY, dummy
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput

REPORT_EVERY = 10
"""Recordings."""


def warm_up(config: EngineConfig, runner: ModelRunner, kv_pool: torch.Tensor) -> None:
    """Takes seconds, and says so. Leaves a pool of zeros. Raises `ValueError` where the device does not keep
    `batch_invariant`."""
    report("warming up (seconds)")
    start_s = time.monotonic()
    if config.device.batch_invariant:
        from engine.kernels.gpu.product import check_rows_agree

        check_rows_agree(config.device.device, TORCH_DTYPES[config.model.dtype])
    # All blocks of a sequence are the same one, and of two sequences where there is one alone: nobody looks at what
    # they compute.
    block_ids = 0, min(1, kv_pool.shape[1] - 1)
    # First, as each recording begins by giving back all memory that is free, and steps are to find some when they come.
    num_recordings = runner.record_decode_steps(_report_recordings)
    # With a step ahead two are in flight, each with pinned memory of its own: to ask the driver for it later would wait
    # for the device.
    num_ahead = 2 if config.scheduler.async_scheduling else 1
    for step in warm_up_steps(config, *block_ids):
        for launched in [runner.launch(step, runner.prepare(step)) for _ in range(num_ahead)]:
            launched.wait()
    clear_blocks(kv_pool, sorted(set(block_ids)))
    recorded = f"; decoding steps of {num_recordings} sizes are recorded" if num_recordings else ""
    report(f"warmed up in {time.monotonic() - start_s:.1f} s{recorded}")


def _report_recordings(num_recorded: int, num_all: int) -> None:
    if num_recorded % REPORT_EVERY == 0:
        report(f"{num_recorded} of {num_all} sizes of decoding steps are recorded")


def warm_up_steps(config: EngineConfig, first_block: int, second_block: int) -> Iterator[SchedulerOutput]:
    """Prompts of as many tokens together as another kernel may be chosen for; then one that asks for all that a sampler
    can do, beside a sequence that decodes, over the longest context that there can be and over the shortest.

    The largest first: what smaller ones need fits into the memory that torch keeps of them."""
    block_size, longest = config.cache.block_size, config.model.max_model_len
    most, max_num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs

    def scheduled(number: int, length: int, num_new: int, block: int, params: SamplingParams) -> ScheduledSequence:
        # What is launched for any of them is launched for all.
        lora_id = min(1, len(config.lora_modules) + config.lora_room.num)
        return dummy(number, length, num_new, [block] * -(-length // block_size), params, lora_id)

    for num_tokens in prompt_lengths(most):
        whole, rest = divmod(num_tokens, longest)
        lengths = ([longest] * whole + [rest] * (rest > 0))[:max_num_seqs]
        prompts = [scheduled(number, n, n, first_block, GREEDY) for number, n in enumerate(lengths)]
        yield SchedulerOutput(prompts, [])
    length = max(1, min(most - 1, longest, block_size))
    for context_len in (longest, 1):
        decoding = scheduled(0, context_len, 1, first_block, GREEDY)
        yield SchedulerOutput([decoding, scheduled(1, length, length, second_block, ASKS_FOR_ALL)], [])


def prompt_lengths(most: int) -> list[int]:
    """1, 16, doubled until there are `most`, the largest first: libraries and our kernels for weights in 8 bits choose
    by the number of rows, and what they choose is loaded, or compiled, when it is first launched."""
    lengths = [1, 16]
    while lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return sorted({min(length, most) for length in lengths}, reverse=True)
