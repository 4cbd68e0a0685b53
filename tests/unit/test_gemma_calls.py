"""Calls of Gemma 4, whose strings stand between tokens: their arguments as JSON, as they come, wherever the text is
cut; what is broken, and what is held to calls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, outcome, said, told_before_each_character

from router.text.calls.call_format import CannotBeHeld, Tool
from router.text.calls.gemma_values import MAX_KEY_CHARS
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.text_values import Schema
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "number": {"type": "integer"}, "on": {"type": "boolean"}, "list": {"type": "array"},
    "maybe": {"type": ["string", "null"]}, "any": {},
}  # fmt: skip
TOOLS = [Tool(name="f", parameters={"type": "object", "properties": PROPERTIES}), Tool(name="now")]
Q = '<|"|>'
BEGIN, END = "<|tool_call>", "<tool_call|>"


def reader_of() -> ToolCallParser:
    schemas = {tool.name: Schema(tool.parameters) for tool in TOOLS}
    return ToolCallParser(FORMATS["gemma4"], schemas, lambda index: f"id-{index}")


def parse(pieces: list[str], *, is_whole: bool = True) -> Outcome:
    reader = reader_of()
    told = [reader.push(piece) for piece in pieces]
    return outcome([*told, reader.finish()] if is_whole else told)


# -- values -----------------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, str, Any]] = [
    # the argument, its value as Gemma writes it, its value in JSON
    ("any", f"{Q}Oslo{Q}", "Oslo"), ("any", f"{Q}{Q}", ""), ("any", f"{Q} a\n\tb {Q}", " a\n\tb "),
    ("any", f'{Q}a "b" \'c\' \\n \\ é 😀 }}]{{,:{Q}', 'a "b" \'c\' \\n \\ é 😀 }]{,:'),
    ("any", f'{Q}{END}{BEGIN}call:f{{}}<|"<|"|{Q}', f'{END}{BEGIN}call:f{{}}<|"<|"|'),
    ("any", "1", 1), ("any", "-1.50", -1.5), ("any", "1e3", 1000.0), ("any", "108.", 108.0), ("any", "007", 7),
    ("any", "true", True), ("any", "False", False), ("any", "null", None), ("any", "None", None),
    ("any", "[]", []), ("any", "{}", {}), ("any", f"[1,{Q}a,]{Q},[true,null],{{}}]", [1, "a,]", [True, None], {}]),
    ("any", f"{{a:{{b:[1,{{c:null}}]}},d:{Q}e}}{Q}}}", {"a": {"b": [1, {"c": None}]}, "d": "e}"}),
    ("any", "[ 1 ,2\n, ]", [1, 2]), ("any", "{ a : 1 ,\n}", {"a": 1}),
    # keys
    ("any", f"{{{Q}a{Q}:1,{Q}b:{{}} {Q} :2,{Q}{Q}:3}}", {"a": 1, "b:{} ": 2, "": 3}),
    ("any", '{"a\\"é":1,"b" : "c"}', {'a"é': 1, "b": "c"}), ("any", "{x-y.z $é 1:1}", {"x-y.z $é 1": 1}),
    # no literals, and JSON's quotes
    ("any", "Oslo", "Oslo"), ("any", "New York", "New York"), ("any", "12:30", "12:30"), ("any", "a <b> {", "a <b> {"),
    ("any", '"Oslo"', "Oslo"), ("any", '"a, \\"b\\" }]\\\\"', 'a, "b" }]\\'), ("any", '5" pipe', '5" pipe'),
    ("any", '"\\ud83d"', "?"), ("any", '"a" b', '"a" b'), ("any", "9" * 5000, "9" * 5000), ("any", "NaN", "NaN"),
    # what the schema allows
    ("text", "12", "12"), ("text", "02139", "02139"), ("text", "null", None), ("text", f"{Q}12{Q}", "12"),
    ("any", '"12"', "12"), ("number", f"{{number:{Q}1{Q}}}", {"number": "1"}), ("number", f"[{Q}1{Q}]", ["1"]),
    ("number", f"{Q}12{Q}", 12), ("number", '"12"', 12), ("number", f"{Q}a dozen{Q}", "a dozen"),
    ("on", f"{Q}true{Q}", True), ("list", f'{Q}[1, "a"]{Q}', [1, "a"]), ("maybe", f"{Q}1{Q}", "1"),
    ("new", f"{Q}1{Q}", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), VALUES, ids=[f"{name}={text:.30}" for name, text, _ in VALUES])
def test_values_of_gemmas_are_told_as_json(name: str, text: str, value: Any) -> None:
    for behind, more in (("}", {}), (f", number : 3\n,}}{END}", {"number": 3})):
        content, [(called, arguments)] = parse([f"{BEGIN}call:f{{{name}:{text}{behind}"])
        assert (content, called) == ("", "f")
        assert json.loads(arguments) == {name: value, **more}
        if len(text) < 100:
            assert parse(list(f"{BEGIN}call:f{{{name}:{text}{behind}")) == ("", [("f", arguments)])


KEYS = st.from_regex(r"[a-z$_.é-]([a-z ]{0,4}[a-z0-9])?", fullmatch=True)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text().filter(lambda text: Q not in text and not text.endswith(("<", "<|", '<|"', '<|"|'))),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(KEYS, each, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(value=TREES)
@settings(max_examples=300)
def test_what_was_said_comes_back(value: Any) -> None:
    text = said("gemma4", ("f", {"any": value}))
    content, [(_, arguments)] = parse([text])
    assert (content, json.loads(arguments)) == ("", {"any": value})
    assert parse(list(text)) == ("", [("f", arguments)])


def test_a_string_comes_as_it_is_said() -> None:
    reader = reader_of()
    assert not reader.push(f"{BEGIN}call:f").calls
    (opened, *rest) = reader.push(f"{{text:{Q}It ").calls
    assert (opened.name, "".join(piece.arguments for piece in rest)) == ("f", '{"text": "It ')
    assert [piece.arguments for piece in reader.push('"rains<|').calls] == ['\\"rains']
    assert "".join(piece.arguments for piece in reader.push('"|>,number:1').calls) == '", "number": '
    assert "".join(piece.arguments for piece in reader.push("2}").calls) == "12}"


# -- calls ------------------------------------------------------------------------------------------------------------

A, NOW = ("f", '{"text": "a"}'), ("now", "{}")
F = f"{BEGIN}call:f{{text:{Q}a{Q}}}{END}"
CASES: list[tuple[str, Outcome]] = [
    (F, ("", [A])),
    (said("gemma4", ("f", {"text": "a"}), ("now", {}), ("f", {"number": 3})), ("", [A, NOW, ("f", '{"number": 3}')])),
    (f"I look.\n{F}\n{F} So.", ("I look. So.", [A, A])),
    (f"{BEGIN} call: now {{ }} {END}\n", ("", [NOW])),
    # the end left out
    (f"{BEGIN}call:now{{}}{F}", ("", [NOW, A])), (f"{BEGIN}call:now{{{F}", ("", [("now", "{"), A])),
    (f"{BEGIN}call:now{{}} Done.", (" Done.", [NOW])),
    # broken: what the syntax does not allow ends the arguments
    *((f"{BEGIN}call:f{{{broken}{END}{F}.", (".", [("f", told), A])) for broken, told in (
        ("number:3", '{"number": '), (f"text:{Q}a{Q}", '{"text": "a"'), ("any:[1,2", '{"any": [1, '),
        ("any:[1}", '{"any": [1'), ("any:,number:1}", '{"any": '), ("3}", "{"), (f"{Q}a{Q}}}", "{"), ("{}}", "{"),
        (f"text:{Q}a{Q} number:3}}", '{"text": "a"'), (f"text:{Q}a{Q}b{Q}}}", '{"text": "a"'), (":1}", "{"),
        (f"text:{Q}a{Q},{'k' * MAX_KEY_CHARS}:1}}", '{"text": "a"'), ("any:<b", '{"any": '), ("", "{"),
    )),
    (f"{BEGIN}call:now{{}}}}{END}", (f"}}{END}", [NOW])),
    # cut off
    (f"{BEGIN}call:f{{text:{Q}a", ("", [("f", '{"text": "a')])), (f'{F[:-12]}<tool', ("", [A])),
    (f'{BEGIN}call:f{{text:{Q}a<|"', ("", [("f", '{"text": "a')])),
    (f"{BEGIN}call:f{{any:1", ("", [("f", '{"any": ')])), (f"{BEGIN}call:f{{any", ("", [("f", "{")])),
    # no calls
    *((text, (text, [])) for text in (
        "<|tool", BEGIN, f"{BEGIN}call", f"{BEGIN}call:f", f"{BEGIN}f{{}}", f"{BEGIN}call:f(){END}",
        f"{BEGIN}call:g{{text:{Q}a{Q}}}{END}", f"{BEGIN}call:{{}}", f"call:f{{text:{Q}a{Q}}}", f"{BEGIN} It rains.",
        f"{BEGIN}call:{'f' * MAX_HEAD_CHARS}{{}}", f"{BEGIN}call:f{' ' * MAX_HEAD_CHARS}{{}}", f"{END} {Q}",
    )),
    (f"{BEGIN}{F}", (BEGIN, [A])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_calls_are_the_same_wherever_the_text_is_cut(text: str, expected: Outcome) -> None:
    assert parse([text]) == expected
    for position, told in enumerate(told_before_each_character(reader_of().push, text)):
        begun = text[:position]
        assert outcome(told) == parse([begun], is_whole=False)
        assert parse([begun, text[position:]]) == expected


PARTS = [*'[]{}"\\,: \n<|', Q, '<|"', "text", "number", "any:", "12", "true", "Oslo", "\\ud83d", END, BEGIN,
         "<tool_call",
         f"call:f{{{Q}"]  # fmt: skip


@given(data=st.data())
@settings(max_examples=600)
def test_what_is_told_depends_on_the_text_so_far_alone(data: st.DataObject) -> None:
    begin = f"{BEGIN}call:f{{" + data.draw(st.sampled_from(["", "any:", "number:", "any:{", "any:[", f"number:{Q}"]))
    text = begin + "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=16)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:until] for start, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse([text], is_whole=is_whole)
        assert parse(pieces, is_whole=is_whole) == parse(list(text), is_whole=is_whole) == told


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "begun", ["", f"text:{Q}", "any:", "any:[", "any:{", f"any:{{{Q}", f"number:{Q}", 'any:"', "any:x"]
)
@pytest.mark.parametrize("piece", ["a", " ", "\\", '"', "{", "[", "1", "<", ",", ":", Q, '<|"', "<tool_call", "a:"])
def test_no_text_takes_long(begun: str, piece: str) -> None:
    """Also if all of it comes at once, as at a router where an answer goes on."""
    for pieces in ([piece] * 5000, [piece * 50_000]):
        reader = reader_of()
        reader.push(f"{BEGIN}call:f{{{begun}")
        began_s = time.process_time()
        for each in pieces:
            reader.push(each)
        reader.finish()
        assert time.process_time() - began_s < 1


# -- what is held to calls --------------------------------------------------------------------------------------------

NODE = {
    "type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}, "name": {
        "type": "string"}}, "required": ["name"],
}  # fmt: skip
HELD: dict[str, Any] = {
    "text": {"type": "string", "minLength": 1, "maxLength": 3}, "number": {"type": "integer", "maximum": 9},
    "real": {"type": "number"}, "on": {"type": "boolean"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "colour": {"enum": ["red", 3, None, {"b": 1, "a": ["x"]}]}, "any": {}, "node": {"$ref": "#/$defs/Node"},
    "few": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    "none": {"type": "array", "items": False}, "never": False, "a b": {"type": "integer"}, "x:y": {"type": "integer"},
    "flags": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    "all": {"allOf": [{"type": "integer", "maximum": 5}]},
    "either": {"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}, {}]},
}  # fmt: skip


def test_an_answer_is_held_to_the_schemas() -> None:
    tool = Tool(name="f", parameters={"properties": HELD, "required": ["number"], "$defs": {"Node": NODE}})
    grammar = held("gemma4", [tool], is_one=True)
    rights: list[Any] = [
        ("text", "ab}"), ("number", -3), ("real", 1.5), ("on", True), ("maybe", None), ("maybe", "x"),
        ("colour", "red"), ("colour", 3), ("colour", None), ("colour", {"a": ["x"], "b": 1}),
        ("any", {"a": [1, {"b": "{"}]}),
        ("any", ""),
        ("node", {"kids": [{"name": "b"}, {"kids": [], "name": ""}], "name": "a"}), ("few", [1, 2]), ("few", [1, 2, 3]),
        ("none", []), ("a b", 1), ("flags", {}), ("flags", {"a": True, "b": False}), ("pair", [1, "a"]), ("all", 1),
        ("either", {"a": None}), ("either", {}),
    ]  # fmt: skip
    wrongs: list[Any] = [
        ("text", ""), ("text", "abcd"), ("text", 1), ("number", 10), ("number", 1.5), ("number", "1"),
        ("real", "1"), ("on", 1),
        ("maybe", 1), ("colour", "blue"), ("node", {}), ("node", {"kids": [{}], "name": "a"}), ("node", {"name": 1}),
        ("node", {"name": "a", "new": 1}), ("few", [1]), ("few", [1, 2, 3, 4]), ("few", ["1", 2]), ("none", [1]),
        ("never", 1), ("new", 1), ("flags", {"a": 1}), ("all", "1"), ("all", 7),
        ("either", {"a": 1}), ("either", {"b": None}),
    ]  # fmt: skip

    def may_be(name: str, value: Any) -> bool:
        return is_in(grammar, said("gemma4", ("f", {"number": 3, name: value})))

    assert [right for right in rights if not may_be(*right)] == []
    assert [wrong for wrong in wrongs if may_be(*wrong)] == []
    quoted = f"{{number:3,{Q}x:y{Q}:1}}"
    assert is_in(grammar, f"{BEGIN}call:f{quoted}{END}")
    for arguments in ("", "text:1", "number:3,", "number:3, real:1", "real:1,number:3", "number:3,number:3", "number:"):
        assert not is_in(grammar, f"{BEGIN}call:f{{{arguments}}}{END}")
    assert not is_in(grammar, said("gemma4", ("f", {"number": 3}), ("f", {"number": 3})))


def test_a_tool_without_parameters_takes_none() -> None:
    tools = [Tool(name="now"), Tool(name="free", parameters={"type": "object"}),
             Tool(name="closed", parameters={"additionalProperties": False})]  # fmt: skip
    grammar = held("gemma4", tools, is_one=False)
    anything = {"zone": "CET", "n": 3, "x": None, "more": {"a": [True, {}]}}
    assert is_in(grammar, said("gemma4", ("now", {}), ("free", {}), ("free", anything), ("closed", {})))
    assert [name for name in ("now", "closed") if is_in(grammar, said("gemma4", (name, {"a": 1})))] == []


def test_a_property_that_no_value_fits_is_left_out_of_all_that_contain_it() -> None:
    never, has = {"$ref": "#/$defs/Never"}, {"$ref": "#/$defs/Has"}
    defs = {
        "Never": {"type": "object", "properties": {"more": never, "has": has, "a": False}, "required": ["a"]},
        "Has": {"type": "object", "properties": {"n": never, "b": {"type": "null"}}},
    }
    properties = {"has": has, "or": {"anyOf": [never, has]}, "x": never, "y": {"type": "array", "items": never}}
    tool = Tool(name="f", parameters={"properties": properties, "$defs": defs})
    grammar = held("gemma4", [tool], is_one=True)
    assert is_in(grammar, said("gemma4", ("f", {"y": []})))
    assert is_in(grammar, said("gemma4", ("f", {"has": {"b": None}})))
    assert is_in(grammar, said("gemma4", ("f", {"or": {"b": None}})))
    assert not is_in(grammar, said("gemma4", ("f", {"or": None})))
    assert not is_in(grammar, said("gemma4", ("f", {"x": {"a": 1}})))
    assert [text for text in ("x:", "has:{n:}", "has:{n:{}}") if is_in(grammar, f"{BEGIN}call:f{{{text}}}{END}")] == []


@pytest.mark.parametrize(
    ("properties", "required", "why"),
    [
        ({"a": False}, ["a"], "properties.a: no value fits it, but it is required"),
        ({"a": {"enum": []}}, ["a"], "properties.a: no value fits it, but it is required"),
        ({"a": {"properties": {"b": False}, "required": ["b"], "type": "object"}}, ["a"],
         "properties.a: properties.b: no value fits it, but it is required, but it is required"),
        ({"a": {"enum": [f"x{Q}"]}}, [], "cannot be said in this model's format"),
        ({"a": {"anyOf": [{"enum": []}, {"type": "object", "properties": {"b": False}, "required": ["b"]}]}}, ["a"],
         "properties.a: no value fits it, but it is required"),
        ({f"a{Q}": {}}, [], "cannot be said in this model's format"),
        ({"k" * MAX_KEY_CHARS: {}}, [], "cannot be said in this model's format"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(properties: dict[str, Any], required: list[str], why: str) -> None:
    tools = [Tool(name="now"), Tool(name="f", parameters={"properties": properties, "required": required})]
    with pytest.raises(CannotBeHeld) as refused:
        held("gemma4", tools, is_one=True)
    assert why in str(refused.value)
    assert refused.value.tool == 1


def test_schemas_that_contain_each_other_in_many_ways_take_no_time() -> None:
    defs = {f"n{n}": {"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}, {"$ref": f"#/$defs/n{n + 1}"}]} for n in range(14)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": {**defs, "n14": {"type": "null"}}}
    began_s = time.process_time()
    grammar = held("gemma4", [Tool(name="f", parameters=parameters)], is_one=True)
    assert time.process_time() - began_s < 1
    assert is_in(grammar, said("gemma4", ("f", {"a": None})))
    large = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(300)}}
    never = {"properties": {"0": False, "a": {"$ref": "#/$defs/Large"}}, "type": "object", "required": ["0"]}
    parameters = {"properties": {f"p{number}": {**never} for number in range(300)}, "$defs": {"Large": large}}
    with pytest.raises(CannotBeHeld, match="too many parts"):
        held("gemma4", [Tool(name="f", parameters=parameters)], is_one=True)
    assert time.process_time() - began_s < 2
