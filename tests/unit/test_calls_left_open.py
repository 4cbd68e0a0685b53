"""Calls that a model does not write as its format has it: raw line breaks within JSON, and ends that are left out."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_call_cases import Outcome, outcome

from router.text.calls.objects import ControlEscapes
from router.text.calls.text_values import Schema
from router.text.harmony import Harmony
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

PROPERTIES = {"city": {"type": "string"}, "n": {"type": "integer"}}
SCHEMAS = {"f": Schema({"type": "object", "properties": PROPERTIES})}
RAW = '{"city": "line 1\nline\t2 \\" \x01", "more": ["\\\n", "\\\\"]\n}'
ESCAPED = '{"city": "line 1\\nline\\t2 \\" \\u0001", "more": ["\\n", "\\\\"]\n}'


def reader_of(parser: str) -> ToolCallParser:
    return ToolCallParser(FORMATS[parser], SCHEMAS, lambda index: f"id-{index}")


def parse(parser: str, pieces: list[str], *, is_whole: bool) -> Outcome:
    reader = reader_of(parser)
    reading = Harmony().reader(reader) if parser == "openai" else reader
    return outcome([*map(reading.push, pieces), reading.finish(is_whole=is_whole)])


@pytest.mark.parametrize(
    ("parser", "begin", "end"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ', "}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": ', "}]"),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": ', "}]</tool_calls>"),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": ', "}]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"),
    ],
)
def test_line_breaks_within_strings_are_escaped(parser: str, begin: str, end: str) -> None:
    """Clients read the arguments as JSON, which has no raw control characters within strings."""
    text = begin + RAW + end
    for pieces in ([text], list(text)):
        _, [(name, arguments)] = parse(parser, pieces, is_whole=True)
        assert (name, arguments) == ("f", ESCAPED)
        assert json.loads(arguments)["city"] == 'line 1\nline\t2 " \x01'


@given(st.lists(st.sampled_from(['"', "\\", "\n", "\t", "\x00", "a", "é", "{", " ", '\\"', "\\n"]), max_size=12))
def test_escapes_do_not_depend_on_how_a_text_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    at_once, in_pieces, by_one = ControlEscapes(), ControlEscapes(), ControlEscapes()
    expected = at_once.escaped(text)
    assert "".join(map(in_pieces.escaped, pieces)) == "".join(map(by_one.escaped, text)) == expected


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)))
def test_json_is_left_as_it_is(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert ControlEscapes().escaped(text) == text


CODER = "<tool_call>\n<function=f>\n"
GLM = "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Oslo'
OPEN = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
OSLO = '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("parser", "text", "told", "whole"),
    [
        ("qwen3_coder", f"{CODER}<parameter=city>\nOslo\n</function>", '{"city": "Oslo', OSLO),
        ("qwen3_coder", f"{CODER}<parameter=n>\n3\n</function>", '{"n": ', '{"n": 3}'),
        ("qwen3_coder", f"{CODER}<parameter=city>\nOslo\n</parameter>\n", '{"city": "Oslo"', OSLO),
        ("qwen3_coder", f"{CODER}", "", "{}"),
        ("glm45", GLM, '{"city": "Oslo"', OSLO),
        ("minimax_m2", f"{MINIMAX}</parameter>\n", '{"city": "Oslo"', OSLO),
        ("minimax_m2", f"{MINIMAX}\n</invoke>", '{"city": "Oslo\\n', '{"city": "Oslo\\n"}'),
        ("openai", OPEN, "", "{}"),
        ("openai", f"{OPEN}<|call|>", "{}", "{}"),
        # within an argument: more is missing than words around it
        ("qwen3_coder", f"{CODER}<parameter=city>\nOs", '{"city": "Os', '{"city": "Os'),
        ("qwen3_coder", f"{CODER}<parameter=ci", "", ""),
        ("qwen3_coder", f"{CODER}<parameter=city>\nOslo\n</parameter>\n<par", '{"city": "Oslo"', '{"city": "Oslo"'),
        ("glm45", f"{GLM}<arg_key>n</arg_key>\n<arg_value>3", '{"city": "Oslo", "n": ', '{"city": "Oslo", "n": '),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Os', '{"city": "Os', '{"city": "Os'),
    ],
)
def test_ends_that_a_model_leaves_out_are_added_where_it_ended_its_answer(
    parser: str, text: str, told: str, whole: str
) -> None:
    """Where a limit cut the answer off, the client can see that the call is not complete."""
    for pieces in ([text], list(text)):
        for is_whole, arguments in ((False, told), (True, whole)):
            content, calls = parse(parser, pieces, is_whole=is_whole)
            assert (content.strip(), calls) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    ("parser", "begin"),
    [("mistral", "[TOOL_CALLS][ "), ("granite", "<|tool_call|>[ "), ("hunyuan_a13b", "<tool_calls>[")],
)
def test_white_space_without_end_begins_no_call_and_takes_no_time(parser: str, begin: str) -> None:
    space = " " * 4
    for pieces in ([space] * 20_000, [space * 20_000]):
        reader, began_s = reader_of(parser), time.process_time()
        told = [reader.push(begin), *map(reader.push, pieces), reader.push('{"name": "f", "arguments": {}}]')]
        assert time.process_time() - began_s < 1
        content, calls = outcome([*told, reader.finish()])
        assert (content.split(), calls) == (f'{begin.strip()} {{"name": "f", "arguments": {{}}}}]'.split(), [])
