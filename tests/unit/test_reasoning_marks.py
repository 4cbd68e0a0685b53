"""The marks that model families put around thoughts: they are recognised wherever the text is cut, and before forms."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tokenizers
from grammar_cases import EOS, grammar_text, tokenizer, write_model

from engine.scheduling.grammar import Grammars
from router.text.calls.text_values import Schema
from router.text.harmony import Harmony
from router.text.reasoning import MARKS, Reasoning, ReasoningParser, opened_by, parser_of_template, reasoning_of
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

CALL = '[TOOL_CALLS]f[ARGS]{"a": 1}'
G, R = "Here is my thought process:", "Here is my response:"
CASES: list[tuple[str, str, str, str]] = [
    # parser, the text, what is thought, what is said
    ("mistral", "[THINK]So. [1]\n[/THINK]\n\nYes.", "So. [1]", "Yes."),
    ("mistral", "[THINK]a[/THIN[/THINK]b[/THINK]", "a[/THIN", "b[/THINK]"),
    ("mistral", "[THIN] Yes.", "", "[THIN] Yes."),
    ("mistral", "[THINK]cut [/TH", "cut [/TH", ""),
    ("mistral", "<think>a</think>b", "", "<think>a</think>b"),
    ("seed_oss", "<seed:think>So. <think></seed:think>\n\nYes.", "So. <think>", "Yes."),
    ("seed_oss", "<seed:think>cut </seed:thi", "cut </seed:thi", ""),
    ("gemma4", "<|channel>thought\nSo. <|channel|>\n<channel|>\n\nYes.", "So. <|channel|>", "Yes."),
    ("gemma4", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("gemma4", "<|channel>thought\n\n thought\nso<channel|>Yes. <|channel>", "thought\nso", "Yes. <|channel>"),
    ("gemma4", "<|channel>So.<channel|>Yes.", "So.", "Yes."),
    ("gemma4", "<|channel>thoughts<channel|>Yes.", "thoughts", "Yes."),
    ("gemma4", "<|channel><channel|>Yes.", "", "Yes."),
    ("gemma4", "<|channel>thou", "", ""),
    ("gemma4", "<|channel>thought\ncut <chan", "cut <chan", ""),
    ("gemma4", "thought\nSo.<channel|>Yes.", "", "thought\nSo.<channel|>Yes."),
    ("ernie45", "<think>\nSo.\n</think>\n\n<response>\nYes.\n\n<b> \n</response>\n", "So.", "Yes.\n\n<b>"),
    ("ernie45", "<response>\nYes.\n</response>", "", "Yes."),
    ("ernie45", "<think>So.</think>\nYes. \n", "So.", "Yes. \n"),
    ("ernie45", "<think>So.</think><respon", "So.", "<respon"),
    ("ernie45", "<think>So.</think><b>", "So.", "<b>"),
    ("ernie45", "<think>a</think><response>Yes. \n</resp", "a", "Yes. \n</resp"),
    ("ernie45", " \n<resp", "", " \n<resp"),
    ("ernie45", "<think>a</think><response>Yes. \n", "a", "Yes. \n"),
    ("ernie45", "Yes.</response>", "", "Yes.</response>"),
    ("ernie45", "<think>a</think><response>\n</response>", "a", ""),
    ("ernie45", "<response>", "", ""),
    ("ernie45", "<response>a</response>\n b</response> ", "", "ab</response> "),
    ("ernie45", "<response><response>a</response><response>", "", "<response>a<response>"),
    ("hunyuan_a13b", "<think>\nSo.\n</think>\n<answer>\nYes. </response>\n</answer>", "So.", "Yes. </response>"),
    ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nYes.", "", "Yes."),
    ("granite", f"{G} So.\n\n{R} Yes.", "So.", "Yes."),
    ("granite", "\nHere's my thought process: So. Here's my response:\nYes.", "So.", "Yes."),
    ("granite", f"{G} Here is my idea. Here{R}Yes. {R}", "Here is my idea. Here", f"Yes. {R}"),
    ("granite", "Here is my answer: no.", "", "Here is my answer: no."),
    ("granite", f"Well. {G} So. {R} Yes.", "", f"Well. {G} So. {R} Yes."),
    ("granite", f"{G} cut. Here's my resp", "cut. Here's my resp", ""),
    ("granite", "Here", "", "Here"),
]


def parse(parser: str, pieces: list[str], *, is_whole: bool = True) -> tuple[str, str]:
    reader = ReasoningParser(MARKS[parser], is_open=False)
    told = [reader.push(piece) for piece in pieces]
    if is_whole:
        told.append(reader.finish())
    return "".join(each.reasoning for each in told), "".join(each.content for each in told)


@pytest.mark.parametrize(("parser", "text", "thought", "said"), CASES)
def test_what_is_thought_and_what_is_said(parser: str, text: str, thought: str, said: str) -> None:
    assert parse(parser, [text]) == (thought, said)
    for position in range(len(text)):
        begun = text[:position]
        assert parse(parser, list(begun), is_whole=False) == parse(parser, [begun], is_whole=False)
        assert parse(parser, [begun, text[position:]]) == (thought, said)


@pytest.mark.parametrize(
    ("parser", "begin", "call", "end"),
    [
        ("mistral", "[THINK]", CALL, "[/THINK]"),
        ("gemma4", "<|channel>thought\n", "<|tool_call>call:f{a:1}<tool_call|>", "\n<channel|>"),
        (
            "hunyuan_a13b",
            "<think>\n",
            '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
            "\n</think>\n",
        ),
        (
            "hunyuan_a13b",
            "<think>\n",
            '<answer>\n<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>\n</answer>',
            "\n</think>\n",
        ),
    ],
)
def test_calls_follow_what_was_thought(parser: str, begin: str, call: str, end: str) -> None:
    calls = ToolCallParser(FORMATS[parser], {"f": Schema(None)}, str)
    reader = ReasoningParser(MARKS[parser], is_open=False, calls=calls)
    told = [reader.push(char) for char in f"{begin}I call {call}.{end}{call}"]
    assert "".join(each.reasoning for each in told) == f"I call {call}."
    assert "".join(piece.arguments for each in told for piece in each.calls) == '{"a": 1}'
    assert "".join(each.content for each in [*told, reader.finish()]) == ""


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("'[THINK]' + m.reasoning + '[/THINK]'", "mistral"), ("{# [/THINK] #}", ""), ("[THINKING]", ""),
        ("Write your thoughts after 'Here is my thought process:'", "granite"), ("Here is my response:", ""),
        ("'<seed:think>' + thoughts + '</seed:think>'", "seed_oss"), ("</think> [/THINK]", "deepseek_r1"),
        ("</think>\n\n<response>\n", "ernie45"),
        ("<|extra_0|> … enable_thinking … <think>\n\n</think>\n", "hunyuan_a13b"),
        ("<response> <|extra_0|>", ""), ("'<think></think>' … '<|tool_calls_section_begin|>'", "kimi_k2"),
        ("<|tool_calls_section_begin|>", ""),
        ("text.split('<channel|>') … '<|channel>thought\n<channel|>' … enable_thinking", "gemma4"),
        ("'<|start|>assistant<|channel|>final<|message|>'", "openai_gptoss"),
    ],
)  # fmt: skip
def test_a_template_tells_how_its_model_thinks(source: str, known: str) -> None:
    assert parser_of_template(source) == known


@pytest.mark.parametrize("parser", MARKS)
def test_a_thought_that_the_prompt_began_is_one_to_its_own_model_alone(parser: str) -> None:
    begin = MARKS[parser].opens[0]
    assert opened_by(f"Hi {begin}\n") == begin
    for other in MARKS:
        reasoning = reasoning_of(other, opened_by(begin), has_form=False)
        assert isinstance(reasoning, Reasoning)
        assert reasoning.is_open == (MARKS[other].opens == MARKS[parser].opens)
    assert reasoning_of("openai_gptoss", opened_by(begin), has_form=False) == Harmony()


KIMI = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'


@pytest.mark.parametrize("parser", ["ernie45", "hunyuan_a13b"])
def test_words_around_an_answer_are_shown_to_its_reader_and_no_part_of_forms(parser: str) -> None:
    begin, end = MARKS[parser].answer
    assert {begin, end} <= set(reasoning_of(parser, "", has_form=False).words)
    reader = reasoning_of(parser, "<think>", has_form=True).reader(None)
    assert reader is not None
    assert reader.push(f"So.</think>{begin}a{end}").content == f"{begin}a{end}"


@pytest.mark.parametrize("piece", [" ", "\n" * 80, "</respons", "a </", "<response>"])
def test_no_answer_takes_long(piece: str) -> None:
    reader = ReasoningParser(MARKS["ernie45"], is_open=False)
    reader.push("<response>a")
    began_s = time.process_time()
    for _ in range(20_000):
        reader.push(piece)
    reader.finish()
    assert time.process_time() - began_s < 2


def test_a_call_of_kimis_ends_its_thought() -> None:
    """Where there are tools to call; and grammars forbid what would be read as such a call."""
    for text, thought, said, calls in (
        (f"So.\n{KIMI}", "So.", "", ['{"a": 1}']), (f"So.</think> Well.{KIMI}", "So.", "Well.", ['{"a": 1}']),
        ("So <|tool_calls_sect", "So <|tool_calls_sect", "", []),
        ("So <|tool_calls_section_begin|>no.</think>Yes.", "So", "<|tool_calls_section_begin|>no.</think>Yes.", []),
    ):  # fmt: skip
        for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
            reader = reasoning_of("kimi_k2", "<think>", has_form=False).reader(
                ToolCallParser(FORMATS["kimi_k2"], {"f": Schema(None)}, str)
            )
            assert reader is not None
            told = [*map(reader.push, pieces), reader.finish()]
            assert "".join(each.reasoning for each in told) == thought
            assert "".join(each.content for each in told) == said
            assert ["".join(piece.arguments for each in told for piece in each.calls)] == (calls or [""])
    reader = reasoning_of("kimi_k2", "<think>", has_form=False).reader(None)
    assert reader is not None
    told = [reader.push(f"So {KIMI}</think>Yes."), reader.finish()]
    assert "".join(each.reasoning for each in told) == f"So {KIMI}"
    thoughts = reasoning_of("kimi_k2", "<think>", has_form=False).thoughts
    assert thoughts is not None
    assert thoughts.other_ends == ("<|tool_calls_section_begin|>",)


def test_a_label_belongs_to_the_words_before_a_thought() -> None:
    """Also where a message goes on within the thought."""
    for said, is_within in (("<|channel>thought\n", False), ("<|channel>thought\nSo", True)):
        assert opened_by(f"<|turn>model\n{said}") == ("" if is_within else "<|channel>thought")
        opened = opened_by(f"<|turn>model\n{said}", said)
        assert opened == "<|channel>thought"
        reasoning = reasoning_of("gemma4", opened, has_form=False, is_within=is_within)
        reader = reasoning.reader(None)
        assert reader is not None
        told = reader.push(" thought\nis it.<channel|>Yes.")
        assert (told.reasoning, told.content) == (f"{' ' if is_within else ''}thought\nis it.", "Yes.")
    assert opened_by("<|turn>model\n<|channel>thought\n<channel|>") == ""


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("parser", ["qwen3", "kimi_k2", "mistral", "gemma4", "granite"])
def test_a_form_holds_what_follows_the_thought(parser: str, is_added: bool, tmp_path: Path) -> None:
    made, marks = tokenizer(), MARKS[parser]
    if is_added:
        made.add_tokens([tokenizers.AddedToken(word, normalized=False, special=True) for word in marks.ends])
    write_model(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, vocab_size=300, eos_token_ids=frozenset({EOS}))
    reasoning = reasoning_of(parser, marks.opens[0], has_form=True)
    grammar = reasoning.grammar(grammar_text("choice"), tokens=Tokenizer(made).added_ids(reasoning.words))

    def may_be(ids: list[int]) -> bool:
        state = grammars.state(grammar)
        masks = (state.allowed(ids[:position]) for position in range(len(ids)))
        return all(mask is not None and mask[token_id] for mask, token_id in zip(masks, ids, strict=True))

    for end in marks.ends:
        begun = f"a < b [/ Here is {end[:-1]}. "
        assert may_be([*made.encode(f"{begun}{end}\nred").ids, EOS])
        assert not may_be(made.encode(f"{begun}{end}\n?").ids)
        assert not may_be([*made.encode(f"{begun}{end}").ids, EOS])
        spelled = [part for char in end for part in made.encode(char).ids]
        assert may_be([*made.encode(begun).ids, *spelled, *made.encode("red").ids, EOS]) == (not is_added)
    for call in marks.calls:
        assert not may_be(made.encode(f"a {call}").ids)
    assert not may_be([*made.encode("red").ids, EOS])
