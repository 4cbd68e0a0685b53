"""Engines on the pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.engine_args import EngineArgs
from engine.kv_memory import KVMemory
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling.sampled_tokens import SampledTokens
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import OnLayerWritten, SchedulerOutput
from pretend_gpu.streams import without_waiting

SMALL: dict[str, Any] = {"attention_backend": "triton", "max_num_batched_tokens": 64}
"""For engines whose kernels are interpreted: otherwise the warm-up would interpret prompts of 2,048 tokens."""
IN_TURN = {"enforce_eager": True, "async_scheduling": False}
GUESSING = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}
REPEATING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=0.6)
"""An answer that repeats itself, so that guesses are right."""


def make_engine(
    folder: Path,
    config: dict[str, Any],
    memory: KVMemory | None = None,
    on_layer_written: OnLayerWritten | None = None,
    **settings: Any,
) -> LLMEngine:
    """An engine with random weights. If its device is the GPU, a launch that waits for it is an error."""
    (folder / "config.json").write_text(json.dumps(config))
    defaults: dict[str, Any] = {
        "load_format": "dummy", "dtype": "float32", "block_size": 4, "num_kv_blocks": 256, "num_threads": 1,
        "device": "cuda", "attention_backend": "torch", "max_num_seqs": 16,
    }  # fmt: skip
    engine_config = create_engine_config(EngineArgs(model=str(folder), **defaults | settings))
    engine = LLMEngine(engine_config, on_layer_written, memory)
    launch = engine.executor.launch

    def launch_without_waiting(output: SchedulerOutput) -> SampledTokens:
        with without_waiting():
            return launch(output)

    if engine.config.device.device == "cuda":
        engine.executor.launch = launch_without_waiting  # type: ignore[method-assign]
    return engine
