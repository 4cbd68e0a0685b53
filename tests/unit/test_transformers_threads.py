"""Threads that load models which transformers' code computes, at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import torch
import transformers
from model_bench import Bench, save_model
from test_transformers_models import CONFIGS, engine_config

from engine.models import load_model_shape
from engine.models.transformers_probe import MAKING


def test_what_is_the_processs_own_stays_as_it_was(tmp_path: Path) -> None:
    """torch's default dtype, which transformers changes for all threads while it makes a model, and its progress
    bars."""
    save_model(CONFIGS["gpt2"](), tmp_path)
    transformers.logging.enable_progress_bar()
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            list(threads.map(lambda dtype: Bench(engine_config(tmp_path, dtype=dtype)), ["bfloat16", "float32"] * 2))
    assert torch.get_default_dtype() == torch.float32
    assert transformers.logging.is_progress_bar_enabled()


def test_what_is_replaced_does_not_depend_on_the_default_dtype(tmp_path: Path) -> None:
    """Another thread may be making models."""
    save_model(CONFIGS["gemma3"](), tmp_path)
    settings: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "attention_backend": "cpu"}

    def found() -> tuple[Any, list[type]]:
        config = engine_config(tmp_path, **settings)
        modules = [type(module) for module in Bench(config).runner._model._body.modules()]  # type: ignore[attr-defined]
        return load_model_shape(config.model.hf_config, "transformers"), modules

    def change_it(ends: Event) -> None:
        while not ends.wait(0.001):
            with MAKING:
                torch.set_default_dtype(torch.bfloat16)
                try:
                    ends.wait(0.001)
                finally:
                    torch.set_default_dtype(torch.float32)

    expected, ends = found(), Event()
    with ThreadPoolExecutor(1) as thread:
        changing = thread.submit(change_it, ends)
        try:
            for _ in range(5):
                assert found() == expected
        finally:
            ends.set()
        changing.result()
