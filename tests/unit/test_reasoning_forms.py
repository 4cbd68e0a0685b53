"""Answers held to a form, of models that think before they answer: they may think, and after that the form holds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from grammar_cases import EOS, KINDS, grammar_text, tokenizer, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.grammar import Grammars, GrammarState
from protos import tandem_inference_pb2 as pb
from router.text.calls.call_format import Tool
from router.text.reasoning import NO_REASONING, THINK, ReasoningParser, reasoning_of
from router.text.structured_outputs import grammar_of
from router.text.tokenizer import Tokenizer
from router.text.tool_formats import FORMATS, calls_grammar

VOCAB_SIZE = 300
OPEN = reasoning_of("qwen3", "<think>", has_form=True)
RIGHT = {
    "json": '{"name": "a", "size": 12, "list": []}', "json_object": "{}", "regex": "abcé", "choice": "reddish",
    "grammar": "((ab))",
}  # fmt: skip


def words(is_end_added: bool) -> tokenizers.Tokenizer:
    made = tokenizer()
    if is_end_added:
        made.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["end spelled", "end a token"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, bool]:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    words(request.param).save(str(folder / "tokenizer.json"))
    return Grammars(folder, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})), request.param


def state_of(model: tuple[Grammars, bool], form: str) -> GrammarState:
    grammars, is_end_added = model
    state = grammars.state(OPEN.grammar(form, tokens=Tokenizer(words(is_end_added)).added_ids(OPEN.words)))
    assert state.allowed([]) is not None, state.error
    return state


def may_be(model: tuple[Grammars, bool], form: str, text: str) -> bool:
    """Whether `text` may be a whole answer."""
    state = state_of(model, form)
    answer: list[int] = []
    for token_id in [*words(model[1]).encode(text).ids, EOS]:
        allowed = state.allowed(answer)
        assert allowed is not None, state.error
        if not allowed[token_id]:
            return False
        answer.append(token_id)
    return True


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_answer_may_think_and_then_has_its_form(model: tuple[Grammars, bool], kind: str) -> None:
    form, right = grammar_text(kind), RIGHT[kind]
    for thought in ("", "\n", 'a < b </ \n</thin {"é', "<think>"):
        if model[1] and "<think>" in thought:
            continue  # the word is a token then, not text
        for gap in ("", "\n", "\n\n"):
            assert may_be(model, form, f"{thought}</think>{gap}{right}")
            assert not may_be(model, form, f"{thought}</think>{gap}?{right}")
        assert not may_be(model, form, f"{thought}{right}"), "without an end it may not end"
    assert not may_be(model, form, right)
    assert not may_be(model, form, f"a</think>b</think>{right}"), "the first end counts"


def test_what_is_read_as_content_has_the_form(model: tuple[Grammars, bool]) -> None:
    """Whatever is drawn, the reader and the grammar agree on where the thought ends."""
    made = words(model[1])
    for seed in range(40):
        rng = random.Random(seed)
        state, answer = state_of(model, grammar_text("choice")), list[int]()
        wanted: list[int] = []
        while EOS not in answer:
            allowed = state.allowed(answer)
            assert allowed is not None
            wanted = wanted or made.encode(rng.choice(["</", "think>", "<", "a", "\n", "red", "</think>"])).ids
            token_id = wanted.pop(0)
            if not allowed[token_id]:
                token_id, wanted = rng.choice(np.flatnonzero(allowed).tolist()), []
            answer.append(token_id)
            assert len(answer) < 1000
        reader = ReasoningParser(THINK, is_open=True)
        text = Tokenizer(made).decode(answer[:-1], False)
        content = reader.push(text).content + reader.finish().content
        assert content in KINDS["choice"]["choice"]


@settings(max_examples=40)
@given(kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 2**32))
def test_guesses_are_taken_back_within_a_thought_and_over_its_end(
    model: tuple[Grammars, bool], kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    state, plain = state_of(model, grammar_text(kind)), state_of(model, grammar_text(kind))
    ids = words(model[1]).encode(f"a</think>\n{RIGHT[kind]}").ids
    answer: list[int] = []
    for position, token_id in enumerate(ids):
        drafts = state.propose(answer, lambda _, i=position: ids[i : i + rng.randrange(5)], 8)  # type: ignore[misc]
        if drafts:
            assert state.allowed(answer + drafts, len(drafts)) is not None
        np.testing.assert_array_equal(state.allowed(answer), plain.allowed(answer))
        answer.append(token_id)
    assert state.error == plain.error == ""


def test_calls_that_must_be_made_come_after_the_thought(model: tuple[Grammars, bool]) -> None:
    tools = [Tool(name="f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})]
    form = grammar_of(pb.StructuredOutputs(grammar=calls_grammar(FORMATS["hermes"], tools, is_one=True).text))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert may_be(model, form, f"I call {call}.</think>\n\n{call}")
    assert not may_be(model, form, f"I call.</think>\n\nNow {call}")


def test_what_does_not_begin_with_a_thought_is_held_from_its_first_token() -> None:
    form = grammar_text("choice")
    for reasoning in (
        NO_REASONING,
        reasoning_of("qwen3", "", has_form=True),
        reasoning_of("", "<think>", has_form=True),
    ):
        assert reasoning.grammar(form, tokens={"</think>": 7}) == form
    assert OPEN.grammar("", tokens={"</think>": 7}) == ""
    assert json.loads(OPEN.grammar(form, tokens={}))["grammars"][1]["name"] == "form"


def test_a_token_that_was_added_is_told_from_a_text() -> None:
    for is_end_added in (False, True):
        added = Tokenizer(words(is_end_added)).added_ids(["</think>", "ab"])
        assert list(added) == (["</think>"] if is_end_added else [])
