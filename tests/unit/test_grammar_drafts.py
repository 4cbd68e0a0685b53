"""Guesses at an answer that a grammar holds to a form: each of them may come, and what was asked about wrong ones is as
if it had never been."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from grammar_cases import EOS, KINDS, grammar_text, tokenizer, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import grammar as module
from engine.grammar import Grammars, GrammarState
from router.structured_outputs import grammar_of
from tandem.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 300
COSTLY = {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}, "required": ["p999"]}
"""After the first bracket any of a thousand names may come: too much to find out."""
EITHER = {"anyOf": [COSTLY, {"const": "red"}]}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))


def compiled(grammars: Grammars, grammar: str) -> GrammarState:
    state = grammars.state(grammar)
    assert state.allowed([]) is not None  # waits
    return state


def schema(value: object) -> str:
    return grammar_of(StructuredOutputsParams(json=value).to_proto())


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def nothing(forced: list[int]) -> list[int]:
    return []


@settings(max_examples=60)
@given(st.sampled_from(list(KINDS)), st.integers(0, 2**32))
def test_what_may_come_is_the_same_whatever_was_guessed(grammars: Grammars, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    state, plain = compiled(grammars, grammar_text(kind)), compiled(grammars, grammar_text(kind))
    answer: list[int] = []
    while len(answer) < 30 and EOS not in answer:
        # Of what was looked up some may come, or nothing does.
        looked_up = [rng.choice(answer or [5]) for _ in range(rng.randrange(4))]
        most = rng.randrange(8)
        drafts = state.drafts(answer, lambda _, found=looked_up: found, most)  # type: ignore[misc]
        assert len(drafts) <= most
        assert EOS not in drafts
        followed = compiled(grammars, grammar_text(kind))
        for i in range(len(drafts) + 1):
            expected = followed.allowed(answer + drafts[:i])
            np.testing.assert_array_equal(state.allowed(answer + drafts[:i], i), expected)
            assert expected is not None
            assert i == len(drafts) or expected[drafts[i]]
        num_right = rng.randrange(len(drafts) + 1)
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
    state = compiled(
        grammars, schema({"type": "object", "properties": {"abc": {"enum": [12, 123]}}, "required": ["abc"]})
    )
    forced = tokens_of('{"abc": ')
    assert state.drafts([], nothing, 16) == forced
    assert state.drafts([], nothing, 2) == forced[:2]
    asked = []

    def look_up(known: list[int]) -> list[int]:
        asked.append(known)
        return tokens_of("12}")

    assert state.drafts([], look_up, 16) == forced + tokens_of("12}")
    assert asked == [forced]
    assert state.drafts([], lambda _: [*tokens_of("12"), *tokens_of("red")], 16) == forced + tokens_of("12")
    assert state.drafts(forced + tokens_of("12}"), lambda _: [EOS, 5], 16) == []


def test_an_error_over_drafts_is_none_of_the_answer(grammars: Grammars) -> None:
    state = compiled(grammars, schema(EITHER))
    drafts = state.drafts([], lambda _: tokens_of('{"p'), 4)
    assert drafts
    masks = [state.allowed(drafts[:i], i) for i in range(1, len(drafts) + 1)]
    assert masks[-1] is None
    assert state.error == ""
    answer = tokens_of('"')
    np.testing.assert_array_equal(state.allowed(answer), compiled(grammars, schema(EITHER)).allowed(answer))
    assert state.drafts(answer, nothing, 4) == []  # enough of it
    # Of an answer that goes there it is one.
    other = compiled(grammars, schema(EITHER))
    assert other.allowed(drafts) is None
    assert "max is 2000" in other.error


def test_guessing_has_its_time_and_takes_none_of_the_answers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPENT_S", float("inf"))
    monkeypatch.setattr(module, "MAX_SPENT_ON_DRAFTS_S", 0.0)
    monkeypatch.setattr(module, "MAX_S_PER_TOKEN", 0.0)
    state = compiled(grammars, grammar_text("json"))
    drafts = state.drafts([], nothing, 4)
    assert len(drafts) == 4
    assert state.allowed(drafts[:1], 1) is None
    assert state.drafts([], nothing, 4) == []
    np.testing.assert_array_equal(state.allowed([]), compiled(grammars, grammar_text("json")).allowed([]))
    assert state.error == ""
