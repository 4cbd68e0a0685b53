"""Measures decoding steps with drafts (docs/speculation.md), of the engine of `steps`. Each draft is a row of its own
of a recorded step. All are wrong (with random weights, those of a draft model or head hardly ever are right), so that
every step has as many.

The limit of a step is the time for the bytes that it reads: as many as without drafts, and the weights and context of a
draft model or head once for each draft.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, MutableSequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from benchmarks.gpu_parts import floors
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.runner import Setting
from benchmarks.gpu_parts.shapes import ModelShape, Sizes, write_model
from benchmarks.gpu_parts.steps import NUM_STEPS, decode_limit_ms, decoding, open_engine
from benchmarks.stepping import timed_step
from engine.llm_engine import LLMEngine
from engine.scheduling.speculation import DraftHistory, SpeculativeConfig

NUM_DRAFTS = 4
BATCHES = (1, 7)
"""Eight would read too much again for rows of their own (`MAX_TOKENS_READ_AGAIN`)."""


def measure(setting: Setting) -> Iterator[Row]:
    """With looked-up drafts, which cost nothing."""
    sizes = setting.sizes
    context = sizes.decode_steps[0][1]
    config = f'{{"method": "ngram", "num_speculative_tokens": {NUM_DRAFTS}}}'
    with TemporaryDirectory() as name:
        engine = open_engine(write_model(Path(name), sizes.model.config), setting, speculative_config=config)
        for batch in batches(sizes):
            limit_ms = decode_limit_ms(sizes, batch, context, setting.known.get(floors.COPY))
            for num_drafts in (0, NUM_DRAFTS):
                yield Row(
                    what=f"decode step, {batch} x {context}, {num_drafts} drafts each",
                    value=step_ms(engine, batch, context, num_drafts), unit="ms", limit=limit_ms,
                )  # fmt: skip


def measure_model(setting: Setting) -> Iterator[Row]:
    """With a draft model. A note says how many guesses of a step must be right on average for it to win."""
    yield from _measure_guessing(setting, setting.sizes.draft, "a draft model", {})


def measure_head(setting: Setting) -> Iterator[Row]:
    """With an EAGLE-3 head. A note says how many guesses of a step must be right on average for it to win."""
    yield from _measure_guessing(setting, setting.sizes.head, "a head", {"method": "eagle3"})


def _measure_guessing(setting: Setting, guessing: ModelShape, by: str, method: dict[str, str]) -> Iterator[Row]:
    sizes = setting.sizes
    context = sizes.decode_steps[0][1]
    copy_gb_s = setting.known.get(floors.COPY)
    with TemporaryDirectory() as name:
        folder = write_model(Path(name) / "guessing", guessing.config)
        config = json.dumps({**method, "model": str(folder), "num_speculative_tokens": NUM_DRAFTS})
        engine = open_engine(write_model(Path(name) / "model", sizes.model.config), setting, speculative_config=config)
        for batch in batches(sizes):
            plain_ms, guessing_ms = (step_ms(engine, batch, context, num_drafts) for num_drafts in (0, NUM_DRAFTS))
            limit_ms = decode_limit_ms(sizes, batch, context, copy_gb_s)
            if limit_ms is not None and copy_gb_s is not None:
                limit_ms += NUM_DRAFTS * guessing.decode_bytes(batch, context) / copy_gb_s / 1e6
            yield Row(
                what=f"decode step, {batch} x {context}, {NUM_DRAFTS} drafts each by {by}",
                value=guessing_ms, unit="ms", limit=limit_ms,
                note=f"{plain_ms:.2f} ms without: pays if more than {guessing_ms / plain_ms - 1:.1f} are right",
            )  # fmt: skip


def batches(sizes: Sizes) -> list[int]:
    most = max(batch for batch, _, _ in sizes.decode_steps)
    return [batch for batch in BATCHES if batch <= most]


def step_ms(engine: LLMEngine, batch: int, context: int, num_drafts: int) -> float:
    """The time of a step in which each sequence has `num_drafts` drafts."""

    def propose(token_ids: MutableSequence[int], config: SpeculativeConfig, num_wanted: int) -> list[int]:
        del config
        return [int(token_ids[-1]) ^ 1] * num_wanted

    with (
        patch.object(DraftHistory, "num_wanted", lambda *_: num_drafts),  # else fewer and fewer, since none is right
        patch("engine.scheduling.drafting.propose", propose),
        decoding(engine, batch, context),
    ):
        before = engine.stats.num_draft_tokens
        times_s = [timed_step(engine) for _ in range(NUM_STEPS)]
        assert engine.stats.num_draft_tokens - before == NUM_STEPS * batch * num_drafts
    return 1e3 * statistics.median(times_s)
