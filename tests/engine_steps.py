"""Runs a few steps of every kind through a model runner, to compare engines that must compute the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config
from engine.running.executor import Executor
from engine.running.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence


def arguments(folder: Path, backend: str, device: str, **settings: Any) -> EngineArgs:
    """Return the arguments of an engine that has room for these steps."""
    sizes = {"num_kv_blocks": 32, "block_size": 4, "max_num_seqs": 4} | settings
    return EngineArgs(model=str(folder), load_format="dummy", device=device, attention_backend=backend, **sizes)


def logits_of_steps(args: EngineArgs, *, records: bool) -> list[torch.Tensor]:
    """Return the logits of a chunk, of decodes of different lengths, of both in one step, and of pure decode steps.
    `records`: decode from recordings."""
    config = create_engine_config(args)
    assert config.device.attention_backend == args.attention_backend
    config = replace(config, device=replace(config.device, uses_graphs=records))
    runner = Executor(config)._worker.runner
    if records and args.device == "cpu":  # other devices have recorded at their start
        runner.record_decode_steps(lambda *_: None)
    results = logits_of(runner)
    assert not records or runner._graphs.num_recordings == 3  # batches of 1, 2 and 4
    return results


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits for `logits_of_steps`."""
    seqs = []
    for i, length in enumerate((9, 3, 21)):
        seqs.append(Sequence(0, "r", [(7 * i + j) % 97 for j in range(length)], length, SamplingParams()))
        seqs[-1].block_table = list(range(10 * i, 10 * i + 7))
    results = []
    for counts in [[8, 2, 0], [1, 1, 13], [0, 0, 7], [0, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]]:
        chunks = [ScheduledSequence(seq, count) for seq, count in zip(seqs, counts, strict=True) if count]
        logits = runner.compute(runner.prepare(SchedulerOutput(chunks, []))).logits
        for chunk in chunks:
            chunk.seq.num_computed_tokens += chunk.num_new_tokens
            if chunk.seq.num_uncomputed_tokens == 0:
                chunk.seq.token_ids.append(5 + len(chunk.seq))
        if logits is not None:
            results.append(logits.clone())
    return results
