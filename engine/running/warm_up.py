"""Warms up a GPU before the first request: compiles kernels, lets libraries choose algorithms, and records decode
steps, which the first step of each kind would otherwise do.

    pool allocated ──> recordings ──> prompts ──> prompt and decode in one step ──> written blocks cleared

Owns nothing. On a CPU there is nothing to warm up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import TORCH_DTYPES, clear_blocks
from engine.models.recurrent_shape import FEWEST_IN_SPANS
from engine.running.model_runner import ModelRunner
from engine.running.pool_size import ASKS_FOR_ALL, GREEDY, dummy
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput

REPORT_EVERY = 10
"""Report progress after this many recordings."""


def warm_up(config: EngineConfig, runner: ModelRunner, kv_pool: torch.Tensor) -> None:
    """Takes seconds, and reports that. Leaves the pool filled with zeros. Raises `ValueError` if `batch_invariant` is
    set and the device does not keep it."""
    report("warming up (takes some seconds)")
    start_s = time.monotonic()
    if config.device.batch_invariant:
        from engine.kernels.gpu.product import check_rows_agree

        check_rows_agree(config.device.device, TORCH_DTYPES[config.model.dtype])
    # All blocks of a sequence are the same block, and both sequences share it if the pool has only one: nobody reads
    # the results.
    block_ids = 0, min(1, kv_pool.shape[1] - 1)
    # Record first: each recording begins by freeing all cached memory, which the steps should leave cached.
    num_recordings = runner.record_decode_steps(_report_recordings)
    # With async scheduling two steps are in flight, each with its own pinned memory. Allocating that later would wait
    # for the device.
    num_ahead = 2 if config.scheduler.async_scheduling else 1
    for step in warm_up_steps(config, *block_ids):
        for launched in [runner.launch(step, runner.prepare(step)) for _ in range(num_ahead)]:
            launched.wait()
    clear_blocks(kv_pool, sorted(set(block_ids)))
    recorded = f"; captured CUDA graphs of {num_recordings} sizes of decoding steps" if num_recordings else ""
    report(f"warmed up in {time.monotonic() - start_s:.1f} s{recorded}")


def _report_recordings(num_recorded: int, num_all: int) -> None:
    if num_recorded % REPORT_EVERY == 0:
        report(f"captured CUDA graphs of {num_recorded} of {num_all} sizes of decoding steps")


def warm_up_steps(config: EngineConfig, first_block: int, second_block: int) -> Iterator[SchedulerOutput]:
    """Yield steps of prompts, one for each number of tokens at which kernels may be chosen differently. Then steps with
    a prompt that uses every sampling option beside a decoding sequence, with the longest context and with the shortest.

    The largest come first: smaller ones then fit into the memory that torch keeps of those."""
    block_size, longest = config.cache.block_size, config.model.max_model_len
    most, max_num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs

    def scheduled(number: int, length: int, num_new: int, block: int, params: SamplingParams) -> ScheduledSequence:
        # One adapter is enough: all adapters use the same launches.
        lora_id = min(1, len(config.lora_modules) + config.lora_room.num)
        return dummy(number, length, num_new, [block] * -(-length // block_size), params, lora_id)

    for num_tokens in prompt_lengths(most):
        whole, rest = divmod(num_tokens, longest)
        lengths = ([longest] * whole + [rest] * (rest > 0))[:max_num_seqs]
        prompts = [scheduled(number, n, n, first_block, GREEDY) for number, n in enumerate(lengths)]
        yield SchedulerOutput(prompts, [])
    # Enough tokens for spans: their kernels are compiled once more for an even number of sequences, with which the
    # arrays that a step sends in one piece are aligned in another way.
    length = max(1, min(most - 1, longest, max(block_size, FEWEST_IN_SPANS)))
    for context_len in (longest, 1):
        decoding = scheduled(0, context_len, 1, first_block, GREEDY)
        yield SchedulerOutput([decoding, scheduled(1, length, length, second_block, ASKS_FOR_ALL)], [])


def prompt_lengths(most: int) -> list[int]:
    """1, 16, then doubled up to `most`; returned largest first. Libraries and our kernels for 8-bit weights choose
    algorithms by the number of rows, and load or compile them at the first launch."""
    lengths = [1, 16]
    while lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return sorted({min(length, most) for length in lengths}, reverse=True)
