"""Tool calls in answers: told as they arrive, the same however the text is cut; all other text is content."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, outcome, said

from router.text.calls.call_format import Tool
from router.text.calls.object_calls import MAX_HEAD_CHARS
from router.text.calls.text_values import Schema
from router.text.tool_calls import CallIds, ToolCallParser
from router.text.tool_formats import FORMATS, format_of_template
from router.validation.tools import AskedTools

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
F = '<tool_call>{"name": "f", "arguments": '
OSLO = ("weather", '{"city": "Oslo"}')


LONG = "n" * MAX_HEAD_CHARS
SCHEMAS = dict.fromkeys(("weather", "now", "f", "g", "é?", LONG), Schema(None))


def parse(parser: str, pieces: list[str], *, is_one: bool = False, is_whole: bool = True) -> Outcome:
    """The content, and the name and arguments of each call."""
    reader = ToolCallParser(FORMATS[parser], SCHEMAS, lambda index: f"id-{index}", is_one=is_one)
    told = [reader.push(piece) for piece in pieces]
    if is_whole:
        told.append(reader.finish())
    return outcome(told)


CASES: list[tuple[str, str, Outcome]] = [
    ("hermes", "no call \n", ("no call \n", [])),
    ("hermes", CALL, ("", [OSLO])),
    ("hermes", f"I will look. \n{CALL}\n", ("I will look.", [OSLO])),
    ("hermes", f"{CALL}\n{CALL}", ("", [OSLO, OSLO])),
    ("hermes", f"A \n{CALL}\nB", ("A\nB", [OSLO])),
    ("hermes", '<tool_call>{"arguments": {}, "name": "other"}', ('<tool_call>{"arguments": {}, "name": "other"}', [])),
    ("hermes", f"{CALL}\nDone.", ("\nDone.", [OSLO])),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}',
        ("", [("f", '{"a": [1, {"b": "}"}]}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}\\"{"}, "id": 3}', ("", [("f", '{"a": "}\\"{"}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "\\u00e9\\ud800", "arguments": {}}', ("", [("é?", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": {"y": "}"}, "z": 1} ', ("", [("f", "{}")])),
    # broken, then continued
    ("hermes", f"{F}{{}}\n</tool_call> b {CALL} c", (" b c", [("f", "{}"), OSLO])),
    ("hermes", f'{F}{{"a": 1\n</tool_call>{CALL}', ("", [("f", '{"a": 1\n'), OSLO])),
    ("hermes", f'{F}"a\n</tool_call>{CALL}', (f'{F}"a\n</tool_call>{CALL}', [])),
    ("hermes", f'<tool_call>{{"name": 1\n</tool_call>{CALL}', ('<tool_call>{"name": 1\n</tool_call>', [OSLO])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<b>"}}', ("", [("f", '{"a": "<b>"}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": []}', ('<tool_call>{"name": "f", "arguments": []}', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}', ("", [("f", "{}")])),
    # cut off
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    ("hermes", f"{CALL[:-4]}", ("", [OSLO])),
    ("hermes", '<tool_call>\n{"name": "f"', ('<tool_call>\n{"name": "f"', [])),
    ("hermes", "a < b <tool_c", ("a < b <tool_c", [])),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a":1}}', ("", [("f", '{"a":1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', ("", [("f", "{}")])),
    # no calls
    ("hermes", "Hello  <tool_call>foo", ("Hello  <tool_call>foo", [])),
    ("hermes", f"Hello\n\n<tool_call> it {CALL}", ("Hello\n\n<tool_call> it", [OSLO])),
    ("hermes", '<tool_call>{"name": "f", "args": {}}', ('<tool_call>{"name": "f", "args": {}}', [])),
    ("hermes", CALL.replace("weather", "other"), (CALL.replace("weather", "other"), [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": [{}]}', ('<tool_call>{"name": "f", "arguments": [{}]}', [])),
    ("hermes", "<tool_call>none</tool_call>", ("<tool_call>none</tool_call>", [])),
    ("hermes", '<tool_call>{"city": 1}</tool_call>', ('<tool_call>{"city": 1}</tool_call>', [])),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', ('<tool_call>{"name": 3, "arguments": {}}', [])),
    ("hermes", f"<tool_call>{CALL}", ("<tool_call>", [OSLO])),
    ("hermes", LLAMA, (LLAMA, [])),
    ("llama3_json", LLAMA, ("", [OSLO])),
    ("llama3_json", f" <|python_tag|>{LLAMA}", ("", [OSLO])),
    ("llama3_json", f"{LLAMA}; {LLAMA}\n{LLAMA}", ("", [OSLO] * 3)),
    ("llama3_json", f"{LLAMA}; ", ("", [OSLO])),
    ("llama3_json", f"{LLAMA};{LLAMA} ;", ("", [OSLO, OSLO])),
    ("llama3_json", '{"name": "f", "arguments": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    ("llama3_json", '{"name": "f", "age": 3}', ('{"name": "f", "age": 3}', [])),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    ("llama3_json", f"  {LLAMA} is it", (" is it", [OSLO])),
    ("llama3_json", f"{LLAMA} is it", (" is it", [OSLO])),
    ("llama3_json", f"Call {LLAMA}", (f"Call {LLAMA}", [])),
    ("llama3_json", f'{{"city": 1}}{LLAMA}', (f'{{"city": 1}}{LLAMA}', [])),
    ("llama3_json", f'{{"city": 1}}; {LLAMA}', (f'{{"city": 1}}; {LLAMA}', [])),
    ("llama3_json", '{"city": "Oslo"}', ('{"city": "Oslo"}', [])),
    ("llama3_json", "<|python_tag|>print()", ("<|python_tag|>print()", [])),
    ("llama3_json", " <|pyth", (" <|pyth", [])),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls_and_what_is_none(parser: str, text: str, expected: Outcome) -> None:
    assert parse(parser, [text]) == expected
    assert parse(parser, list(text)) == expected


@given(case=st.sampled_from(CASES), data=st.data())
@settings(max_examples=300)
def test_what_is_told_depends_on_the_text_so_far_alone(case: tuple[str, str, Outcome], data: st.DataObject) -> None:
    """So an answer can go on at a router that gets its beginning at once."""
    parser, text, _ = case
    end = data.draw(st.integers(0, len(text)))
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=6)))
    pieces = [text[begin:until] for begin, until in zip([0, *cuts], [*cuts, end], strict=True)]
    assert parse(parser, pieces, is_whole=False) == parse(parser, [text[:end]], is_whole=False)


@given(st.text(alphabet='<tool_ca>{}"name:rgus, \\\n', max_size=60), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=500)
def test_nothing_is_lost_of_a_text_without_calls(text: str, parser: str) -> None:
    content, calls = parse(parser, list(text))
    assert calls or content == text


def test_arguments_come_as_they_are_said() -> None:
    reader = ToolCallParser(FORMATS["hermes"], SCHEMAS, str)
    assert not reader.push('<tool_call>{"name": "f", "arguments": ').calls
    (opened,) = reader.push('{"a').calls[:1]
    assert opened.name == "f"
    assert [piece.arguments for piece in reader.push('": 1').calls] == ['": 1']
    assert [piece.arguments for piece in reader.push("}}</tool_call>").calls] == ["}"]


def test_one_call_and_no_other() -> None:
    assert parse("hermes", [f"{CALL}\n{CALL}{CALL}"], is_one=True) == ("", [OSLO])


def test_a_long_head_is_told_when_the_call_is_whole() -> None:
    text = f'<tool_call>{{"name": "{LONG}", "arguments": {{"a":1}}}}'
    assert parse("hermes", [text]) == parse("hermes", list(text)) == ("", [(LONG, '{"a": 1}')])


def test_what_is_held_to_calls_has_no_content_though_it_is_cut_off() -> None:
    reader = ToolCallParser(FORMATS["hermes"], SCHEMAS, str, is_held=True)
    assert (reader.push('<tool_call>\n{"na').content, reader.finish().content) == ("", "")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parser", sorted(FORMATS))
@pytest.mark.parametrize("piece", [" " * 80, "{" * 80, "<tool_call>", '{"name": "', "\\"])
def test_no_text_takes_long(parser: str, piece: str) -> None:
    """Whatever a request makes the model write: other requests wait for the router meanwhile."""
    reader = ToolCallParser(FORMATS[parser], SCHEMAS, str)
    reader.push(LLAMA if parser == "llama3_json" else "")
    began_s = time.process_time()
    for _ in range(4000):
        reader.push(piece)
    reader.finish()
    assert time.process_time() - began_s < 2


def test_ids_are_the_same_wherever_an_answer_goes_on() -> None:
    asked = (([5, 6], 1, 0), ([5, 6], 1, 1), ([5, 6], 2, 0), ([5, 7], 1, 0), ([56], 1, 0))
    ids = {CallIds(prompt).of(seed, index) for prompt, seed, index in asked}
    assert len(ids) == 5
    assert CallIds([5, 6]).of(1, 0) in ids
    short = [CallIds([5, 6], is_short=True).of(1, index) for index in range(100)]
    assert len(set(short)) == 100
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in short)


def test_a_thousand_calls_after_a_long_prompt_are_named_at_once() -> None:
    ids = CallIds(list(range(120_000)))
    began_s = time.process_time()
    assert len({ids.of(1, index) for index in range(1000)}) == 1000
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("parser", sorted(FORMATS))
def test_ids_are_such_as_the_models_template_takes(parser: str) -> None:
    """Mistral's templates raise an error if other ids come back."""
    assert AskedTools(parser=parser).has_short_ids == (parser == "mistral")
    assert not AskedTools().has_short_ids


# -- formats ----------------------------------------------------------------------------------------------------------

TAUGHT = [
    ("... <tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": ...", "hermes"),
    ('Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary of argument name and its value}.',
     "llama3_json"),
    ("<tool_call><function=f>", "qwen3_coder"), ("<tool_call>f\\n<arg_key>a</arg_key>\\n<arg_value>", "glm45"),
    ("<tool_call>f<arg_key>a</arg_key><arg_value>", "glm47"), ("[TOOL_CALL]", None),
    ("'[TOOL_CALLS]' + name", "mistral"), ("<｜tool▁call▁begin｜>function\\n```json\\n", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>name", "deepseek_v31"), ("'<seed:tool_call>\n<function='", "seed_oss"),
    ("'<minimax:tool_call>' … '<invoke name=\"' + name + '\">'", "minimax_m2"),
    ("'<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' + … + '<|call|>'", "openai"),
    ("<|channel|>final<|message|>", None),
    ("{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}function_calls>", "deepseek_v32"),
    ("Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), …]", "pythonic"),
    ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "llama4_pythonic"),
    ('{{- "<|tool_call_start|>[" + (calls | join(", ")) + "]<|tool_call_end|>" -}}', "lfm2"),
    ('"List of tools: <|tool_list_start|>["', "lfm2"), ("<|tool_call_start|>\n```python\n", None),
    ("<function_calls>\nfunction1(param1='value1')\n</function_calls>", "olmo3"), ("<function_calls>\n<invoke", None),
    ("'<|start_of_role|>' … respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
    ("格式化为<tool_calls>[{\"name\": \"func_name1\", …},...]</tool_calls>", "hunyuan_a13b"), ("<tool_calls>", None),
    ("formatted as functools[{\"name\": [function name], …}, ...]", "phi4_mini_json"), ("<|tool_call|>", None),
    ("<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>", "kimi_k2"),
    ("'<|tool_call>call:' + function['name'] + '{' … '}<tool_call|>' … '<|tool_response>'", "gemma4"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name"), TAUGHT)
def test_a_template_tells_how_its_model_calls(source: str, name: str | None) -> None:
    found = format_of_template(source)
    assert (found and found.name) == name


TOOLS = [
    Tool(name="weather", parameters={
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"],
        "additionalProperties": False}),
    Tool(name="now", parameters={
        "anyOf": [{"type": "integer"}, {"type": "object"}], "uniqueItems": True,
        "x-guidance": {"item_separator": "X"}}),
]  # fmt: skip


@pytest.mark.parametrize("parser", sorted(FORMATS))
def test_an_answer_is_held_to_calls_that_are_read_as_such(parser: str) -> None:
    grammar = held(parser, TOOLS, is_one=False)
    write = partial(said, parser)
    two = write(("weather", {"city": "Oslo"}), ("now", {"zone": "CET"}))
    assert is_in(grammar, two)
    assert parse(parser, [two]) == ("", [OSLO, ("now", '{"zone": "CET"}')])
    wrong_calls = [("other", {}), ("weather", {"city": "Reykjavik"}), ("weather", {}), ("now", 3),
                   ("weather", {"city": "Oslo", "unit": "C"})]  # fmt: skip
    wrongs = ["", "Hello", "Well: " + two, two + ".", *map(write, wrong_calls)]
    assert [wrong for wrong in wrongs if is_in(grammar, wrong)] == []
    either = held(parser, TOOLS, is_one=True, or_form={"type": "array"})
    begin = FORMATS[parser].form_begins
    assert [is_in(either, text) for text in (write(("now", {})), f"{begin}[1]", f"{begin}1", two)] == [
        True,
        True,
        False,
        False,
    ]
    only = held(parser, TOOLS[:1], is_one=True)
    assert is_in(only, write(("weather", {"city": "Oslo"})))
    assert not is_in(only, write(*[("weather", {"city": "Oslo"})] * 2))
    assert not is_in(only, write(("now", {})))
