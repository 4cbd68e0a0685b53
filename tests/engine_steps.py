"""A few steps of every kind through a model runner, for engines that are to compute the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineArgs
from engine.executor import Executor
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from engine.sequence import ScheduledSequence, SchedulerOutput, Sequence


def logits_of_steps(folder: Path, backend: str, device: str, *, records: bool, **settings: str) -> list[torch.Tensor]:
    """A chunk, decodes of different lengths, both in one step, and steps that only decode."""
    args = EngineArgs(
        model=str(folder), load_format="dummy", num_kv_blocks=32, block_size=4, device=device,
        attention_backend=backend, max_num_seqs=4, **settings,
    )  # fmt: skip
    config = create_engine_config(args)
    assert config.device.attention_backend == backend
    config = replace(config, device=replace(config.device, uses_graphs=records))
    runner = Executor(config)._worker._runner
    seqs = []
    for i, length in enumerate((9, 3, 21)):
        seqs.append(Sequence(0, "r", [(7 * i + j) % 97 for j in range(length)], length, SamplingParams()))
        seqs[-1].block_table = list(range(10 * i, 10 * i + 6))
    results = []
    for counts in [[8, 2, 0], [1, 1, 13], [0, 0, 7], [0, 0, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]]:
        chunks = [ScheduledSequence(seq, count) for seq, count in zip(seqs, counts, strict=True) if count]
        _, logits = runner.forward(SchedulerOutput(chunks, [], []))
        for chunk in chunks:
            chunk.seq.num_computed_tokens += chunk.num_new_tokens
            if chunk.seq.num_uncomputed_tokens == 0:
                chunk.seq.token_ids.append(5 + len(chunk.seq))
        if logits is not None:
            results.append(logits.clone())
    assert not records or runner._graphs.num_recordings == 3  # of 1, 2 and 4: by the steps, on a GPU before the first
    return results
