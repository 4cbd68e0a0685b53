"""With the CPU kernels an answer in bfloat16 has the same tokens and bitwise equal logprobs, however its work is
divided and batched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import RunningCluster
from reference import Reference

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams
from tandem.client import Client

NUM_TOKENS = 13
"""Not the default, since `ask_cluster` sends only parameters that differ from the defaults."""
Told = tuple[int, float, tuple[tuple[int, float], ...]]
"""A token and its logprob, and the two most probable tokens with theirs."""
Answers = dict[str, list[Told]]

GUESSING = '{"num_speculative_tokens": 4, "prompt_lookup_min": 1}'


def params_of(index: int) -> SamplingParams:
    """Greedy, seeded, and seeded with penalties and filters, in turn."""
    kinds = (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, seed=index),
        SamplingParams(
            temperature=0.8, top_p=0.95, top_k=200, repetition_penalty=1.1, presence_penalty=0.3, seed=index
        ),
    )
    of_prompt = 1 if index % 4 == 1 else None
    return replace(kinds[index % 3], max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=of_prompt)


def told(logprobs: Any) -> Told:
    """Convert logprobs of an engine or of a message."""
    return (
        logprobs.sampled.token_id,
        logprobs.sampled.logprob,
        tuple((each.token_id, each.logprob) for each in logprobs.top),
    )


def make_engine(folder: Path, **changes: object) -> LLMEngine:
    args = EngineArgs(
        model=str(folder), dtype="bfloat16", attention_backend="cpu", max_model_len=2048, num_kv_blocks=640,
        num_threads=1, enable_prefix_caching=False,
    )  # fmt: skip
    return LLMEngine(create_engine_config(replace(args, **changes)))  # type: ignore[arg-type]


def ask(engine: LLMEngine, references: list[Reference]) -> Answers:
    """Run all references at once."""
    for index, reference in enumerate(references):
        engine.add_request(reference.name, reference.prompt_token_ids, params_of(index))
    return finish(engine)


def finish(engine: LLMEngine) -> Answers:
    answers: Answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = [told(each) for each in output.logprobs or ()]
            assert [token_id for token_id, _, _ in answer] == output.token_ids
            of_prompt = [told(each) for each in output.prompt_logprobs or ()]
            answers.setdefault(output.request_id, of_prompt).extend(answer)
    return answers


@pytest.fixture(scope="module")
def alone(few_layers: Path, references: list[Reference]) -> Answers:
    """The answer to each request alone, with its prompt in one chunk."""
    engine = make_engine(few_layers)
    answers: Answers = {}
    for index, reference in enumerate(references):
        engine.add_request(reference.name, reference.prompt_token_ids, params_of(index))
        answers |= finish(engine)
    return answers


def differing(answers: Answers, expected: Answers) -> list[str]:
    return [name for name in answers if answers[name] != expected[name]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"prefill_chunk_tokens": 64, "num_threads": 2}, marks=pytest.mark.slow),
        {"prefill_chunk_tokens": 17, "block_size": 32, "num_kv_blocks": 320},
        {"enable_prefix_caching": True, "max_num_seqs": 3, "speculative_config": GUESSING},
    ],
    ids=["together", "chunks of 64, 2 threads", "chunks of 17, larger blocks", "cached prefixes, guessed ahead"],
)
def test_same_tokens(changes: dict[str, object], few_layers: Path, references: list[Reference], alone: Answers) -> None:
    engine = make_engine(few_layers, **changes)
    assert differing(ask(engine, references), alone) == []
    assert (engine.stats.num_accepted_tokens > 20) == ("speculative_config" in changes)
    torch.set_num_threads(1)


def test_same_tokens_after_preemption(few_layers: Path, references: list[Reference], alone: Answers) -> None:
    engine = make_engine(few_layers, max_model_len=512, num_kv_blocks=33)
    # Long prompts are left out, but still count in `index`, which decides the parameters.
    for index, reference in enumerate(references):
        if len(reference.prompt_token_ids) <= 64:
            engine.add_request(reference.name, reference.prompt_token_ids, params_of(index))
    assert differing(finish(engine), alone) == []
    assert engine.stats.num_preemptions > 0


@pytest.mark.slow  # tests/unit/test_cpu_int8.py tests the products in any batch
def test_same_tokens_with_weights_in_int8(few_layers: Path, references: list[Reference], alone: Answers) -> None:
    """The tokens differ from those with bfloat16 weights, and are the same in any batch."""
    short = [reference for reference in references if len(reference.prompt_token_ids) <= 64]
    by_itself = make_engine(few_layers, quantization="int8")
    expected: Answers = {}
    for index, reference in enumerate(short):
        by_itself.add_request(reference.name, reference.prompt_token_ids, params_of(index))
        expected |= finish(by_itself)
    together = make_engine(few_layers, quantization="int8", prefill_chunk_tokens=17, speculative_config=GUESSING)
    assert differing(ask(together, short), expected) == []
    assert differing({name: alone[name] for name in expected}, expected) == list(expected)


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--aggregated",), marks=pytest.mark.slow)], ids=["disaggregated", "aggregated"]
)
def test_same_tokens_of_a_cluster(
    flags: tuple[str, ...],
    references: list[Reference],
    few_layers: Path,
    alone: Answers,
    start_cluster: Callable[..., RunningCluster],
) -> None:
    cluster = start_cluster("--model", str(few_layers), "--max-model-len", "2048", "--kv-cache-gib", "0.4", *flags)
    with Client(cluster.address) as client, ThreadPoolExecutor(8) as threads:

        def ask_cluster(index: int) -> list[Told]:
            params = {field.name: getattr(params_of(index), field.name) for field in fields(SamplingParams)}
            changed = {name: value for name, value in params.items() if value != getattr(SamplingParams(), name)}
            answer = client.generate(list(references[index].prompt_token_ids), **changed)
            assert len(answer.logprobs) == len(answer.token_ids)
            return [told(each) for each in (*answer.prompt_logprobs[1:], *answer.logprobs)]

        # Some of each kind; the tests above run all on engines.
        some = [index for index in range(len(references)) if index % 4 == 1 or index % 12 in (0, 2)]
        answers = dict(zip((references[index].name for index in some), threads.map(ask_cluster, some), strict=True))
    assert differing(answers, alone) == []


@pytest.mark.slow  # tests this file: it shows that the tests above can fail
def test_other_sums_would_change_answers(few_layers: Path, references: list[Reference]) -> None:
    """With plain torch, whose sums depend on the number of rows, answers do differ: so the tests above can fail."""
    short = [reference for reference in references if len(reference.prompt_token_ids) <= 17][:4]
    apart, together = (make_engine(few_layers, attention_backend="torch") for _ in range(2))
    expected: Answers = {}
    for reference in short:
        expected |= ask(apart, [reference])
    for reference in short:
        together.add_request(reference.name, reference.prompt_token_ids, params_of(0))
    assert differing(finish(together), expected)
