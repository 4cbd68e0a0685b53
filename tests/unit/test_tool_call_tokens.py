"""Words that tell calls and are tokens by themselves: what is held to calls says them in those."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from grammar_cases import EOS, tokenizer, write_model
from tool_call_cases import said

from engine.grammar import Grammars
from router.text.calls.call_format import Tool
from router.text.tokenizer import Tokenizer
from router.text.tool_formats import FORMATS, calls_grammar

VOCAB_SIZE = 300
TOOLS = [
    Tool(name="weather", parameters={"properties": {"city": {"type": "string"}}, "required": ["city"]}),
    Tool(name="now"),
]


@pytest.mark.parametrize("parser", sorted(FORMATS.keys() - {"llama3_json"}))
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
    """How many of the answer's tokens may come, one after the other."""
    state = grammars.state(grammar)
    for position, token_id in enumerate(answer):
        allowed = state.allowed(answer[:position])
        assert allowed is not None, state.error
        if not allowed[token_id]:
            return position
    return len(answer)
