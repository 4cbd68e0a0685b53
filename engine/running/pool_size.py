"""Measures how many KV blocks fit on a GPU beside the weights and a step's working memory, by running the largest
steps.

    weights loaded ──> measured_steps over a pool just large enough ──> peak known ──> num_blocks_left ──> the real pool

As in vLLM, `gpu_memory_utilization` is the share of the device's memory that this process may use, whoever uses the
rest.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.attention.latent_forms import Unfolding
from engine.config import EngineConfig
from engine.kv_shape import KVCacheShape, num_state_blocks_of
from engine.models.recurrent_shape import FEWEST_IN_SPANS
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

ASKS_FOR_ALL = SamplingParams(
    temperature=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1,
    presence_penalty=0.1, min_tokens=1, stop_token_ids=frozenset({0}), logit_bias={0: 1.0}, logprobs=20,
    allowed_token_ids=frozenset({1}), prompt_logprobs=20,
)  # fmt: skip
"""The parameters for which a sampler takes the most memory and launches."""

MAX_SPARE_BYTES = 1 << 30
"""Memory left free on a full device, or a fiftieth of the device if that is less: for what drivers and libraries
allocate later, in this process and in others."""

GREEDY = SamplingParams(temperature=0)

RunSteps = Callable[[KVCacheShape, list[SchedulerOutput]], int]
"""Runs steps over a pool of the given shape, with everything else allocated that a serving engine holds, and frees it
all. Returns how many of these bytes torch does not count as allocated."""


def dummy(
    number: int, length: int, num_new_tokens: int, block_table: list[int], params: SamplingParams, lora_id: int
) -> ScheduledSequence:
    """A dummy sequence of `length` tokens, of which the step computes the last `num_new_tokens`."""
    seq = Sequence(number, f"dummy-{number}", [0] * length, length, params, block_table=block_table, lora_id=lora_id)
    seq.num_computed_tokens = length - num_new_tokens
    seq.prompt_logprobs = None if params.prompt_logprobs is None else []
    return ScheduledSequence(seq, num_new_tokens)


def largest_step(config: EngineConfig) -> tuple[int, SchedulerOutput]:
    """Return how many blocks the largest step takes, and that step: the most prompt tokens, in as many sequences as
    rows may be sampled, all of them with every option and computed with an adapter."""
    scheduler, block_size = config.scheduler, config.cache.block_size
    num_seqs = min(scheduler.max_decode_rows, scheduler.max_num_batched_tokens)
    length = min(scheduler.max_num_batched_tokens // num_seqs, config.model.max_model_len)
    blocks_each = -(-length // block_size)
    lora_id = _largest_adapter(config)
    tables = [list(range(first, first + blocks_each)) for first in range(0, num_seqs * blocks_each, blocks_each)]
    prompts = [dummy(number, length, length, table, ASKS_FOR_ALL, lora_id) for number, table in enumerate(tables)]
    return num_seqs * blocks_each, SchedulerOutput(prompts, [])


def longest_step(config: EngineConfig) -> SchedulerOutput:
    """The most tokens that one sequence may compute in a step, at the end of the longest context. All its blocks are
    block 0, since nobody reads the result."""
    scheduler, longest = config.scheduler, config.model.max_model_len
    num_new = max(1, min(scheduler.prefill_chunk_tokens, scheduler.max_num_batched_tokens, longest - 1))
    return SchedulerOutput([_at_the_longest_end(config, 0, num_new)], [])


def unfolding_step(config: EngineConfig) -> SchedulerOutput | None:
    """The most tokens that a step may have, in the most sequences that unfold their context, each at the end of the
    longest context: slices are as full as possible, and sequences continue in further slices
    (engine/attention/latent_forms.py). None if nothing is unfolded."""
    scheduler, model = config.scheduler, config.model
    unfolding = None if model.mla is None else Unfolding.of(model.mla)
    if unfolding is None or config.device.batch_invariant:
        return None
    most = scheduler.max_num_batched_tokens
    num_seqs = max(1, min(scheduler.max_num_seqs, most // unfolding.from_tokens))
    num_new = max(1, min(most // num_seqs, scheduler.prefill_chunk_tokens, model.max_model_len - 1))
    return SchedulerOutput([_at_the_longest_end(config, number, num_new) for number in range(num_seqs)], [])


def spans_step(config: EngineConfig) -> SchedulerOutput | None:
    """As many prompts as layers that keep a state can compute in spans, as short as possible but for the first ones,
    which have the remaining tokens: the most spans, but for a few (engine/kernels/gpu/delta_spans.py keeps something of
    each). None if there are no spans."""
    scheduler, model = config.scheduler, config.model
    most = scheduler.max_num_batched_tokens
    longest = min(scheduler.prefill_chunk_tokens, model.max_model_len)
    num_seqs = min(scheduler.max_num_seqs, most // FEWEST_IN_SPANS)
    if not model.recurrent_bytes or not num_seqs or longest < FEWEST_IN_SPANS:
        return None
    num_spare, lora_id, prompts = most - num_seqs * FEWEST_IN_SPANS, _largest_adapter(config), []
    for number in range(num_seqs):
        length = min(FEWEST_IN_SPANS + num_spare, longest)
        num_spare -= length - FEWEST_IN_SPANS
        table = [0] * -(-length // config.cache.block_size)
        prompts.append(dummy(number, length, length, table, GREEDY, lora_id))
    return SchedulerOutput(prompts, [])


def _at_the_longest_end(config: EngineConfig, number: int, num_new: int) -> ScheduledSequence:
    longest = config.model.max_model_len
    table = [0] * -(-longest // config.cache.block_size)
    return dummy(number, longest, num_new, table, GREEDY, _largest_adapter(config))


def _largest_adapter(config: EngineConfig) -> int:
    """The number of the adapter with the highest rank; 0 if there is none. Several adapters in a step take no more
    memory, since each takes that of its own rows. If there is room for further adapters, return the number of the first
    of those, for which the largest permitted rank is allocated."""
    ranks = [0, *(module.rank for module in config.lora_modules)]
    return len(ranks) if config.lora_room.num else ranks.index(max(ranks))


def measured_steps(config: EngineConfig) -> tuple[int, list[SchedulerOutput]]:
    """Return how many blocks the steps to measure take, and these steps."""
    num_blocks, step = largest_step(config)
    if config.device.attention_backend == "torch":  # gathers a step's whole context, and keeps that memory
        of_contexts: SchedulerOutput | None = longest_step(config)
    else:
        of_contexts = unfolding_step(config)
    return num_blocks, [each for each in (of_contexts, spans_step(config), step) if each is not None]


def measure_num_blocks(
    config: EngineConfig, shape: KVCacheShape, run_steps: RunSteps, block_bytes_beside: int = 0
) -> int:
    """Return the number of blocks for a pool of `shape`, whose `num_blocks` is ignored. `block_bytes_beside`: bytes
    that each block needs elsewhere. Raises `ValueError` if one request of `max_model_len` tokens would not fit."""
    num_step_blocks, steps = measured_steps(config)
    step_shape = replace(shape, num_blocks=num_step_blocks)
    torch.cuda.reset_peak_memory_stats()
    kept_bytes = run_steps(step_shape, steps)
    peak = torch.cuda.max_memory_allocated() + kept_bytes - step_shape.pool_bytes
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return num_blocks_left(
        total_bytes=total,
        peak_bytes=peak,
        free_bytes=free - (peak - torch.cuda.memory_allocated()),
        utilization=config.cache.gpu_memory_utilization,
        block_bytes=replace(shape, num_blocks=1).pool_bytes + block_bytes_beside,
        num_needed=-(-config.model.max_model_len // config.cache.block_size)
        + num_state_blocks_of(config.model.recurrent_bytes, shape.all_layers_bytes),
    )


def num_blocks_left(
    *, total_bytes: int, peak_bytes: int, free_bytes: int, utilization: float, block_bytes: int, num_needed: int
) -> int:
    """How many blocks fit on a device of `total_bytes`. Weights and a step take up to `peak_bytes`; `free_bytes` are
    free beside them, less than the rest if other processes use the device. `block_bytes`: of one block in all layers.
    Raises `ValueError` if fewer than `num_needed` blocks fit."""
    spare_bytes = min(MAX_SPARE_BYTES, total_bytes // 50)
    num_blocks = int(min(total_bytes * utilization - peak_bytes, free_bytes - spare_bytes)) // block_bytes
    if num_blocks >= num_needed:
        return num_blocks
    gib = 1 << 30
    raise ValueError(
        f"gpu_memory_utilization {utilization} leaves room for {max(0, num_blocks)} KV blocks, but a request of "
        f"max_model_len tokens needs {num_needed}: raise it, or lower max_model_len or max_num_batched_tokens (the GPU "
        f"has {total_bytes / gib:.1f} GiB, {free_bytes / gib:.1f} of them free; weights and a step take "
        f"{peak_bytes / gib:.1f})"
    )
