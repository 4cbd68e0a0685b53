"""Ctrl-C, and errors, in the middle of an `LLM`'s step: afterwards it generates the same answers, or raises an error
that says it cannot."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import write_model
from offline_books import at_rest

from tandem import LLM, BeamSearchParams, SamplingParams

PROMPTS = [[5 + (7 * i + j) % 50 for j in range(3 + 9 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """An `LLM` whose pool holds two prompts, so that blocks which a lost step failed to release would be missed. SIGINT
    has Python's own handler."""
    llm = LLM(
        write_model(tmp_path), load_format="dummy", device="cpu", attention_backend="torch", dtype="float32",
        num_threads=1, num_kv_blocks=6, block_size=16, max_num_seqs=3, max_model_len=64,
    )  # fmt: skip
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield llm
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "whose it was before"
    signal.signal(signal.SIGINT, before)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def at(place: str, llm: LLM, before: Callable[[], None]) -> pytest.MonkeyPatch:
    """Call `before` just before the third call of `place`, a method that each step calls."""
    engine = llm.llm_engine
    owner: Any = {"executor": engine.executor, "scheduler": engine._scheduler}[place.partition(".")[0]]
    name, calls = place.partition(".")[2], 0
    method = getattr(owner, name)

    def called(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            before()
        return method(*args)

    patch = pytest.MonkeyPatch()
    patch.setattr(owner, name, called)
    return patch


@pytest.mark.parametrize("place", ["executor.launch", "scheduler.begin", "executor.wait", "scheduler.apply"])
def test_ctrl_c_comes_between_two_steps(llm: LLM, place: str) -> None:
    expected = tokens_of(llm)
    for _ in range(3):
        patch = at(place, llm, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            tokens_of(llm)
        patch.undo()
        blocks, problems = llm.llm_engine.audit()
        assert not problems
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
    assert tokens_of(llm) == expected


def test_it_ends_a_beam_search_too(llm: LLM) -> None:
    def beams() -> list[list[list[int]]]:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(5, 4, ignore_eos=True))
        return [[sequence.tokens for sequence in output.sequences] for output in outputs]

    expected = beams()
    patch = at("executor.wait", llm, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        beams()
    patch.undo()
    assert at_rest(llm)
    assert beams() == expected


def test_a_second_one_does_not_wait(llm: LLM) -> None:
    steps_before = llm.llm_engine.stats.num_steps
    patch = at("executor.wait", llm, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)] and None)
    with pytest.raises(KeyboardInterrupt):
        tokens_of(llm)
    patch.undo()
    assert llm.llm_engine.stats.num_steps == steps_before + 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a step of this LLM ended with KeyboardInterrupt; .* create a new one"):
            tokens_of(llm)


@pytest.mark.parametrize("name", ["add_request", "abort"])
def test_several_at_once_leave_nothing_behind(llm: LLM, name: str) -> None:
    """Adding and aborting requests are never interrupted halfway: they are quick, so Ctrl-C waits for them."""
    expected = tokens_of(llm)
    engine = llm.llm_engine
    method = getattr(engine, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        return result

    in_a_step = at("executor.wait", llm, lambda: signal.raise_signal(signal.SIGINT))
    in_a_step.setattr(engine, name, called)
    with pytest.raises(KeyboardInterrupt):
        tokens_of(llm)
    in_a_step.undo()
    assert not engine.has_unfinished_requests()
    blocks, problems = engine.audit()
    assert not problems
    assert blocks.num_free + blocks.num_cached == blocks.num_blocks
    assert tokens_of(llm) == expected


def test_after_an_error_in_a_step_it_says_so(llm: LLM) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    patch = at("scheduler.apply", llm, fail)
    with pytest.raises(MemoryError, match="no room"):
        tokens_of(llm)
    patch.undo()
    with pytest.raises(RuntimeError, match=r"a step of this LLM ended with MemoryError; .* create a new one"):
        tokens_of(llm)


def test_one_that_comes_with_the_last_step(llm: LLM) -> None:
    """The answers are complete but not returned: the effect is as if Ctrl-C had come a moment earlier."""
    original = llm._take

    def take(*args: Any) -> None:
        original(*args)
        if not llm.llm_engine.has_unfinished_requests():
            signal.raise_signal(signal.SIGINT)

    llm._take = take  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tokens_of(llm)
    llm._take = original  # type: ignore[method-assign]
    assert len(tokens_of(llm)) == len(PROMPTS)


def test_who_handles_it_otherwise_goes_on_doing_so(llm: LLM) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    patch = at("scheduler.apply", llm, lambda: signal.raise_signal(signal.SIGINT))
    assert len(tokens_of(llm)) == len(PROMPTS)
    patch.undo()
    assert heard == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)
