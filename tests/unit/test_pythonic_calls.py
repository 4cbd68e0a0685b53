"""Calls in Python's syntax: their arguments as JSON, as they come, wherever the text is cut; what is broken, and what
is held to calls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, outcome, said, told_before_each_character

from router.text.calls.call_format import CannotBeHeld, Tool
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.python_values import MAX_KEY_CHARS
from router.text.calls.text_values import Schema
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

PARSERS = ("pythonic", "llama4_pythonic", "lfm2", "olmo3")
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "number": {"type": "integer"}, "on": {"type": "boolean"}, "list": {"type": "array"},
    "maybe": {"type": ["string", "null"]}, "colour": {"enum": ["red", 3, None]}, "any": {},
    "short": {"type": "string", "maxLength": 3},
}  # fmt: skip
TOOLS = [
    Tool(name="f", parameters={"type": "object", "properties": PROPERTIES, "required": ["number"]}), Tool(name="now"),
]  # fmt: skip


def reader_of(parser: str) -> ToolCallParser:
    schemas = {tool.name: Schema(tool.parameters) for tool in TOOLS}
    return ToolCallParser(FORMATS[parser], schemas, lambda index: f"id-{index}")


def parse(parser: str, pieces: list[str], *, is_whole: bool = True) -> Outcome:
    reader = reader_of(parser)
    told = [reader.push(piece) for piece in pieces]
    return outcome([*told, reader.finish()] if is_whole else told)


# -- values -----------------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, str, Any]] = [
    # the argument, its value in Python, its value in JSON
    ("any", '"Oslo"', "Oslo"), ("any", "'Oslo'", "Oslo"), ("any", "''", ""), ("any", '""', ""), ("any", '""""""', ""),
    ("any", '"""a "b" \'c\' ""\nd"""', 'a "b" \'c\' ""\nd'), ("any", "'''it's'''", "it's"), ("any", '"a\nb"', "a\nb"),
    ("any", "'a \"b\" é 😀 \\' \\\\'", 'a "b" é 😀 \' \\'),
    ("any", r'"\n\t\x41\u00e9\U0001f600\0\18"', "\n\tAé😀\0\x018"),
    ("any", r'"\d+ \/ \xzz \u12 \9"', r"\d+ / \xzz \u12 \9"), ("any", r'"\ud83d\ude00"', "😀"),
    ("any", r'"\U00110000"', r"\U00110000"), ("any", '"a\\\nb"', "ab"), ("any", r'r"\d\"\n"', r"\d\"\n"),
    ("any", "R'a'", "a"), ("any", "u'a'", "a"), ("any", "'a' \"b\"\n'c'", "abc"), ("any", "'a' ''", "a"),
    ("any", "1", 1), ("any", "-1.50", -1.5), ("any", "1e3", 1000.0), ("any", "1_000", 1000), ("any", "0x1F", 31),
    ("any", "+7", 7), ("any", "007", 7), ("any", ".5", 0.5), ("any", "5.", 5.0), ("any", "2.e1", 20.0),
    ("any", "True", True), ("any", "false", False), ("any", "None", None), ("any", "null", None),
    ("any", "[]", []), ("any", "{}", {}), ("any", "[1, 'a', [True, None], {}]", [1, "a", [True, None], {}]),
    ("any", "{'a': {'b': [1, {\"c\": None}]}, 'd': 'e'}", {"a": {"b": [1, {"c": None}]}, "d": "e"}),
    ("any", "{1: 2, None: 3, 'a' 'b': 4,}", {"1": 2, "None": 3, "ab": 4}), ("any", "[ 1 ,2\n, ]", [1, 2]),
    ("any", '{"a": true, "b": null}', {"a": True, "b": None}),
    # no literals
    ("any", "Oslo", "Oslo"), ("any", "New York", "New York"), ("any", "12:30", "12:30"), ("any", "1 + 2", "1 + 2"),
    ("any", "red", "red"), ("any", "date(2024, 'a,b)', [1])", "date(2024, 'a,b)', [1])"), ("any", "nan", "nan"),
    ("any", "f'{a}, b'", "f'{a}, b'"), ("any", "(1, 2)", "(1, 2)"), ("any", "a <b> \\, c", "a <b> \\, c"),
    ("any", "9" * 5000, "9" * 5000), ("any", "1e999.", "1e999."), ("any", ".1e999", ".1e999"), ("any", "٣", "٣"),
    # what the schema allows
    ("text", "12", "12"), ("text", "02139", "02139"), ("text", "None", None), ("text", "Oslo", "Oslo"),
    ("number", "'12'", 12), ("number", '"a\\"b"', 'a"b'), ("on", "'true'", True), ("on", "'yes'", "yes"),
    ("list", "'[1, \"a\"]'", [1, "a"]), ("list", "'\\ud800'", "?"), ("number", "'1' '2'", 12), ("maybe", "'1'", "1"),
    ("new", "'1'", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), VALUES, ids=[f"{name}={text:.30}" for name, text, _ in VALUES])
def test_values_of_pythons_are_told_as_json(name: str, text: str, value: Any) -> None:
    for behind, more in ((")]", {}), (", number = 3 , )\n]", {"number": 3})):
        content, [(called, arguments)] = parse("pythonic", [f"[f({name}={text}{behind}"])
        assert (content, called) == ("", "f")
        assert json.loads(arguments) == {name: value, **more}
        if len(text) < 100:
            assert parse("pythonic", list(f"[f({name}={text}{behind}")) == ("", [("f", arguments)])


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each, max_size=4),
    max_leaves=12,
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parser", PARSERS)
@given(value=TREES, write=st.sampled_from([repr, json.dumps]))
@settings(max_examples=200)
def test_what_was_said_comes_back(parser: str, value: Any, write: Any) -> None:
    text = said(parser, ("now", {})).replace("now()", f"f(any={write(value)})")
    content, [(_, arguments)] = parse(parser, [text])
    assert (content, json.loads(arguments)) == ("", {"any": value})
    assert parse(parser, list(text)) == ("", [("f", arguments)])


def test_a_string_comes_as_it_is_said() -> None:
    reader = reader_of("pythonic")
    assert not reader.push("[f(").calls
    (opened, *rest) = reader.push("text='It ").calls
    assert (opened.name, "".join(piece.arguments for piece in rest)) == ("f", '{"text": "It ')
    assert [piece.arguments for piece in reader.push('"rains').calls] == ['\\"rains']
    assert "".join(piece.arguments for piece in reader.push("', number=1").calls) == '", "number": '
    assert "".join(piece.arguments for piece in reader.push("2)").calls) == "12}"


# -- calls ------------------------------------------------------------------------------------------------------------

A, NOW = ("f", '{"text": "a"}'), ("now", "{}")
F = '[f(text="a")]'
OF_ALL: list[tuple[str, Outcome]] = [
    # a list of calls, to be put between the format's words
    (F, ("", [A])),
    ('[f(text="a"), now(), f(number=3)]', ("", [A, NOW, ("f", '{"number": 3}')])),
    ("[ f ( text = 'a' , ) ,\n now( ) , ]", ("", [A, NOW])),
    ("[f(text='a)', any=[')', \"]\"]), now()]", ("", [("f", '{"text": "a)", "any": [")", "]"]}'), NOW])),
    ("[f(other='é😀', from={'a': [1, {'b': None}]})]",
     ("", [("f", '{"other": "é😀", "from": {"a": [1, {"b": null}]}}')])),
    # broken: what Python would not read ends the arguments
    *((f"[f({broken})]", ("", [("f", told)])) for broken, told in (
        ("text='sed -n '1p' f'", '{"text": "sed -n "'), ("text='a', 3", '{"text": "a"'), ("any=", '{"any": '),
        ("any=[1, 2", '{"any": [1, 2'), ("any={'a', 'b'}", '{"any": {"a"'), ("any=[1}", '{"any": [1'),
        ("text='a' f'b'", '{"text": "a"'), ("text='a' number=3", '{"text": "a"'), ("any=,", '{"any": '),
        ("text='a', **more", '{"text": "a"'), ("text='a', number==3", '{"text": "a"'),
        (f"text='a', {'k' * MAX_KEY_CHARS}=1", '{"text": "a"'),
    )),
]  # fmt: skip
NONE = ["[]", "[f]", "[f(]", "[f(3)]", "[f('a')]", "[f(text)]", "[g(text='a')]", "[f(text=='a')", "[f](https://f)",
        "[1, 2]", "[ ", "[f(", "[f(te", "[f(text ", "f(text='a')", "[[f()]]", f"[{'f' * MAX_HEAD_CHARS}()]",
        f"[f({'k' * MAX_HEAD_CHARS}=1)]"]  # fmt: skip
BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
LINES, LINES_END = "<function_calls>\nf(text='a')", "</function_calls>"
JSON = '{"name": "f", "arguments": {"text": "a"}}'
CASES: list[tuple[str, str, Outcome]] = [
    *((parser, text, told) for parser in ("pythonic", "llama4_pythonic") for text, told in OF_ALL),
    *(("lfm2", f"{BEGIN}{text}{END} So.", (f"{content} So.", calls)) for text, (content, calls) in OF_ALL),
    *((parser, text, (text, [])) for parser in ("pythonic", "llama4_pythonic") for text in NONE),
    *(("lfm2", f"{BEGIN}{text}", (f"{BEGIN}{text}", [])) for text in NONE),
    ("pythonic", f"  {F}\n Done.", ("\n Done.", [A])), ("pythonic", f"I call {F}", (f"I call {F}", [])),
    ("pythonic", f"<|python_tag|>{F}", ("", [A])), ("pythonic", f"{F}\n{F}", ("", [A, A])),
    ("pythonic", "[f(text='a'), g(), now()]", (", g(), now()]", [A])), ("pythonic", f"{F[:-1]}, 3]", (", 3]", [A])),
    ("pythonic", f"{F} [1]", (" [1]", [A])), ("pythonic", "<|python", ("<|python", [])),
    ("llama4_pythonic", f"<|python_start|>{F}<|python_end|>", ("", [A])),
    ("llama4_pythonic", "<|python_start|>[f(any=[1<|python_end|>.", (".", [("f", '{"any": [')])),
    ("lfm2", f"I look. {BEGIN}{F}{END}\n{BEGIN}[now()]{END}", ("I look.", [A, NOW])), ("lfm2", F, (F, [])),
    ("lfm2", f"{BEGIN}[now(){BEGIN}{F}", ("", [NOW, A])), ("lfm2", f"{BEGIN}{BEGIN}{F}", (BEGIN, [A])),
    ("lfm2", f"{BEGIN}[f(number=1{END}{BEGIN}{F}{END}", ("", [("f", '{"number": '), A])),
    ("lfm2", f"{BEGIN}[f(text='{END}', any=<b>)]{END}", ("", [("f", f'{{"text": "{END}", "any": "<b>"}}')])),
    ("lfm2", f"{BEGIN}[f(any=a <|tool_x){END}", ("", [("f", '{"any": "a <|tool_x"}')])),
    # cut off
    ("lfm2", f"{BEGIN}[f(text='a", ("", [("f", '{"text": "a')])), ("lfm2", f"{BEGIN}{F}<|tool", ("", [A])),
    ("lfm2", f"{BEGIN}[f(text='a\\", ("", [("f", '{"text": "a')])),
    ("lfm2", f"{BEGIN}[f(any=1", ("", [("f", '{"any": ')])),
    # as JSON, if the system prompt asks for it
    ("lfm2", f"{BEGIN}[{JSON}, {JSON}]{END}", ("", [A, A])),
    ("lfm2", f"{BEGIN}[{JSON[:-2]}{END}", ("", [(A[0], A[1][:-1])])),
    ("pythonic", f"[{JSON}]", (f"[{JSON}]", [])),
    ("lfm2", f"{BEGIN}[now(),{END} So.", (" So.", [NOW])), ("lfm2", f"{BEGIN}[now(),<b>", (",<b>", [NOW])),
    # on lines
    ("olmo3", f"I look.\n{LINES}\nnow()\n{LINES_END} So.", ("I look. So.", [A, NOW])),
    ("olmo3", f"{LINES} f ( text = 'a\n' , any=[\n1, true]\n)now( ){LINES_END}",
     ("", [A, ("f", '{"text": "a\\n", "any": [1, true]}'), NOW])),
    ("olmo3", f"{LINES}\nDone.", ("\nDone.", [A])), ("olmo3", f"{LINES}\n</func", ("", [A])),
    ("olmo3", f"{LINES}\ng(a=1)\n{LINES_END}", (f"\ng(a=1)\n{LINES_END}", [A])),
    ("olmo3", f"{LINES}\nf(text='a', 3)\nnow()\n{LINES_END}{LINES}", ("", [A, ("f", '{"text": "a"'), A])),
    ("olmo3", f"{LINES}\nf(any=1{LINES_END}.", (".", [A, ("f", '{"any": ')])),
    *(("olmo3", text, (text, [])) for text in (f"<function_calls>\n{F}", "<function_calls>\n<invoke name='f'>", F)),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls_are_the_same_wherever_the_text_is_cut(parser: str, text: str, expected: Outcome) -> None:
    assert parse(parser, [text]) == expected
    for position, told in enumerate(told_before_each_character(reader_of(parser).push, text)):
        begun = text[:position]
        assert outcome(told) == parse(parser, [begun], is_whole=False)
        assert parse(parser, [begun, text[position:]]) == expected


PARTS = [*"[](){}'\"\\,:= \nxuU0r<", "'''", '"""', "text", "number", "any=", "f(", "12", "True", "Oslo", "\\x4", "\\12",
         "\\ud83d", END, BEGIN, "<|tool_call", "<|python_end|>", ")\nf(", "</func", LINES_END]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
@settings(max_examples=400)
def test_what_is_told_depends_on_the_text_so_far_alone(parser: str, data: st.DataObject) -> None:
    begin = "".join(FORMATS[parser].begins) + ("f(" if parser == "olmo3" else "[f(")
    begin += data.draw(st.sampled_from(["", "any=", "number=", "any={", "any=["]))
    text = begin + "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=16)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:until] for start, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse(parser, [text], is_whole=is_whole)
        assert parse(parser, pieces, is_whole=is_whole) == parse(parser, list(text), is_whole=is_whole) == told


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "begun", ["", "text='", "text='''", "any=", "any=[", "any={", "any={1:", "number='", "text='a'"]
)
@pytest.mark.parametrize(
    "piece", ["a", " ", "\\", '"', "'", "{", "[", "(", "1", "<", "\\1", ",", "='", "<|tool_call_en"]
)
def test_no_text_takes_long(begun: str, piece: str) -> None:
    """Also if all of it comes at once, as at a router where an answer goes on."""
    for pieces in ([piece] * 5000, [piece * 50_000]):
        reader = reader_of("lfm2")
        reader.push(f"{BEGIN}[f({begun}")
        began_s = time.process_time()
        for each in pieces:
            reader.push(each)
        reader.finish()
        assert time.process_time() - began_s < 1


# -- what is held to calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
def test_an_answer_is_held_to_the_schemas(parser: str) -> None:
    grammar = held(parser, TOOLS, is_one=False)

    def may_be(arguments: str) -> bool:
        return is_in(grammar, said(parser, ("now", {})).replace("now()", f"f({arguments})"))

    rights = ["number=3", 'text="a", number=-3', 'number=3, on=True, list=[1, "a"], maybe=None, colour=None, any=False',
              'text="", number=3, colour="red"', "number=3, colour=3", 'number=3, maybe="x", short="abc"',
              'number=3, any={"a": null}']  # fmt: skip
    wrongs = ["", 'text="a"', "number=three", 'number="3"', "number=3, on=yes", "number=3, text='a'", "number=3,",
              "text='a', number=3", 'text=a, number=3', 'number=3, colour="blue"', 'number=3, short="abcd"',
              ", number=3", "number=3, new=1", "number=3 on=True", "number=3, text=\"a\"",
              "number=3, number=3"]  # fmt: skip
    assert [right for right in rights if not may_be(right)] == []
    assert [wrong for wrong in wrongs if may_be(wrong)] == []
    free = held(parser, [Tool(name="f", parameters={"type": "object"})], is_one=True)
    assert is_in(free, said(parser, ("f", {"zone": "CET", "n": 3, "x": None})))
    assert is_in(free, said(parser, ("f", {})))
    for parameters in ({"additionalProperties": False}, {"properties": {"never": False}}):
        nothing = held(parser, [Tool(name="f", parameters=parameters)], is_one=True)
        assert is_in(nothing, said(parser, ("f", {})))
        assert [name for name in ("never", "a") if is_in(nothing, said(parser, ("f", {name: 1})))] == []


@pytest.mark.parametrize("parser", PARSERS)
def test_what_cannot_be_said_in_pythons_syntax_is_refused(parser: str) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"a": {"enum": []}}, ("a",), "no value fits"), ({"a": False}, ("a",), "no value fits"),
        *(({name: {}}, (), "cannot be the name of an argument")
          for name in ("a b", "a=", "", "$a", "k" * (MAX_KEY_CHARS + 1))),
    ]  # fmt: skip
    for properties, required, reason in cases:
        parameters = {"type": "object", "properties": properties, "required": list(required)}
        with pytest.raises(CannotBeHeld, match=reason) as caught:
            held(parser, [Tool(name="now"), Tool(name="f", parameters=parameters)], is_one=True)
        assert caught.value.tool == 1


@pytest.mark.parametrize("parser", PARSERS)
def test_many_arguments_that_may_be_left_out_are_held_at_once(parser: str) -> None:
    names = [f"a{number}" for number in range(60)]
    tool = Tool(name="f", parameters={"properties": {name: {"type": "integer"} for name in names}})
    grammar = held(parser, [tool], is_one=True)
    assert is_in(grammar, said(parser, ("f", {"a3": 1, "a59": 2})))
    assert not is_in(grammar, said(parser, ("f", {"a59": 1, "a3": 2})))
