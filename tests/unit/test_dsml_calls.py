"""Calls of DeepSeek V3.2, whose values are marked as strings or not: their JSON, wherever the text is cut, and what is
held to calls. (`test_tagged_calls` has what they share with other calls between tags.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from grammar_cases import EOS, tokenizer, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, outcome, said, told_before_each_character

from engine.scheduling.grammar import Grammars
from router.text.calls.call_format import CannotBeHeld, Tool
from router.text.calls.dsml import DSML, MAX_MARK_CHARS
from router.text.calls.text_values import Schema
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS, calls_grammar

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "number": {"type": "integer"}, "maybe": {"type": ["string", "null"]}, "any": {},
    "list": {"type": "array"}, "either": {"enum": ["1", 1, "x"]},
}  # fmt: skip
TOOLS = [Tool(name="f", parameters={"type": "object", "properties": PROPERTIES}), Tool(name="now")]
BEGIN = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
ENDS = "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
NOW = f'<｜DSML｜invoke name="now">\n{ENDS}'


def parameter(name: str, value: str, mark: str = ' string="true"') -> str:
    return f'<｜DSML｜parameter name="{name}"{mark}>{value}</｜DSML｜parameter>\n'


def reader() -> ToolCallParser:
    schemas = {tool.name: Schema(tool.parameters) for tool in TOOLS}
    return ToolCallParser(FORMATS["deepseek_v32"], schemas, lambda index: f"id-{index}")


def parse(pieces: list[str], *, is_whole: bool = True) -> Outcome:
    reading = reader()
    told = [reading.push(piece) for piece in pieces]
    return outcome([*told, reading.finish()] if is_whole else told)


TRUE, FALSE = ' string="true"', ' string="false"'


@pytest.mark.parametrize(
    ("name", "mark", "text", "value"),
    [
        ("text", TRUE, "12", "12"), ("text", FALSE, "12", "12"), ("text", "", "12", "12"), ("text", TRUE, "", ""),
        ("text", TRUE, 'é "\\ 😀\n </｜DS </b>', 'é "\\ 😀\n </｜DS </b>'),
        ("number", FALSE, "12", 12), ("number", TRUE, "12", 12), ("number", FALSE, "a dozen", "a dozen"),
        ("any", TRUE, "12", "12"), ("any", FALSE, "12", 12), ("any", "", "12", 12), ("any", TRUE, "{}", "{}"),
        ("any", FALSE, '{"a": ["é", {"b": null}]}', {"a": ["é", {"b": None}]}), ("any", FALSE, "True", True),
        ("maybe", TRUE, "null", "null"), ("maybe", FALSE, "null", None), ("list", FALSE, "[1, {}]", [1, {}]),
        ("either", TRUE, "1", "1"), ("either", FALSE, "1", 1), ("new", TRUE, "1", "1"), ("new", FALSE, "1", 1),
        ("any", ' string="yes"', "1", 1), ("any", '  string = "true" ', "1", "1"),
    ],
)  # fmt: skip
def test_a_mark_says_whether_a_value_is_a_string(name: str, mark: str, text: str, value: Any) -> None:
    """Unless the schema says that it cannot be one, or can be nothing else."""
    content, [(called, arguments)] = parse([BEGIN + parameter(name, text, mark) + ENDS])
    assert (content, called, json.loads(arguments)) == ("", "f", {name: value})


A = ("f", '{"text": "a"}')
TEXT_A = parameter("text", "a")
CASES: list[tuple[str, Outcome]] = [
    (f"I look.\n\n{BEGIN}{TEXT_A}{ENDS} So.", ("I look. So.", [A])),
    (said("deepseek_v32", ("f", {"text": "a"}), ("now", {}), ("f", {"number": 3})),
     ("", [A, ("now", "{}"), ("f", '{"number": 3}')])),
    (f"{BEGIN}{TEXT_A}{parameter('any', '[1]', FALSE)}{ENDS}", ("", [("f", '{"text": "a", "any": [1]}')])),
    # words or white space left out
    (f"{BEGIN}{TEXT_A}</｜DSML｜function_calls>", ("", [A])),
    (f"{BEGIN}{TEXT_A}{NOW}", ("", [A, ("now", "{}")])),
    (NOW, ("", [("now", "{}")])),
    ((BEGIN + TEXT_A + ENDS).replace("\n", ""), ("", [A])),
    # marks that are none: there is no such argument
    (f"{BEGIN}{parameter('any', '1', ' text=1')}{TEXT_A}{ENDS}", ("", [A])),
    (f"{BEGIN}{parameter('any', '1', ' ' * MAX_MARK_CHARS)}{TEXT_A}{ENDS}", ("", [A])),
    # cut off
    (f'{BEGIN}<｜DSML｜parameter name="text" string="tr', ("", [("f", "")])),
    (f"{BEGIN}{TEXT_A[:-8]}", ("", [("f", '{"text": "a')])),
    (f"{BEGIN}{parameter('any', '[1', FALSE)[:-20]}", ("", [("f", '{"any": ')])),
    # no calls
    *((text, (text, [])) for text in ("<｜DSML｜function", "<｜DSML｜function_calls>\nNo.", BEGIN[:-3],
                                      BEGIN.replace('"f"', '"g"') + TEXT_A + ENDS)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_calls_are_the_same_wherever_the_text_is_cut(text: str, expected: Outcome) -> None:
    assert parse([text]) == expected
    for position, told in enumerate(told_before_each_character(reader().push, text)):
        begun = text[:position]
        assert outcome(told) == parse([begun], is_whole=False)
        assert parse([begun, text[position:]]) == expected


@given(data=st.data())
@settings(max_examples=300)
def test_what_is_told_depends_on_the_text_so_far_alone(data: st.DataObject) -> None:
    parts = [*FORMATS["deepseek_v32"].words, *(TRUE + ">", FALSE + ">"), "text", "any", '"', ">", "\n", " ", "1", "<"]
    text = BEGIN + "".join(data.draw(st.lists(st.sampled_from(parts), max_size=16)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:until] for start, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse([text], is_whole=is_whole)
        assert parse(pieces, is_whole=is_whole) == parse(list(text), is_whole=is_whole) == told


def test_what_is_held_to_calls_marks_its_values() -> None:
    grammar = held("deepseek_v32", TOOLS, is_one=True)
    rights = [("text", TRUE, "1"), ("number", FALSE, "1"), ("maybe", TRUE, "null"), ("maybe", FALSE, "null"),
              ("any", TRUE, "a"), ("any", FALSE, "[1]"), ("either", TRUE, "1"), ("either", FALSE, "1")]  # fmt: skip
    wrongs = [("text", FALSE, "1"), ("text", "", "1"), ("number", TRUE, "1"), ("list", TRUE, "[]"),
              ("either", FALSE, "x"), ("either", TRUE, "2"), ("new", TRUE, "1")]  # fmt: skip
    is_held = [is_in(grammar, BEGIN + parameter(name, text, mark) + ENDS) for name, mark, text in (*rights, *wrongs)]
    assert is_held == [True] * len(rights) + [False] * len(wrongs)
    free = held("deepseek_v32", [Tool(name="f", parameters={"type": "object"})], is_one=True)
    assert is_in(free, BEGIN + parameter("zone", "CET") + parameter("n", "3", FALSE) + ENDS)
    assert not is_in(free, BEGIN + parameter("zone", "CET", "") + ENDS)


@pytest.mark.parametrize("properties", [{'a"b': {}}, {"a": {"enum": [[f"</{DSML}parameter>"]]}}])
def test_what_cannot_be_said_is_refused(properties: dict[str, Any]) -> None:
    with pytest.raises(CannotBeHeld):
        held("deepseek_v32", [Tool(name="f", parameters={"properties": properties})], is_one=True)


def test_the_token_within_the_tags_is_used(tmp_path: Path) -> None:
    """DeepSeek's vocabulary has no tokens for whole tags."""
    made = tokenizer()
    made.add_tokens([tokenizers.AddedToken(DSML, normalized=False)])
    write_model(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    added = Tokenizer(made).added_ids(FORMATS["deepseek_v32"].words)
    assert list(added) == [DSML]
    grammar = calls_grammar(FORMATS["deepseek_v32"], TOOLS, is_one=False, tokens=added).text
    text = said("deepseek_v32", ("f", {"text": "a</b", "maybe": None, "any": "x", "either": 1}), ("now", {}))
    answer = [*made.encode(text).ids, EOS]
    assert answer.count(added[DSML]) == text.count(DSML)
    state = Grammars(tmp_path, vocab_size=300, eos_token_ids=frozenset({EOS})).state(grammar)
    for position, token_id in enumerate(answer):
        allowed = state.allowed(answer[:position])
        assert allowed is not None, state.error
        assert allowed[token_id], made.decode(answer[:position])
