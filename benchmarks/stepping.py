"""Shared by all measurements of an engine alone: prompts of which nothing is cached, and a timed step."""

from __future__ import annotations

import time
from itertools import count

from engine.llm_engine import LLMEngine

_seeds = count()


def new_prompt(num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens that begin differently from all earlier prompts, so that none of them is cached."""
    seed = next(_seeds)
    return [(7919 * seed + 31 * i + seed * i) % (vocab_size - 100) + 50 for i in range(num_tokens)]


def timed_step(engine: LLMEngine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start
