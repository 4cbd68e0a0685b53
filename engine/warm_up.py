"""What a device's first step of each kind costs, kernels compiled, algorithms chosen, decoding steps recorded, is spent
before the first request.

    pool allocated ──> prompts ──> a prompt beside a sequence that decodes ──> recordings ──> what they wrote cleared

Owns nothing. On a CPU there is nothing to warm up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from engine.cache_dir import report
from engine.config import EngineConfig
from engine.kv_cache import clear_blocks
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import ScheduledSequence, SchedulerOutput, Sequence

REPORT_EVERY = 10
"""Recordings."""
_PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1),
)
"""Of what a step may be asked for, all that takes other launches."""


def warm_up(config: EngineConfig, runner: ModelRunner, kv_pool: torch.Tensor) -> None:
    """Takes seconds, and says so. Leaves a pool of zeros."""
    report("warming up: compiling kernels and recording decoding steps (seconds)")
    start_s = time.monotonic()
    # Of two sequences; the same block for both where there is one alone: nobody looks at what they compute.
    block_ids = 0, min(1, kv_pool.shape[1] - 1)
    for step in warm_up_steps(config, *block_ids):
        runner.launch(step).wait()
    num_recordings = runner.record_decode_steps(_report_recordings)
    clear_blocks(kv_pool, sorted(set(block_ids)))
    seconds = time.monotonic() - start_s
    report(f"warmed up in {seconds:.1f} s; decoding steps of {num_recordings} sizes are recorded")


def _report_recordings(num_recorded: int, num_all: int) -> None:
    if num_recorded % REPORT_EVERY == 0:
        report(f"{num_recorded} of {num_all} sizes of decoding steps are recorded")


def warm_up_steps(config: EngineConfig, first_block: int, second_block: int) -> Iterator[SchedulerOutput]:
    """A prompt alone; then one beside a sequence that decodes."""
    most = min(config.scheduler.max_num_batched_tokens - 1, config.model.max_model_len, config.cache.block_size)
    length = max(most, 1)
    yield SchedulerOutput([_prompt(0, length, first_block, _PARAMS[0])], [], [])
    decoding, prompt = _prompt(1, 1, first_block, _PARAMS[0]), _prompt(2, length, second_block, _PARAMS[1])
    yield SchedulerOutput([decoding, prompt], [], [])


def _prompt(number: int, length: int, block_id: int, params: SamplingParams) -> ScheduledSequence:
    return ScheduledSequence(
        Sequence(number, f"warm-up-{number}", [0] * length, length, params, block_table=[block_id]), length
    )
