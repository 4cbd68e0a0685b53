"""A small, fast `AsyncLLM` with an adapter and a real tokenizer, and the helpers that its tests share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grammar_cases import EOS, tokenizer
from lora_folders import CONFIG, write_adapter, write_model

from engine.llm_engine import LLMEngine
from tandem import AsyncLLM, LoRARequest, RequestOutput, SamplingParams

SEEDED = SamplingParams(seed=7, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(seed=3, max_tokens=3000, ignore_eos=True)


def write_settings(folder: Path) -> dict[str, Any]:
    write_model(folder, {**CONFIG, "eos_token_id": EOS, "max_position_embeddings": 4096, "initializer_range": 0.3})
    write_adapter(folder / "sql")
    tokenizer().save(str(folder / "tokenizer.json"))
    return {
        "model": folder, "load_format": "dummy", "device": "cpu", "attention_backend": "torch", "dtype": "float32",
        "num_threads": 1, "num_kv_blocks": 800, "max_num_seqs": 8, "lora_modules": {"sql": str(folder / "sql")},
    }  # fmt: skip


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@contextmanager
def running(settings: dict[str, Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**settings)
    try:
        yield llm
    finally:
        llm.shutdown()
    assert not engine_threads()


async def ask(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, adapter: LoRARequest | None = None, *, name: str = "r"
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name, lora_request=adapter)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the event loop itself must go on
            await asyncio.sleep(0)


def is_at_rest(engine: LLMEngine) -> bool:
    """Whether nothing runs or waits, every block is free or cached, and the audit finds no problem."""
    load, (blocks, problems) = engine.load(), engine.audit()
    is_empty = load.num_running == load.num_waiting == 0 and blocks.num_free + blocks.num_cached == blocks.num_blocks
    return is_empty and not problems
