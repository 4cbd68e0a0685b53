"""Which tokens an answer's content consists of, told while they arrive, whatever the model thinks and calls before
it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.logprobs import OfContent
from protos import tandem_inference_pb2 as pb
from router.text.harmony import Harmony
from router.text.reasoning import MARKS, THINK, Reasoning

THOUGHTS = st.lists(st.sampled_from(["So", " then", ".", "\n", "<", "</", "\u00e9", "Two"]), max_size=6)
ANSWERS = st.lists(st.sampled_from(["Two", " then", "\n", "<b", ">", "So", "\u00e9"]), max_size=6)
BEGINS = st.sampled_from([[], ["<think>"], ["<", "think", ">\n"], ["\n", "<think>", "\n"]])
ENDS = st.sampled_from([["</think>"], ["</think>", "\n\n"], ["</", "think", ">"]])


def told_of(tokens: list[str], reader: Any) -> tuple[str, list[str]]:
    """The content, and the tokens that are reported as the content's."""
    content, told, of_content = "", [], OfContent()
    messages = []
    for token in tokens:
        message = pb.GenerateResponse()
        message.logprobs.add(sampled=pb.Logprob(token=token.encode()))
        messages.append((message, reader.push(token)))
    end = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage())
    messages.append((end, reader.finish()))
    for message, said in messages:
        message.text, message.reasoning = said.content, said.reasoning
        content += said.content
        told += [each.sampled.token.decode() for each in of_content.accept(message)]
    return content, told


@given(BEGINS, THOUGHTS, ENDS, ANSWERS)
def test_an_answer_behind_a_thought(begin: list[str], thought: list[str], end: list[str], answer: list[str]) -> None:
    tokens = begin + (thought + end if begin else []) + answer
    content, told = told_of(tokens, Reasoning(marks=THINK).reader(None))
    assert "".join(told).lstrip() == content.lstrip()
    assert told == tokens[len(tokens) - len(told) :], "no hole"


@given(THOUGHTS, ANSWERS, st.booleans())
def test_an_answer_between_words(thought: list[str], answer: list[str], is_whole: bool) -> None:
    ends = ["\n", "</response>", "\n"] if is_whole else []
    tokens = ["<think>", "\n", *thought, "</think>", "\n\n", "<response>", "\n", "Yes", *answer, *ends]
    content, told = told_of(tokens, Reasoning(marks=MARKS["ernie45"]).reader(None))
    assert content == "".join(["Yes", *answer]).rstrip() if is_whole else "".join(["Yes", *answer])
    assert "".join(told).startswith(content)
    assert not "".join(told)[len(content) :].strip().removeprefix("</response>").strip()


@given(THOUGHTS, ENDS, ANSWERS)
def test_a_thought_that_the_prompt_has_begun(thought: list[str], end: list[str], answer: list[str]) -> None:
    content, told = told_of(thought + end + answer, Reasoning(marks=THINK, is_open=True).reader(None))
    assert "".join(told).lstrip() == content.lstrip()


@given(st.lists(st.tuples(st.sampled_from(["analysis", "final"]), ANSWERS), max_size=3))
def test_messages_of_channels(said: list[tuple[str, list[str]]]) -> None:
    tokens: list[str] = []
    for channel, texts in [*said, ("final", ["Two"])]:
        start = ["<|start|>", "assistant"] if tokens else []
        tokens += [*start, "<|channel|>", channel, "<|message|>", *texts, "<|end|>"]
    content, told = told_of(tokens, Harmony().reader(None))
    assert told.pop() == "<|end|>"
    assert "".join(told).replace("\n", "") == content.replace("\n", "")


def accepted(messages: list[tuple[str, str, str]]) -> list[str]:
    """The tokens that are reported as the content's, for messages of one token, its text and its thought."""
    told, of_content = [], OfContent()
    for token, text, thought in messages:
        message = pb.GenerateResponse(text=text, reasoning=thought)
        message.logprobs.add(sampled=pb.Logprob(token=token.encode()))
        told += [each.sampled.token.decode() for each in of_content.accept(message)]
    return told


def test_what_a_stop_string_keeps_back_may_be_what_is_told() -> None:
    # Two answers that begin with "!!" and have the stop string "!!!?", which holds text back.
    assert accepted([("!", "", ""), ("!", "", ""), ("!!", "!", ""), ("a", "!!!a", "")]) == ["!", "!", "!!", "a"]


def test_what_a_stop_string_keeps_back_behind_a_thought_is_content() -> None:
    told = accepted([("So", "", "So"), ("</think>", "", ""), ("Hu", "", ""), ("mm", "Humm", "")])
    assert told == ["Hu", "mm"]


def test_tokens_that_say_nothing_are_told_with_what_comes_after_them() -> None:
    told = accepted([("So", "So", ""), ("<|im_end|>", "", ""), (" it", " it", ""), ("!", "!", "")])
    assert told == ["So", "<|im_end|>", " it", "!"]


def test_an_answer_of_a_thought_alone_has_no_content() -> None:
    of_content = OfContent()
    for fields in ({"reasoning": "So"}, {}, {"finish_reason": pb.FINISH_REASON_STOP}):
        message = pb.GenerateResponse(**fields)
        message.logprobs.add(sampled=pb.Logprob(token=b"</think>"))
        assert of_content.accept(message) == []
