"""How many tokens of an answer are reported as its thoughts', however they come."""

from __future__ import annotations

import grammar_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import tandem_inference_pb2 as pb
from router.answer_messages import AnswerMessages
from router.asked_answer import AskedAnswer
from router.request_events import Emit
from router.text.detokenizer import IncrementalDetokenizer
from router.text.harmony import Harmony
from router.text.reasoning import MARKS, NO_REASONING, THINK, AnswerReader, Reasoning
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS

TOKENIZER = Tokenizer(grammar_cases.tokenizer())
"""Of the texts below, each ASCII character and each byte of another one is a token, but for "en"."""
HEAD = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant<|channel|>"

CASES = {
    "none": (Reasoning(marks=THINK), "Hello", 0),
    "no reader": (NO_REASONING, "<think>So</think>Yes", 0),
    "whole": (Reasoning(marks=THINK), " <think>\nSo \u65e5.\n</think>\n\nYes", len("\nSo \u65e5.\n".encode())),
    "begun by the prompt": (Reasoning(marks=THINK, is_open=True), "So</think>Yes</think>", 2),
    "cut off": (Reasoning(marks=THINK), "<think>So </th", len("So </th")),
    "empty": (Reasoning(marks=THINK), "<think></think>Yes", 0),
    "words": (
        Reasoning(marks=MARKS["granite"]),
        "Here is my thought process: So. Here is my response: Yes",
        len(" So. "),
    ),
    "a label": (Reasoning(marks=MARKS["gemma4"]), "<|channel>thought\nSo\n<channel|>Yes", len("So\n")),
    "no label": (Reasoning(marks=MARKS["gemma4"]), "<|channel>So<channel|>Yes", len("So")),
    "within a label": (Reasoning(marks=MARKS["gemma4"]), "<|channel>thou", 0),
    "messages": (Harmony(), f"{HEAD}So{NEXT}analysis<|message|>thus<|end|><|start|>assistant{HEAD}", 6),
    "a header begun by the prompt": (Harmony(opened=HEAD), f"So{NEXT}final<|message|>Yes", 2),
    "a message of no thought": (Harmony(), f"<|channel|>final<|message|>Yes{NEXT}analysis<|message|>So", 2),
}


def usage_of(reader: AnswerReader | None, text: str, cuts: list[int]) -> pb.Usage:
    """The usage of an answer of this text, whose tokens come in messages that end at `cuts`."""
    token_ids = TOKENIZER.encode(text, False)
    messages = AnswerMessages(
        AskedAnswer(
            request_id="r", name="r", prompt_token_ids=[1], sampling_params=pb.SamplingParams(), arrived_s=0.0,
            detokenizer=IncrementalDetokenizer(TOKENIZER, stop=["</s>"]), reader=reader,
        )
    )  # fmt: skip
    cuts = sorted(min(cut, len(token_ids)) for cut in cuts)
    for begin, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        messages.delta(Emit(begin, token_ids[begin:end], (), ()))
    return messages.last(pb.FINISH_REASON_STOP, num_cached_tokens=0, timings=pb.Timings()).usage


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("case", CASES)
@given(cuts=st.lists(st.integers(0, 100), max_size=8))
@settings(max_examples=25)
def test_the_count_does_not_depend_on_how_tokens_are_joined(case: str, has_tools: bool, cuts: list[int]) -> None:
    reasoning, text, num_thought = CASES[case]
    calls = ToolCallParser(FORMATS["hermes"], {}, str) if has_tools else None
    usage = usage_of(reasoning.reader(calls), text, cuts)
    assert usage.reasoning_tokens == num_thought
