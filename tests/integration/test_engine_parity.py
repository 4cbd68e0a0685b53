"""The engine's greedy tokens in float32 equal transformers', however the work is divided into steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reference import NUM_TOKENS, Reference

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> LLMEngine:
    args = EngineArgs(model=str(model_folder), dtype="float32", max_model_len=2048, num_kv_blocks=640, num_threads=2)
    return LLMEngine(create_engine_config(args))


def run(engine: LLMEngine) -> dict[str, list[int]]:
    """Step until all is done; return the answers by request id. The audit must find no problem after any step."""
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        ledger, problems = engine.audit()
        assert not problems
        assert ledger.is_balanced
    return answers


def add_all(engine: LLMEngine, references: list[Reference]) -> None:
    for reference in references:
        engine.add_request(reference.name, reference.prompt_token_ids, GREEDY)


def check(answers: dict[str, list[int]], references: list[Reference]) -> None:
    wrong = [r.name for r in references if tuple(answers[r.name]) != r.answer_token_ids]
    assert not wrong


@pytest.mark.slow
def test_one_by_one(engine: LLMEngine, references: list[Reference]) -> None:
    assert len(references) >= 20
    answers = {}
    for reference in references[::4]:  # the test below runs all of them, in one batch
        add_all(engine, [reference])
        answers |= run(engine)
    check(answers, references[::4])


def test_all_in_one_batch_on_cached_prefixes(engine: LLMEngine, references: list[Reference]) -> None:
    add_all(engine, references)
    hits_before = engine.stats.num_prefix_hits_tokens
    check(run(engine), references)
    assert engine.stats.num_prefix_hits_tokens > hits_before


def with_engine(model_folder: Path, **changes: object) -> LLMEngine:
    args = EngineArgs(model=str(model_folder), dtype="float32", max_model_len=2048, num_kv_blocks=640, num_threads=2)
    return LLMEngine(create_engine_config(replace(args, **changes)))  # type: ignore[arg-type]


@pytest.mark.slow  # test_exact_bfloat16.py shows that chunks do not change an answer
def test_chunked_prefill(model_folder: Path, references: list[Reference]) -> None:
    engine = with_engine(model_folder, prefill_chunk_tokens=64, enable_prefix_caching=False)
    add_all(engine, references[1::2])
    check(run(engine), references[1::2])


def test_block_size_of_one(model_folder: Path, references: list[Reference]) -> None:
    engine = with_engine(model_folder, block_size=1, num_kv_blocks=4096)
    short = [r for r in references if len(r.prompt_token_ids) < 100][:8]
    add_all(engine, short)
    check(run(engine), short)


@pytest.mark.slow  # nor do preemptions
def test_after_forced_preemption(model_folder: Path, references: list[Reference]) -> None:
    engine = with_engine(model_folder, max_model_len=512, num_kv_blocks=33)
    # Short prompts, several of which end near a block's end and soon need a new block at about the same time.
    short = [r for r in references if len(r.prompt_token_ids) <= 64]
    add_all(engine, short)
    check(run(engine), short)
    assert engine.stats.num_preemptions > 0
