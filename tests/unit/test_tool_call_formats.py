"""Formats of calls other than objects, as models of each family write them: whole, in pieces, broken and cut off."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import Outcome, held, is_in, mistral_list, outcome, said, told_before_each_character

from router.text.calls.call_format import Tool
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.text_values import Schema
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

SCHEMAS = dict.fromkeys(("weather", "now", "f", "g"), Schema(None))
CITY = ("weather", {"city": "Oslo"})
OSLO = ("weather", '{"city": "Oslo"}')
F = ("f", "{}")
WORDY = '{"a": ["[TOOL_CALLS]", [1], "[ARGS]{"]}'
D = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
SEP, END, ENDS = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def reader_of(parser: str) -> ToolCallParser:
    return ToolCallParser(FORMATS[parser], SCHEMAS, lambda index: f"id-{index}")


def parse(parser: str, pieces: list[str], *, is_whole: bool = True) -> Outcome:
    reader = reader_of(parser)
    told = [reader.push(piece) for piece in pieces]
    return outcome([*told, reader.finish()] if is_whole else told)


def none(text: str) -> Outcome:
    """The outcome without calls: all text is content."""
    return text, []


MISTRAL: list[tuple[str, Outcome]] = [
    (said("mistral", CITY), ("", [OSLO])),
    (said("mistral", CITY, ("f", {})), ("", [OSLO, F])),
    (f"I look. {said('mistral', CITY)}", ("I look.", [OSLO])),
    (f"{said('mistral', CITY)} Done.", (" Done.", [OSLO])),
    ('[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]f{}', ("", [OSLO, F])),
    ('[TOOL_CALLS] weather [ARGS] {"city": "Oslo"}\n', ("", [OSLO])),
    ('[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}', ("", [OSLO])),
    (f"[TOOL_CALLS]f[ARGS]{WORDY}", ("", [("f", WORDY)])),
    (mistral_list(CITY), ("", [OSLO])),
    (mistral_list(CITY, ("f", {}), CITY), ("", [OSLO, F, OSLO])),
    (f"So: {mistral_list(CITY)} Done.", ("So: Done.", [OSLO])),
    ('[TOOL_CALLS][{"name":"f","arguments":{},"id":"a1B2c3D4e"},{"arguments":{},"name":"f"}]', ("", [F, F])),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}', ("", [F])),
    (mistral_list(CITY) + mistral_list(CITY), ("", [OSLO, OSLO])),
    # broken, then continued
    ('[TOOL_CALLS]f[ARGS]{"a": [1[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', ("", [("f", '{"a": [1'), OSLO])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1[TOOL_CALLS]f[ARGS]{}', ("", [("f", '{"a": 1'), F])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]', (", 3]", [F])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "x", "a": 1}]', (', {"name": "x", "a": 1}]', [F])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}} and', (" and", [F])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, f{}]', (", f{}]", [F])),
    # cut off
    ('[TOOL_CALLS]weather[ARGS]{"city": "Os', ("", [("weather", '{"city": "Os')])),
    ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Os', ("", [("weather", '{"city": "Os')])),
    (mistral_list(CITY)[:-1], ("", [OSLO])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na', (', {"na', [F])),
    ('[TOOL_CALLS][{"name": "f", "arguments": {}}, ', ("", [F])),
    # no calls
    *((text, none(text)) for text in (
        "[TOOL_CALLS", "[TOOL_CALLS]", "[TOOL_CALLS]weather", "[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS] [", "a [b]",
        "[TOOL_CALLS]weather[ARGS]Oslo", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS][]", "[TOOL_CALLS][1, {}]",
        '[TOOL_CALLS]the weather{"city": "Oslo"}', "[TOOL_CALLS]weather[CALL_ID][CALL_ID]a[ARGS]{}",
        f"[TOOL_CALLS]{'f' * MAX_HEAD_CHARS}[ARGS]{{}}", f"[TOOL_CALLS]f{' ' * MAX_HEAD_CHARS}[ARGS]{{}}",
    )),
    (f"[TOOL_CALLS]{said('mistral', CITY)}", ("[TOOL_CALLS]", [OSLO])),
]  # fmt: skip
DEEPSEEK: list[tuple[str, Outcome]] = [
    *((said(parser, *calls), ("", outcomes)) for parser in ("deepseek_v3", "deepseek_v31") for calls, outcomes in (
        ((CITY,), [OSLO]), ((CITY, ("f", {}), CITY), [OSLO, F, OSLO]),
    )),
    (f"I look. {said('deepseek_v3', CITY)} Done.", ("I look. Done.", [OSLO])),
    (f"{said('deepseek_v31', CITY)}{said('deepseek_v3', CITY)}", ("", [OSLO, OSLO])),
    # words left out, or white space put in
    (f"<｜tool▁call▁begin｜>f{SEP}{{}}", ("", [F])),
    (f"<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜> f {SEP} {{}} {END}", ("", [F])),
    (f"{D}function{SEP}f\n{{}}{END}{D}f{SEP}{{}}{ENDS}", ("", [F, F])),
    (f"{D}function{SEP}f\n```json\n{{}}\n```{ENDS}", ("", [F])),
    (f"{D}function{SEP}f```\n{{}}{ENDS}", ("", [F])),
    (f"{D}f{SEP}{ENDS}", ("", [F])),
    (f'{D}f{SEP}{{"a": "{END}`"}}{ENDS}', ("", [("f", f'{{"a": "{END}`"}}')])),
    # broken, then continued
    (f'{D}f{SEP}{{"a": 1{END}<｜tool▁call▁begin｜>f{SEP}{{}}{ENDS}', ("", [("f", '{"a": 1'), F])),
    (f"{D}f{SEP}{{}}}}{ENDS}", (f"}}{ENDS}", [F])),
    # cut off
    (f'{D}weather{SEP}{{"city": "Os', ("", [("weather", '{"city": "Os')])),
    (f"{D}f{SEP}{{}}\n``", ("", [F])),
    (f"{D}f{SEP}{{}}<｜tool▁ca", ("", [F])),
    # no calls
    *((text, none(text)) for text in (
        "<｜tool", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜> I", D, f"{D}f", f"{D}f{SEP}", f"{D}f<b>{{}}",
        f"{D}function{SEP}f\n```python\n{{}}", f"{D}f{SEP}[]", f"{D}a f{SEP}{{}}", f"{D}other{SEP}{{}}{ENDS}",
        f"{D}function{SEP}other\n```json\n{{}}\n```{ENDS}", f"{D}{'f' * MAX_HEAD_CHARS}{SEP}{{}}",
    )),
    (f"{D}{said('deepseek_v31', CITY)}", (D, [OSLO])),
]  # fmt: skip
K, ARGUMENTS = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_argument_begin|>"
K_ENDS = "<|tool_call_end|><|tool_calls_section_end|>"
KIMI: list[tuple[str, Outcome]] = [
    (said("kimi_k2", CITY), ("", [OSLO])),
    (said("kimi_k2", CITY, ("f", {}), CITY), ("", [OSLO, F, OSLO])),
    (f"I look. {said('kimi_k2', CITY)} Done.", ("I look. Done.", [OSLO])),
    (f'{K}functions.f:0{ARGUMENTS}{{"a": {{"é😀": ["{K_ENDS}"]}}}}{K_ENDS}',
     ("", [("f", f'{{"a": {{"é😀": ["{K_ENDS}"]}}}}')])),
    # words left out, or white space put in
    (f"<|tool_call_begin|>functions.f:3{ARGUMENTS}{{}}", ("", [F])),
    (f"{K}\n functions.f:12 {ARGUMENTS}\n{{}} {K_ENDS}", ("", [F])),
    (f"{K}f:0{ARGUMENTS}{K_ENDS}", ("", [F])),
    (f"{K}functions.f:0{ARGUMENTS}{{}}{said('kimi_k2', CITY)}", ("", [F, OSLO])),
    # broken, then continued
    (f'{K}functions.f:0{ARGUMENTS}{{"a": 1{K_ENDS}{said("kimi_k2", CITY)}', ("", [("f", '{"a": 1'), OSLO])),
    (f"{K}functions.f:0{ARGUMENTS}{{}}}}{K_ENDS}", (f"}}{K_ENDS}", [F])),
    # cut off
    (f'{K}functions.weather:0{ARGUMENTS}{{"city": "Os', ("", [("weather", '{"city": "Os')])),
    (f"{K}functions.f:0{ARGUMENTS}{{}}<|tool_call", ("", [F])),
    # no calls
    *((text, none(text)) for text in (
        "<|tool", "<|tool_calls_section_begin|>", "<|tool_calls_section_begin|> I", K, f"{K}functions.f",
        f"{K}functions.f:0", f"{K}functions.f:0{ARGUMENTS}", f"{K}functions.f:0{ARGUMENTS}[]", f"{K}f{ARGUMENTS}{{}}",
        f"{K}call_4f{ARGUMENTS}{{}}{K_ENDS}", f"{K}functions.f:x{ARGUMENTS}{{}}", f"{K}f :0{ARGUMENTS}{{}}",
        f"{K}functions.other:0{ARGUMENTS}{{}}{K_ENDS}", f"{K}{'f' * MAX_HEAD_CHARS}:0{ARGUMENTS}{{}}",
    )),
    (f"{K}{said('kimi_k2', CITY)}", (K, [OSLO])),
]  # fmt: skip
OBJECT = '{"name": "f", "arguments": {}}'
NESTED = '{"a": {"é😀": ["]</tool_calls>", {}]}}'


def listed(begin: str, end: str) -> list[tuple[str, Outcome]]:
    """Return the cases of a format whose calls are a list of objects between these words."""
    weather = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    return [
        (f"{begin}[{weather}]{end}", ("", [OSLO])),
        (f"I look. {begin}[{OBJECT}, {weather}, {OBJECT}]{end} Done.", ("I look. Done.", [F, OSLO, F])),
        (f"{begin}[{OBJECT}]{end}\n{begin}[{OBJECT}]{end}", ("", [F, F])),
        (f'{begin}[ {{"arguments": {NESTED}, "name": "f"}} ,\n{OBJECT} ] {end}', ("", [("f", NESTED), F])),
        (f'{begin}[{{"name": "f", "parameters": {{}}}}]{end}', ("", [F])),
        (f"{begin}[{OBJECT}]{begin}[{OBJECT}]", ("", [F, F])),
        # broken
        (f'{begin}[{{"name": "f", "arguments": {{"a": 1{end}', ("", [("f", '{"a": 1')])),
        (f"{begin}[{OBJECT}, 3]{end}.", (f", 3]{end}.", [F])),
        (f"{begin}[{OBJECT}, ]{end}", (f", ]{end}", [F])),
        (f"{begin}[{OBJECT} and", (" and", [F])),
        (f'{begin}[{OBJECT}, {{"name": "x", "arguments": {{}}}}]', (', {"name": "x", "arguments": {}}]', [F])),
        # cut off
        (f'{begin}[{{"name": "weather", "arguments": {{"city": "Os', ("", [("weather", '{"city": "Os')])),
        (f"{begin}[{OBJECT}", ("", [F])),
        (f"{begin}[{OBJECT}, ", ("", [F])),
        (f"{begin}[{OBJECT}, {{", (", {", [F])),
        # no calls
        *((f"{begin}{text}", none(f"{begin}{text}")) for text in (
            "", "[", "[]", "[1]", "[f()]", '[{"name": 1}]', "[[]]", OBJECT, '[{"name": "f"',
        )),
        (f"[{OBJECT}]", none(f"[{OBJECT}]")),
    ]  # fmt: skip


OPENAI: list[tuple[str, Outcome]] = [
    (said("openai", CITY), ("", [OSLO])),
    (said("openai", CITY, ("f", {})), ("", [OSLO, F])),
    (f"I look. {said('openai', CITY)}<|call|> Done.", ("I look. Done.", [OSLO])),
    ('<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}', ("", [OSLO])),
    # an end left out, and arguments that are not an object
    (f"{said('openai', CITY)}<|start|>assistant{said('openai', CITY)}", ("", [OSLO, OSLO])),
    (said("openai", CITY) * 2, ("", [OSLO, OSLO])),
    ("<|channel|>commentary to=functions.f<|message|>Oslo<|call|>", ("", [("f", "Oslo")])),
    # cut off
    (said("openai", CITY)[:-4], ("", [("weather", '{"city": "Os')])),
    # no calls
    *((text, none(text)) for text in (
        "<|channel|>final<|message|>So.", "<|start|>assistant", "<|channel|>commentary to=functions.f", "<|channel",
        "<|channel|>commentary to=functions.other<|message|>{}", "<|channel|>commentary to=functions.f<|end|>{}",
        f"<|channel|>commentary to=functions.{'f' * MAX_HEAD_CHARS}<|message|>{{}}",
    )),
]  # fmt: skip
CASES = [
    *(("openai", *case) for case in OPENAI),
    *(("kimi_k2", *case) for case in KIMI),
    *(("granite", *case) for begin in ("<|tool_call|>", "<tool_call>") for case in listed(begin, "</tool_call>")),
    *(("hunyuan_a13b", *case) for case in listed("<tool_calls>", "</tool_calls>")),
    *(("phi4_mini_json", *case) for case in listed("functools", "")),
    *(("mistral", *case) for case in MISTRAL),
    *((parser, *case) for parser in ("deepseek_v3", "deepseek_v31") for case in DEEPSEEK),
]
WORDS = [*'[]{}"<, \n\\', "f", "weather", "a", '{"name": "f", "arguments": ', '{"a": 1}', "```json\n"]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls_and_what_is_none(parser: str, text: str, expected: Outcome) -> None:
    assert parse(parser, [text]) == expected
    assert parse(parser, list(text)) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("parser", "text"), sorted({case[:2] for case in CASES if len(case[1]) < MAX_HEAD_CHARS}))
def test_what_is_told_is_the_same_wherever_it_is_cut(parser: str, text: str) -> None:
    """Cut at each position: the text up to there, and then the rest at once."""
    whole = parse(parser, [text])
    for position, told in enumerate(told_before_each_character(reader_of(parser).push, text)):
        begun = text[:position]
        assert outcome(told) == parse(parser, [begun], is_whole=False)
        assert parse(parser, [begun, text[position:]]) == whole


@pytest.mark.one_in(4)
@pytest.mark.parametrize("parser", sorted(FORMATS))
@given(data=st.data())
@settings(max_examples=150)
def test_what_is_told_depends_on_the_text_so_far_alone(parser: str, data: st.DataObject) -> None:
    """Whatever a model writes. If there is no call, all of it is content."""
    words = [*WORDS, *FORMATS[parser].words]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:until] for begin, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse(parser, [text], is_whole=is_whole)
        assert parse(parser, pieces, is_whole=is_whole) == told
        assert parse(parser, list(text), is_whole=is_whole) == told
    content, calls = told
    assert calls or content == text


def test_a_call_of_kimis_has_the_id_that_the_model_gave_it() -> None:
    """The template shows it to the model. Of two calls with one id, the second has another."""
    reader = reader_of("kimi_k2")
    told = [*reader.push(said("kimi_k2", CITY, ("f", {}))).calls, *reader.push(said("kimi_k2", CITY)).calls]
    assert [piece.id for piece in told if piece.id] == ["functions.weather:0", "functions.f:1", "id-2"]


# -- what is held to calls --------------------------------------------------------------------------------------------


def test_what_is_held_to_mistrals_calls_may_be_either_way() -> None:
    tools = [Tool(name=name, parameters={"properties": {"city": {"type": "string"}}}) for name in ("weather", "f")]
    some, one = held("mistral", tools, is_one=False), held("mistral", tools, is_one=True)
    for write in (mistral_list, partial(said, "mistral")):
        assert is_in(some, write(CITY))
        assert is_in(some, write(CITY, ("f", {})))
        assert is_in(one, write(CITY))
        assert not is_in(one, write(CITY, CITY))
        assert not is_in(some, write(("other", {})))
    assert is_in(one, mistral_list(CITY).replace("] [", "]["))
    assert not is_in(some, mistral_list(CITY) + said("mistral", CITY))
