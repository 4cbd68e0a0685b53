"""Answers in gpt-oss' message format: told as they arrive, the same however the text is cut, and without the format's
own words."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_call_cases import outcome, told_before_each_character

from router.text.calls.harmony import WORDS, Header, header_of
from router.text.calls.heads import MAX_HEAD_CHARS
from router.text.calls.text_values import Schema
from router.text.harmony import HarmonyParser, header_at_end_of
from router.text.reasoning import Harmony, opened_by, reasoning_of
from router.text.tool_calls import Told, ToolCallParser
from router.text.tool_formats import FORMATS

Outcome = tuple[str, str, list[tuple[str, str]]]
"""What is thought, what is content, and which calls are made."""
A, C, F, M = (
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
    "<|message|>",
)
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions."
NOW = ("now", "{}")
OSLO = ("weather", '{"city": "Oslo"}')
JSON = " <|constrain|>json<|message|>"


def parser(*, has_tools: bool = True, opened: str = "", is_one: bool = False) -> HarmonyParser:
    tools = dict.fromkeys(("weather", "now"), Schema(None))
    calls = ToolCallParser(FORMATS["openai"], tools, lambda index: f"id-{index}", is_one=is_one) if has_tools else None
    return HarmonyParser(opened=opened, calls=calls)


def parse(pieces: list[str], *, is_whole: bool = True, has_tools: bool = True, opened: str = "") -> Outcome:
    reader = parser(has_tools=has_tools, opened=opened)
    told = [reader.push(piece) for piece in pieces]
    if is_whole:
        told.append(reader.finish())
    return joined(told)


def joined(told: list[Told]) -> Outcome:
    return "".join(each.reasoning for each in told), *outcome(told)


LONG = "x" * 2 * MAX_HEAD_CHARS
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # the text, what is thought, what is said, which calls are made
    (f"{A}So.{NEXT}{F}Yes.", "So.", "Yes.", []),
    (f"{A}So.{NEXT}{F}Yes.<|return|>", "So.", "Yes.", []),
    (f"{A} So.\n\nThen. {NEXT}{F}\n Yes. \n", " So.\n\nThen. ", "\n Yes. \n", []),
    (f"{F}Yes.", "", "Yes.", []),
    (f"{A}a < b <| c |> <b|end|>{NEXT}{F}a <|end", "a < b <| c |> <b|end|>", "a ", []),
    (f"{A}One.{NEXT}{A}Two.{NEXT}{C}First.{NEXT}{F}Then.", "One.\n\nTwo.", "First.\n\nThen.", []),
    (f"{A}{NEXT}{F}Yes.", "", "Yes.", []),
    # calls, with both ways of naming the recipient
    (f'{A}I look.{NEXT}{TO}weather{JSON}{{"city": "Oslo"}}<|call|>', "I look.", "", [OSLO]),
    (f'{A}I look.{NEXT} to=functions.weather<|channel|>commentary json{M}{{"city": "Oslo"}}', "I look.", "", [OSLO]),
    (f' to=functions.weather<|channel|>commentary json{M}{{"city": "Oslo"}}<|call|>', "", "", [OSLO]),
    (f'{TO}weather<|constrain|>json{M}{{"city": "Oslo"}}', "", "", [OSLO]),
    (f'{TO}weather code{M}{{"city": "Oslo"}}', "", "", [OSLO]),
    (f'<|channel|>analysis to=functions.weather{JSON}{{"city": "Oslo"}}', "", "", [OSLO]),
    (f'<|channel|>commentary to=weather{JSON}{{"city": "Oslo"}}', "", "", [OSLO]),
    (f"{C}I look.{NEXT}{TO}now{JSON}{{}}{NEXT}{A}Hm.{NEXT}{TO}now{JSON}{{}}<|call|>", "Hm.", "I look.", [NOW] * 2),
    (f'{TO}weather{JSON}{{"city": "Os', "", "", [("weather", '{"city": "Os')]),
    (f'{TO}weather{JSON}{{"city": "Oslo"<|cal', "", "", [("weather", '{"city": "Oslo"')]),
    (f"{TO}now{JSON}{{}}<|call|><|start|>functions.now to=assistant{C}3{NEXT}{F}At 3.", "", "3\n\nAt 3.", [NOW]),
    # tools that were not given: the text sent to them belongs to their channel
    (f"{A}So.{NEXT}<|channel|>analysis to=browser.search code{M}oslo<|call|>", "So.\n\noslo", "", []),
    (f"{TO}other{JSON}{{}}<|call|>", "", "{}", []),
    # headers that a limit cuts off
    *((f"{A}So.{NEXT}"[: -len("assistant")] + f"assistant{TO}weather{JSON}"[:end], "So.", "", [])
      for end in range(len(f"assistant{TO}weather <|constrain|>json<|message|>") - 1)),
    (f"{A}So.<|en", "So.", "", []),
    (" to=functions.wea", "", "", []),
    ("<|channel|>ana", "", "", []),
    ("<|chan", "", "", []),
    ("", "", "", []),
    # text that is not in the format
    ("Hello", "", "Hello", []),
    ("  to", "", "  to", []),
    ("<", "", "<", []),
    (" \n", "", " \n", []),
    ("<|channel", "", "", []),
    (f"Hello{F}Yes", "", "Hello\n\nYes", []),
    (f"{M}Yes", "", "Yes", []),
    (f"<|channel|>other{M}Yes", "", "Yes", []),
    (f"<|channel|>{M}Yes", "", "Yes", []),
    (f"<|start|>assistant{A}So.{NEXT}{F}Yes", "So.", "Yes", []),
    (f"<|channel|>analysis<|end|><|start|>assistant{F}Yes", "", "analysis\n\nYes", []),
    (f"{A}So.<|end|>\nYes{F}No", "So.", "Yes\n\nNo", []),
    (f"{A}So.{F}Yes", "So.", "Yes", []),
    (f"{F}Yes{M} and <|constrain|>no", "", "Yes and no", []),
    (f"<|channel|>{LONG}{F}Yes", "", f"{LONG}\n\nYes", []),
    (f" to={LONG}{F}Yes", "", f" to={LONG}\n\nYes", []),
    (f"{F}Yes<|return|><|return|><|end|>", "", "Yes", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thought", "said", "calls"), CASES)
def test_what_is_thought_said_and_called(text: str, thought: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (thought, said, calls)
    assert parse(list(text)) == (thought, said, calls)
    if not calls:
        assert parse([text], has_tools=False) == (thought, said, [])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", sorted({case[0] for case in CASES if len(case[0]) < MAX_HEAD_CHARS}))
def test_what_is_told_is_the_same_wherever_it_is_cut(text: str) -> None:
    """Cut at each position: the text up to there, and then the rest at once."""
    whole = parse([text])
    for position, told in enumerate(told_before_each_character(parser().push, text)):
        begun = text[:position]
        assert joined(told) == parse([begun], is_whole=False)
        assert parse([begun, text[position:]]) == whole


PARTS = [
    *WORDS,
    A,
    C,
    F,
    NEXT,
    f"{TO}weather{JSON}",
    "assistant",
    "analysis",
    "final",
    "to=",
    " ",
    "\n",
    "a",
    "<|",
    "<",
    "{}",
    "|>",
    LONG,
]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    opened=st.sampled_from(["", A, F]),
    has_tools=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200)
def test_what_is_told_depends_on_the_text_so_far_alone(
    parts: list[str], opened: str, has_tools: bool, data: st.DataObject
) -> None:
    """Whatever a model says. None of the format's words is told."""
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:until] for begin, until in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_whole in (False, True):
        told = parse([text], is_whole=is_whole, has_tools=has_tools, opened=opened)
        assert parse(pieces, is_whole=is_whole, has_tools=has_tools, opened=opened) == told
        assert parse(list(text), is_whole=is_whole, has_tools=has_tools, opened=opened) == told
        for said in (*told[:2], *(arguments for _, arguments in told[2])):
            assert not any(word in said for word in WORDS)


def test_it_is_told_as_it_comes() -> None:
    reader = parser()
    assert reader.push(f"{A}Well").reasoning == "Well"
    assert reader.push(" so<|en").reasoning == " so"
    assert reader.push(f"d|><|start|>assistant{TO}weather").calls == []
    (opened,) = reader.push(JSON).calls
    assert (opened.index, opened.id, opened.name) == (0, "id-0", "weather")
    assert [piece.arguments for piece in reader.push('{"ci').calls] == ['{"ci']
    assert [piece.arguments for piece in reader.push('ty": "Oslo"}<|').calls] == ['ty": "Oslo"}']
    told = reader.push(f"call|><|start|>assistant{F}Yes")
    assert (told.content, told.calls) == ("Yes", [])


def test_one_call_and_no_other() -> None:
    reader = parser(is_one=True)
    told = reader.push(f'{TO}weather{JSON}{{"city": "Oslo"}}{NEXT}{TO}now{JSON}{{}}<|call|>')
    assert outcome([told, reader.finish()]) == ("", [OSLO])


@pytest.mark.parametrize("opened", [pytest.param("", marks=pytest.mark.slow), A])
@pytest.mark.parametrize("piece", [" " * 80, "<" * 80, "to=", *WORDS, f"{TO}now{JSON}", "<|channel|>" + "x" * 600])
def test_no_text_takes_long(opened: str, piece: str) -> None:
    reader = parser(opened=opened)
    began_s = time.process_time()
    for _ in range(4000):
        reader.push(piece)
    reader.finish()
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize("piece", ["<|end|>", f"{TO}now{JSON}", f"{F}a"])
def test_no_text_that_comes_at_once_takes_long(piece: str) -> None:
    """As for an answer that goes on at another router."""
    began_s = time.process_time()
    parser().push(piece * 10_000)
    assert time.process_time() - began_s < 2


def test_whom_a_message_is_to_is_its_own_models_to_say() -> None:
    assert header_of("assistant to=functions.f<|channel|>commentary json") == Header("commentary", "f")
    assert header_of("functions.f to=assistant<|channel|>commentary") == Header("commentary", "")


# -- what the prompt has begun ----------------------------------------------------------------------------------------


def test_a_template_may_choose_the_first_channel() -> None:
    prompt = f"<|start|>user{M}Hi<|end|><|start|>assistant"
    assert opened_by(prompt) == ""
    assert opened_by(f"{prompt}{F}") == F
    assert opened_by(f"{prompt}{F}Yes, and", "Yes, and") == F
    assert reasoning_of("openai_gptoss", F, has_form=True) == Harmony(opened=F)
    assert reasoning_of("openai_gptoss", "<think>", has_form=False) == Harmony()
    assert parse(["So.", f"{NEXT}{F}Yes"], opened=A) == ("So.", "Yes", [])
    assert parse(["Yes"], opened=F) == ("", "Yes", [])
    for other in (f"{prompt}{A}So.", f"{F}", f"{prompt}{F}<|end|><|start|>assistant", f"<|start|>user{F}", ""):
        assert header_at_end_of(other) == ""
