"""Words that mark calls and are tokens of their own: an answer that is held to calls uses those tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from grammar_cases import EOS, tokenizer, write_model
from tool_call_cases import outcome, said

from engine.scheduling.grammar import Grammars
from router.text.calls.call_format import Tool
from router.text.calls.text_values import Schema
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS, calls_grammar

VOCAB_SIZE = 300
NO_CHARACTERS = frozenset(i for i in range(VOCAB_SIZE) if "\ufffd" in (tokenizer().decode([i]) if i < 258 else ""))
"""Bytes that are no character by themselves."""
TOOLS = [
    Tool(name="weather", parameters={"properties": {"city": {"type": "string"}}, "required": ["city"]}),
    Tool(name="now"),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parser", sorted(name for name, known in FORMATS.items() if known.begins))
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("has_form", [False, True])
def test_what_is_held_to_calls_says_its_words_in_their_tokens(
    parser: str, is_special: bool, has_form: bool, tmp_path: Path
) -> None:
    made, words = tokenizer(), FORMATS[parser].words
    made.add_tokens([tokenizers.AddedToken(word, normalized=False, special=is_special) for word in words])
    write_model(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    added = Tokenizer(made).added_ids([*words, "ab"])
    assert set(added) == set(words)
    or_form = {"type": "object"} if has_form else None
    grammar = calls_grammar(FORMATS[parser], TOOLS, is_one=False, or_form=or_form, tokens=added).text
    grammars = Grammars(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    ids = made.encode(said(parser, ("weather", {"city": "Oslo"}), ("now", {}))).ids
    assert added.keys() & map(made.id_to_token, ids)
    assert num_taken(grammars, grammar, [*ids, EOS]) == len(ids) + 1
    for position, token_id in enumerate(ids):
        if token_id in added.values():
            spelled = [part for char in made.id_to_token(token_id) for part in made.encode(char).ids]
            assert num_taken(grammars, grammar, [*ids[:position], *spelled]) < position + len(spelled), "nor in others"


def num_taken(grammars: Grammars, grammar: str, answer: list[int]) -> int:
    """How many of the answer's tokens the grammar allows, one after the other."""
    state = grammars.state(grammar)
    for position, token_id in enumerate(answer):
        allowed = state.allowed(answer[:position])
        assert allowed is not None, state.error
        if not allowed[token_id]:
            return position
    return len(answer)


CHOOSY = {
    "city": {"type": "string", "maxLength": 12}, "number": {"type": "integer", "minimum": 0, "maximum": 50},
    "colour": {"enum": ["red", 3]}, "maybe": {"type": ["string", "null"]},
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("parser", sorted(FORMATS))
def test_whatever_the_grammar_lets_be_said_is_read_as_calls_that_fit(
    parser: str, is_added: bool, tmp_path: Path
) -> None:
    made = tokenizer()
    if is_added:
        made.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in FORMATS[parser].words])
    write_model(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    added = Tokenizer(made).added_ids(FORMATS[parser].words)
    grammars = Grammars(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    parameters = {"properties": CHOOSY, "required": ["city"], "additionalProperties": False}
    tools = [Tool(name="weather", parameters=parameters), Tool(name="now")]
    grammar = calls_grammar(FORMATS[parser], tools, is_one=False, tokens=added).text
    schemas = {tool.name: Schema(tool.parameters) for tool in tools}
    wanted = {*made.encode("</parameter>\n</tool_call>").ids, *added.values()}
    num_read = 0
    for seed in range(8):
        rng, state, answer = random.Random(seed), grammars.state(grammar), list[int]()
        while EOS not in answer and len(answer) < 400:
            mask = state.allowed(answer)
            assert mask is not None, state.error
            all_that_may = np.flatnonzero(mask).tolist()
            may_be = [token_id for token_id in all_that_may if token_id not in NO_CHARACTERS] or all_that_may
            best = [EOS] if mask[EOS] else [token_id for token_id in may_be if token_id in wanted]
            answer.append(rng.choice(best if best and rng.random() < 0.5 else may_be))
        if EOS not in answer:
            continue
        reader = ToolCallParser(FORMATS[parser], schemas, lambda index: f"id-{index}")
        text = made.decode(answer[:-1], skip_special_tokens=False)
        content, calls = outcome([reader.push(text), reader.finish()])
        assert calls
        assert content == ""
        for arguments in (json.loads(arguments) for name, arguments in calls if name == "weather"):
            num_read += 1
            assert len(arguments["city"]) <= 12, text
            assert 0 <= arguments.get("number", 0) <= 50
            assert arguments.get("colour", "red") in ("red", 3)
    assert num_read
