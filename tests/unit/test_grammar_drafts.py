"""Drafts for an answer that must match a grammar: the grammar allows each draft, and a question about a wrong draft
leaves no trace."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grammar_cases import EOS, KINDS, grammar_text, tokenizer, write_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling import grammar as module
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.grammar import Grammars, GrammarState
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.speculation import SpeculativeConfig
from router.text.structured_outputs import grammar_of
from router.validation import grammar_process
from tandem.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 300
COSTLY = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}, "required": ["p999"]}
"""After the first bracket any of a thousand names may follow: too costly to work out."""
EITHER = {"anyOf": [COSTLY, {"const": "red"}]}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))


def compiled(grammars: Grammars, grammar: str) -> GrammarState:
    state = grammars.state(grammar)
    assert state.allowed([]) is not None  # waits until it is compiled
    return state


def schema(value: object) -> str:
    return grammar_of(StructuredOutputsParams(json=value).to_proto())


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def nothing(forced: list[int]) -> list[int]:
    return []


def test_who_waits_is_told_when_a_grammar_has_come(tmp_path: Path) -> None:
    """And also when it fails to compile, because the tokenizer cannot be read."""
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "tokenizer.json").write_text("{")
    for folder in (write_model(tmp_path), tmp_path / "unreadable"):
        grammars, told = Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})), threading.Event()
        grammars.on_compiled = told.set
        state = grammars.state(schema({"const": "red"}))
        state.wait_until_compiled()
        assert told.wait(10)


def stack_bytes() -> int:
    """How large the stack of the calling thread is."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    return size.value


def test_grammars_are_compiled_on_a_larger_stack_than_a_router_has_tried_them_on(grammars: Grammars) -> None:
    compiled(grammars, grammar_text("json"))
    assert grammars._thread.submit(stack_bytes).result() >= 4 * grammar_process.STACK_BYTES
    assert threading.stack_size() == 0, "other threads have the usual one"


@settings(max_examples=60)
@example("json", 940)  # the only possible text, but cut unlike the tokenizer cuts it
@given(st.sampled_from(list(KINDS)), st.integers(0, 2**32))
def test_what_may_come_is_the_same_whatever_was_guessed(grammars: Grammars, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    state, plain = compiled(grammars, grammar_text(kind)), compiled(grammars, grammar_text(kind))
    answer: list[int] = []
    while len(answer) < 30 and EOS not in answer:
        # Some of the looked-up tokens may be possible here; or none is looked up.
        looked_up = [rng.choice(answer or [5]) for _ in range(rng.randrange(4))]
        most = rng.randrange(8)
        drafts = state.propose(answer, lambda _, found=looked_up: found, most)  # type: ignore[misc]
        assert len(drafts) <= most
        assert EOS not in drafts
        followed = compiled(grammars, grammar_text(kind))
        num_possible = len(drafts)
        for i in range(len(drafts) + 1):
            expected = followed.allowed(answer + drafts[:i])
            np.testing.assert_array_equal(state.allowed(answer + drafts[:i], i), expected)
            assert expected is not None
            if i < num_possible and not expected[drafts[i]]:
                assert expected.sum() == 1  # possible as text, but not in this cut: one cut is left
                num_possible = i
        num_right = rng.randrange(num_possible + 1)
        for draft in drafts[:num_right]:
            allowed = plain.allowed(answer)
            assert allowed is not None
            assert allowed[draft]
            answer.append(draft)
        allowed = plain.allowed(answer)
        assert allowed is not None
        answer.append(rng.choice(np.flatnonzero(allowed).tolist()))
    assert state.error == plain.error == ""


def test_what_alone_may_come_and_behind_it_what_is_looked_up(grammars: Grammars) -> None:
    value = {"type": "object", "properties": {"abc": {"enum": [12, 123]}}, "required": ["abc"]}
    state = compiled(grammars, schema(value))
    forced = tokens_of('{"abc": ')
    assert state.propose([], nothing, 16) == forced
    assert state.propose([], nothing, 2) == forced[:2]
    asked = []

    def look_up(known: list[int]) -> list[int]:
        asked.append(known)
        return tokens_of("12}")

    assert state.propose([], look_up, 16) == forced + tokens_of("12}")
    assert asked == [forced]
    assert state.propose([], lambda _: [*tokens_of("12"), *tokens_of("red")], 16) == forced + tokens_of("12")


@pytest.mark.parametrize("limit", ['stop="]"', "max_tokens=9"])
def test_what_cannot_be_taken_back_is_read_anew(grammars: Grammars, limit: str) -> None:
    grammar = grammar_of(StructuredOutputsParams(grammar=f"start: a\na[{limit}]: /[a-e]*/").to_proto())
    state, plain = compiled(grammars, grammar), compiled(grammars, grammar)
    answer = tokens_of("abc")
    drafts = state.propose(answer, lambda _: tokens_of("eee"), 4)
    assert drafts
    assert state.allowed(answer + drafts, len(drafts)) is not None
    answer += tokens_of("d")
    np.testing.assert_array_equal(state.allowed(answer), plain.allowed(answer))
    assert state.propose(answer, lambda _: tokens_of("eee"), 4) == []
    answer += tokens_of("e")
    np.testing.assert_array_equal(state.allowed(answer), plain.allowed(answer))
    assert state.error == plain.error == ""


def test_no_end_is_guessed(grammars: Grammars) -> None:
    state = compiled(grammars, grammar_of(StructuredOutputsParams(regex="a+b*").to_proto()))
    assert state.propose(tokens_of("aa"), lambda _: [*tokens_of("b"), EOS, *tokens_of("b")], 16) == tokens_of("b")


def test_an_error_over_drafts_is_none_of_the_answer(grammars: Grammars) -> None:
    state = compiled(grammars, schema(EITHER))
    drafts = state.propose([], lambda _: tokens_of('{"p'), 4)
    assert drafts
    masks = [state.allowed(drafts[:i], i) for i in range(1, len(drafts) + 1)]
    assert masks[-1] is None
    assert state.error == ""
    answer = tokens_of('"')
    np.testing.assert_array_equal(state.allowed(answer), compiled(grammars, schema(EITHER)).allowed(answer))
    assert state.propose(answer, nothing, 4) == []  # it has been asked enough
    # For an answer that takes this path, the error is its own.
    other = compiled(grammars, schema(EITHER))
    assert other.allowed(drafts) is None
    assert "max is 2000" in other.error


def test_no_more_masks_of_drafts_than_there_is_time_for(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    state = compiled(grammars, grammar_text("json"))
    seconds = itertools.count(step=0.04)
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    drafts = state.propose([], nothing, 4)
    assert state.allowed(drafts[:1], 1) is not None
    assert state.allowed(drafts[:2], 2) is None
    assert state.allowed([]) is not None


def test_a_longer_answer_has_more_time_for_its_masks_and_for_those_of_its_drafts(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = (compiled(grammars, grammar_text("json")) for _ in range(2))
    answer = state.propose([], nothing, 4)
    assert len(answer) == 4
    seconds = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
    monkeypatch.setattr(module, "MAX_S_PER_TOKEN", 0.3)
    assert state.allowed(answer) is not None  # one second of 0.5 + 4 * 0.3
    assert state.allowed(answer) is None
    assert "too ambiguous" in state.error
    assert other.allowed(answer, 1) is not None
    assert other.allowed(answer, 1) is not None  # one second of 0.05 + 4 * 0.3 was used up
    assert other.allowed(answer, 1) is None
    assert other.error == ""


def test_why_an_answer_ends_is_kept_beside_drafts_of_the_same_step(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask of the answer itself is asked for first, and takes too long. Those of its drafts would not."""
    state = compiled(grammars, grammar_text("json"))
    drafts = state.propose([], nothing, 4)
    assert drafts
    monkeypatch.setattr(module, "MAX_SPENT_S", -1.0)
    masks = [state.allowed(drafts[:i], i) for i in range(len(drafts) + 1)]
    assert all(mask is None for mask in masks)
    assert "too ambiguous" in state.error


class ErringMatcher:
    """A matcher that exceeds its limits when it is asked about drafts."""

    num_made = 0

    def __init__(self) -> None:
        self.errs = False
        ErringMatcher.num_made += 1

    def is_error(self) -> bool:
        return self.errs

    def consume_tokens(self, tokens: list[int]) -> None:
        assert not self.errs

    def compute_ff_tokens(self) -> list[int]:
        return [7, 8]

    def validate_tokens(self, tokens: list[int]) -> int:
        self.errs = True
        return 0

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 40


def test_an_error_over_guesses_is_none_of_the_answer() -> None:
    def compile_anew() -> Future[Any]:
        made: Future[Any] = Future()
        made.set_result(ErringMatcher())
        return made

    state = GrammarState(compile_anew, VOCAB_SIZE, frozenset({EOS}))
    assert state.propose([5], nothing, 4) == []
    assert state.allowed([5]) is not None
    assert state.propose([5, 6], nothing, 4) == []
    assert state.allowed([5, 6]) is not None
    assert ErringMatcher.num_made == 2


def one_sequence(
    grammars: Grammars, prompt: list[int], draft_batch: int = 16, **params: int
) -> tuple[Scheduler, Sequence]:
    """A scheduler, and a sequence whose answer is {" so far."""
    manager = BlockManager(num_blocks=64, block_size=4, prefix_key=b"k" * 32, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_tokens=64, prefill_batch_tokens=64,
        max_itl_ms=0, stream_interval=1, async_scheduling=False, draft_batch_tokens=draft_batch,
        speculation=SpeculativeConfig(num_speculative_tokens=8),
    )  # fmt: skip
    scheduler = Scheduler(config, manager, max_model_len=60, eos_token_ids=frozenset({EOS}))
    value = {"type": "object", "properties": {"abc": {"enum": ["red", "green"]}}, "required": ["abc"]}
    seq = Sequence(0, "r", prompt, len(prompt), SamplingParams(**{"max_tokens": 40, **params}))
    seq.grammar = compiled(grammars, schema(value))
    scheduler.sequences.add(seq)
    output = scheduler.schedule()
    scheduler.begin(output)
    scheduler.apply(output, [tokens_of('{"')])
    return scheduler, seq


@pytest.mark.parametrize(
    ("draft_batch", "max_tokens", "num_drafts"),
    [(16, 40, 4), (3, 40, 2), (1, 40, 0), (-2, 40, 0), (16, 4, 2), (16, 2, 0)],
)
def test_no_more_than_there_is_room_for(grammars: Grammars, draft_batch: int, max_tokens: int, num_drafts: int) -> None:
    scheduler, _ = one_sequence(grammars, [5, 6], draft_batch, max_tokens=max_tokens)
    [scheduled] = scheduler.schedule().scheduled
    assert list(scheduled.draft_token_ids) == tokens_of('abc": "')[:num_drafts]


@pytest.mark.parametrize(("num_wanted", "num_looked_up"), [(8, 3), (5, 1), (4, 0), (1, 0)])
def test_looked_up_is_what_followed_what_has_to_come(grammars: Grammars, num_wanted: int, num_looked_up: int) -> None:
    """As far as the grammar allows it here, and as far as earlier drafts were right."""
    scheduler, seq = one_sequence(grammars, [*tokens_of('"abc": "red"}'), 5])
    seq.draft_history.max_drafts = num_wanted
    [scheduled] = scheduler.schedule().scheduled
    assert list(scheduled.draft_token_ids) == tokens_of('abc": "') + tokens_of('red"}')[:num_looked_up]


def test_guessing_has_its_time_and_takes_none_of_the_answers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPENT_S", float("inf"))
    monkeypatch.setattr(module, "MAX_SPENT_ON_DRAFTS_S", 0.0)
    monkeypatch.setattr(module, "MAX_S_PER_TOKEN", 0.0)
    state = compiled(grammars, grammar_text("json"))
    drafts = state.propose([], nothing, 4)
    assert len(drafts) == 4
    assert state.allowed(drafts[:1], 1) is None
    assert state.propose([], nothing, 4) == []
    np.testing.assert_array_equal(state.allowed([]), compiled(grammars, grammar_text("json")).allowed([]))
    assert state.error == ""
