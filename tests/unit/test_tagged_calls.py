"""Calls whose arguments are texts between tags: their JSON, when they are whole, in pieces, broken, cut off or held to
schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, outcome, said, text_of, told_before_each_character

from router.text.calls.call_format import CannotBeHeld, Tool
from router.text.calls.tagged import MAX_KEY_CHARS, TaggedFormat
from router.text.calls.text_values import MAX_DEPTH, TYPES, Schema, json_of_text
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

UNMARKED = ("qwen3_coder", "glm45", "glm47", "seed_oss", "minimax_m2")
PARSERS = (*UNMARKED, "deepseek_v32")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "number": {"type": "integer"}, "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": "array"}, "any": {},
        "colour": {"enum": ["red", "light blue", 3]}, "other": {"$ref": "#/$defs/text"},
    },
    "required": ["text"],
    "$defs": {"text": {"type": "string", "minLength": 2, "maxLength": 4}},
}  # fmt: skip
TOOLS = [Tool(name="f", parameters=PARAMETERS), Tool(name="now")]


def tags_of(parser: str) -> TaggedFormat:
    tags = FORMATS[parser]
    assert isinstance(tags, TaggedFormat)
    return tags


def reader_of(parser: str) -> ToolCallParser:
    schemas = {tool.name: Schema(tool.parameters) for tool in TOOLS}
    return ToolCallParser(FORMATS[parser], schemas, lambda index: f"id-{index}")


def parse(parser: str, pieces: list[str], *, is_whole: bool = True) -> Outcome:
    reader = reader_of(parser)
    told = [reader.push(piece) for piece in pieces]
    return outcome([*told, reader.finish()] if is_whole else told)


def call(parser: str, **arguments: Any) -> str:
    return said(parser, ("f", arguments))


# -- values -----------------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, str, Any]] = [
    # the argument, its text, its value
    ("text", "Oslo", "Oslo"), ("text", "12", "12"), ("text", "null", "null"), ("text", '{"a": 1}', '{"a": 1}'),
    ("text", " a\n\tb ", " a\n\tb "), ("text", "", ""), ("text", 'é "\\ 😀 <b> </ </param', 'é "\\ 😀 <b> </ </param'),
    ("number", "12", 12), ("number", " -3 ", -3), ("number", "1e3", 1000.0), ("number", "a dozen", "a dozen"),
    ("number", "NaN", "NaN"), ("number", '"12"', 12), ("number", "9" * 5000, "9" * 5000),
    ("on", "true", True), ("on", "True", True), ("on", "yes", "yes"), ("on", "1", "1"),
    ("maybe", "null", None), ("maybe", "None", None), ("maybe", "12", "12"), ("maybe", '"a"', '"a"'),
    ("list", "[1, {}]", [1, {}]), ("list", '[\n  "a"\n]', ["a"]), ("list", '"[1]"', [1]), ("list", "a, b", "a, b"),
    ("list", "[" * 100_000, "[" * 100_000), ("list", '["a\nb", "\\ud800"]', ["a\nb", "?"]),
    ("any", "12", 12), ("any", "true", True), ("any", "a", "a"), ("any", '"a"', '"a"'), ("any", "{}", {}),
    ("colour", "red", "red"), ("colour", "3", 3), ("other", "12", "12"), ("unknown", "12", 12), ("unknown", "a", "a"),
]  # fmt: skip


@pytest.mark.parametrize("parser", UNMARKED)
def test_a_schema_says_what_a_text_is(parser: str) -> None:
    for name, text, value in VALUES:
        (content, [(called, arguments)]) = parse(parser, [said(parser, ("f", {name: text}))])
        assert (content, called) == ("", "f")
        assert json.loads(arguments) == {name: value}, (name, text[:80])


def test_types_that_a_schema_allows() -> None:
    of = Schema({"properties": {}, "$defs": {
        "text": {"type": "string"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]},
        "a/b": {"type": "null"},
    }}).types  # fmt: skip
    cases: list[tuple[Any, set[str]]] = [
        ({"type": "string"}, {"string"}), ({"type": ["integer", "null"]}, {"number", "null"}),
        ({"enum": ["a", 1, True, None]}, {"string", "number", "boolean", "null"}), ({"const": [1]}, {"array"}),
        ({"oneOf": [{"type": "object"}, {"$ref": "#/$defs/text"}]}, {"object", "string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/text"}]}, {"string"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}), ({"$ref": "#/$defs/a~1b"}, {"null"}),
    ]  # fmt: skip
    for schema, types in cases:
        assert of(schema) == types, schema
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH + 1):
        deep = {"anyOf": [deep]}
    for schema in ({}, True, 3, {"type": "strin"}, {"type": 3}, {"enum": 3}, {"anyOf": 3}, {"$ref": "#/$defs/self"},
                   {"$ref": "elsewhere"}, {"$ref": "#/nowhere/at"}, deep):  # fmt: skip
        assert of(schema) == TYPES, schema


def test_schemas_that_refer_to_each_other_in_many_ways_take_no_time() -> None:
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(MAX_DEPTH)}
    assert Schema({"$defs": definitions}).types({"$ref": "#/$defs/d0"}) == TYPES


# -- calls ------------------------------------------------------------------------------------------------------------

A = ("f", '{"text": "a"}')
NOW = ("now", "{}")
Q = "<tool_call>\n<function=f>\n<parameter=text>\n"
G = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>"
TEXT_OF_TAGS = '{"text": "</function> a\\n</function>\\n</pa"'
LONG = "k" * MAX_KEY_CHARS
QWEN: list[tuple[str, Outcome]] = [
    (f"I look.\n{call('qwen3_coder', text='a')}\n", ("I look.", [A])),
    (f"{call('qwen3_coder', text='a')}\n{said('qwen3_coder', ('now', {}))} So.", (" So.", [A, NOW])),
    (call("qwen3_coder", text="a", number=3), ("", [("f", '{"text": "a", "number": 3}')])),
    # words or white space left out
    ("<function=f><parameter=text>a</parameter></function>", ("", [A])),
    (f"<function=now>\n</function>\n{call('qwen3_coder', text='a')}", ("", [NOW, A])),
    (f"{Q}a\n</parameter>\n</function>\n<function=now></function></tool_call>", ("", [A, NOW])),
    (f"{Q}a\n</parameter>\n</tool_call>.", (".", [A])),
    (f"{Q}a\n</function>\n</tool_call>.", (".", [A])),
    (f"{Q}a</function></tool_call>.", (".", [A])),
    (f"{Q}a</tool_call>{Q}a\n</parameter></function></tool_call>", ("", [A, A])),
    (f"{Q}a\n</parameter>\n{Q}a\n</parameter></function></tool_call>", ("", [A, A])),
    (f"{Q}</function> a\n</function>\n</pa\n</parameter>", ("", [("f", TEXT_OF_TAGS)])),
    (f"{Q}\n\na\n\n</parameter></function>", ("", [("f", '{"text": "\\n\\na\\n"}')])),
    (f"{Q}a\n</parameter> and <b> </function>", ("", [A])),
    (f"<tool_call><function=f><parameter={LONG}k>1</parameter>{Q[24:]}a</parameter></function>", ("", [A])),
    # cut off
    (f"{Q}a b", ("", [("f", '{"text": "a b')])),
    (f"{Q}a\n</para", ("", [("f", '{"text": "a')])),
    ("<tool_call>\n<function=f>\n<parameter=number>\n12", ("", [("f", '{"number": ')])),
    ("<tool_call>\n<function=f>\n<param", ("", [("f", "")])),
    *((text, (text, [])) for text in (
        "<tool_call>", "<tool_call>\n<func", "<tool_call>\n<function=f", "<function=f b>", "<tool_call> f",
        "<function=g></function>", "<functions=f>",
        "<tool_call><function=g>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
    )),
    ("<tool_call><function=g>" + call("qwen3_coder", text="a"), ("<tool_call><function=g>", [A])),
]  # fmt: skip
GLM: list[tuple[str, Outcome]] = [
    (f"I look.\n{call('glm45', text='a')}\n", ("I look.", [A])),
    (f"{call('glm45', text='a')}\n{said('glm47', ('now', {}), ('f', {'text': 'a'}))} So.", (" So.", [A, NOW, A])),
    (call("glm47", text="a", number=3), ("", [("f", '{"text": "a", "number": 3}')])),
    ("<tool_call> f <arg_key> text </arg_key> <arg_value> a</arg_value> </tool_call>", ("", [("f", '{"text": " a"}')])),
    # words left out
    (f"{G}a</tool_call>{call('glm45', text='a')}", ("", [A, A])),
    (f"{G}a</arg_value>{call('glm45', text='a')}", ("", [A, A])),
    ("<tool_call>f<arg_key>on</arg_key><arg_key>text</arg_key><arg_value>a</arg_value></tool_call>", ("", [A])),
    ("<tool_call>f<arg_key>on</arg_key>b<arg_key>text</arg_key><arg_value>a</arg_value>c</tool_call>", ("", [A])),
    (f"<tool_call>f<arg_key>{LONG}k</arg_key><arg_value>1</arg_value>{G[12:]}a</arg_value></tool_call>", ("", [A])),
    # cut off
    (f"{G}a </arg", ("", [("f", '{"text": "a ')])),
    ("<tool_call>f\n<arg_key>text</arg_key>\n<ar", ("", [("f", "")])),
    *((text, (text, [])) for text in (
        "<tool_call>", "<tool_call>f", "<tool_call>f\n", "<tool_call>f\n<arg", "<tool_call>f b", "<tool_call>f\nOslo",
        "<tool_call>g</tool_call>", "<tool_call>g\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        "<tool_call></tool_call>",
    )),
    ("<tool_call>" + call("glm45", text="a"), ("<tool_call>", [A])),
]  # fmt: skip
CASES = [
    *(("qwen3_coder", *case) for case in QWEN),
    *((parser, *case) for parser in ("glm45", "glm47") for case in GLM),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls_and_what_is_none(parser: str, text: str, expected: Outcome) -> None:
    whole = parse(parser, [text])
    assert whole == expected
    for position, told in enumerate(told_before_each_character(reader_of(parser).push, text)):
        begun = text[:position]
        assert outcome(told) == parse(parser, [begun], is_whole=False)
        assert parse(parser, [begun, text[position:]]) == whole


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
@settings(max_examples=300)
def test_what_is_told_depends_on_the_text_so_far_alone(parser: str, data: st.DataObject) -> None:
    """Whatever a model writes within a call."""
    parts = [*FORMATS[parser].words, "f", "text", "number", ">", "\n", " ", "a", "12", '"', "<", "</", "{", "\\"]
    begin = "<tool_call>\n<function=f>" if parser == "qwen3_coder" else "<tool_call>f<arg_key>"
    text = begin + "".join(data.draw(st.lists(st.sampled_from(parts), max_size=16)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:until] for start, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse(parser, [text], is_whole=is_whole)
        assert parse(parser, pieces, is_whole=is_whole) == told
        assert parse(parser, list(text), is_whole=is_whole) == told


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parser", PARSERS)
@given(arguments=st.fixed_dictionaries({"text": st.text(), "number": st.integers(), "list": st.lists(st.text())}))
@settings(max_examples=100)
def test_what_was_said_comes_back(parser: str, arguments: dict[str, Any]) -> None:
    if any(end in text_of(value) for value in arguments.values() for end in FORMATS[parser].words):
        return
    (content, [(_, said_arguments)]) = parse(parser, list(call(parser, **arguments)))
    assert (content, json.loads(said_arguments)) == ("", arguments)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_text_comes_as_it_is_said(parser: str) -> None:
    reader = reader_of(parser)
    text = call(parser, text="It rains")
    begin, rest = text.split("It ")
    assert [piece.name for piece in reader.push(begin).calls if piece.name] == ["f"]
    assert [piece.arguments for piece in reader.push("It ").calls] == ["It "]
    assert "".join(piece.arguments for piece in reader.push(rest).calls) == 'rains"}'


# -- what is held to calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS)
def test_an_answer_is_held_to_the_schemas(parser: str) -> None:
    grammar = held(parser, TOOLS, is_one=False)
    every = {"text": "a\n</b> é", "number": 3, "on": True, "maybe": "x", "list": [1, "a"], "any": "x",
             "colour": "light blue", "other": "abcd"}  # fmt: skip
    assert is_in(grammar, call(parser, **every))
    for right in ({}, {"number": -3}, {"colour": 3}, {"maybe": None}, {"other": "ab"}, {"list": []}, {"any": 1}):
        assert is_in(grammar, call(parser, text="", **right)), right
    wrongs = [{"text": "a", **wrong} for wrong in (
        {"number": "three"}, {"on": "yes"}, {"list": "a"}, {"colour": "blue"}, {"other": "a"}, {"other": "abcde"},
        {"number": [1]}, {"new": "1"},
    )]  # fmt: skip
    assert [wrong for wrong in [*wrongs, {}, {"number": 3}] if is_in(grammar, call(parser, **wrong))] == []
    assert is_in(grammar, said(parser, ("now", {}), ("f", {"text": "b"})))
    assert not is_in(grammar, said(parser, ("now", {"zone": "CET"})))
    free = held(parser, [Tool(name="f", parameters={"type": "object"})], is_one=True)
    assert is_in(free, call(parser, zone="CET", n=3))
    assert not is_in(
        held(parser, [Tool(name="f", parameters={"additionalProperties": False})], is_one=True), call(parser, a=1)
    )
    long = {"text": {"type": "string", "minLength": True, "maxLength": 20_000}}
    uncounted = held(parser, [Tool(name="f", parameters={"properties": long})], is_one=True)
    assert is_in(uncounted, call(parser, text="a"))
    assert "20000" not in uncounted, "which no worker could hold an answer to"


def _held_to(parser: str, *required: str, **properties: Any) -> str:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return held(parser, [Tool(name="now"), Tool(name="f", parameters=parameters)], is_one=True)


@pytest.mark.parametrize("parser", PARSERS)
def test_what_cannot_be_said_between_tags_is_refused(parser: str) -> None:
    end = FORMATS[parser].words[-1]
    cannot_be_said, names = "would be read back as another value", "cannot be the name of an argument"
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"a": {"const": f"x{end}"}}, (), cannot_be_said),
        ({"a": {"type": "string", "enum": ["x", tags_of(parser).call_end]}}, ("a",), cannot_be_said),
        ({"a": {"$ref": "#/properties/b"}, "b": {"const": [end]}}, (), cannot_be_said),
        *([({"a": {"enum": ["True", False]}}, (), cannot_be_said)] if parser in UNMARKED else []),
        ({"a": {"enum": []}}, ("a",), "no value fits"),
        ({"a": False}, ("a",), "no value fits"),
        ({"a": {"$ref": "#/properties/b"}, "b": False}, ("a",), "no value fits"),
        ({"a": {"type": "string", "const": 3}}, ("a",), "no value fits"),
        *(({name: {}}, (), names) for name in ("a<b", "a>", "a\nb", " a", "a\t", "k" * (MAX_KEY_CHARS + 1), f"a{end}")),
        ({}, ("a>b",), names),
    ]
    for properties, required, reason in cases:
        with pytest.raises(CannotBeHeld, match=reason) as caught:
            _held_to(parser, *required, **properties)
        assert caught.value.tool == 1


@pytest.mark.parametrize("parser", PARSERS)
def test_what_fits_nothing_and_need_not_be_there_is_left_out(parser: str) -> None:
    grammar = _held_to(parser, never=False, none={"enum": []}, a={"type": "string"}, **{"<": False})
    assert is_in(grammar, call(parser, a="x"))
    assert not is_in(grammar, call(parser, never="x"))
    assert not is_in(grammar, call(parser, none=""))
    nothing = _held_to(parser, never=False)
    assert is_in(nothing, call(parser))
    assert [name for name in ("never", "made_up") if is_in(nothing, call(parser, **{name: "x"}))] == []


@pytest.mark.parametrize("parser", PARSERS)
def test_whatever_an_enum_lets_a_model_say_is_told_as_one_of_its_values(parser: str) -> None:
    values = ["", "\n", "\na\n", " a ", "</arg", "</function>", "1", 1, "null", None, [1, "\n"], {"a": "<"}, 1e30]
    grammar = _held_to(parser, any={"enum": values}, text={"type": "string", "enum": ["a", 3]})
    schemas = {"f": Schema({"properties": {"any": {"enum": values}}})}
    for value in values:
        text = call(parser, any=value)
        assert is_in(grammar, text), value
        reader = ToolCallParser(FORMATS[parser], schemas, lambda index: f"id-{index}")
        _, [(_, told)] = outcome([reader.push(text), reader.finish()])
        assert json.loads(told)["any"] in values
    assert is_in(grammar, call(parser, text="a"))
    assert not is_in(grammar, call(parser, text=3)), "which would be told as a string"


@pytest.mark.parametrize("parser", PARSERS)
def test_a_text_ends_with_the_first_tag_that_ends_it(parser: str) -> None:
    """The grammar that holds an answer to calls, and the reader of calls, agree on that."""
    grammar = held(parser, TOOLS, is_one=True)
    for word in (tags_of(parser).call_end, tags_of(parser).value_end):
        assert not is_in(grammar, call(parser, text=f"a{word}b"))
        assert not is_in(grammar, call(parser, text=word))
    assert is_in(grammar, call(parser, text="</function> </arg_key>"))


def test_a_value_that_is_no_text_is_on_one_line() -> None:
    """Texts within the value, as the model wrote them, are kept."""
    assert json_of_text('{\n "a": "b\nc"}', frozenset({"object"})) == '{"a": "b\\nc"}'
    assert json_of_text("1.50", TYPES) == "1.50"
    assert json_of_text("[1e999]", TYPES) == "[1e999]"
    assert json_of_text("[1e999,\n2]", TYPES) == '"[1e999,\\n2]"'


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "piece", ["<", "</", " " * 80, "\n", "a", "</function>", "</parameter>", "<arg_key>", "<parameter=a>\n1"]
)
def test_no_text_takes_long(parser: str, piece: str) -> None:
    """Wherever in a call the text comes."""
    text = said(parser, ("f", {"list": "[1]", "text": "a"}))
    for begun in (tags_of(parser).call, "[1", "text", "a"):
        reader = reader_of(parser)
        reader.push(text[: text.index(begun) + len(begun)])
        began_s = time.process_time()
        for _ in range(2000):
            reader.push(piece)
        reader.finish()
        assert time.process_time() - began_s < 1
