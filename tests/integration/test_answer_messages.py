"""The messages of an answer: prompt logprobs with text offsets, content and tool calls, prompt length, stop token."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import tandem_inference_pb2 as pb
from router.answer_messages import AnswerMessages
from router.asked_answer import AskedAnswer
from router.request_events import Emit
from router.text.calls.text_values import Schema
from router.text.detokenizer import IncrementalDetokenizer, StopStrings
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallParser
from router.text.tool_formats import FORMATS
from router.validation.resumption import Resumption

WORD = "Hi \U0001f9ec\u4f60\u597d x"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


def message_of(tokenizer: Tokenizer, prompt_token_ids: list[int], *, tells_prompt: bool = True) -> pb.GenerateResponse:
    asked = AskedAnswer(
        request_id="r", name="r", prompt_token_ids=prompt_token_ids, detokenizer=IncrementalDetokenizer(tokenizer),
        sampling_params=pb.SamplingParams(prompt_logprobs=0 if tells_prompt else None), arrived_s=0.0,
    )  # fmt: skip
    messages = AnswerMessages(asked)
    told = [pb.TokenLogprobs(sampled=pb.Logprob(token_id=i, rank=1)) for i in prompt_token_ids[1:]]
    message, _ = messages.delta(Emit(0, [5], (), told if tells_prompt else ()))
    return message


@pytest.mark.parametrize("num_left_out", [0, 2, 3])
def test_offsets_are_those_of_the_text(tokenizer: Tokenizer, num_left_out: int) -> None:
    """Also if the prompt begins inside a character, each of whose remaining bytes decodes to U+FFFD."""
    token_ids = tokenizer.encode(WORD)[num_left_out:]
    told = message_of(tokenizer, token_ids).prompt_logprobs
    assert [each.sampled.token_id for each in told] == token_ids
    assert [each.sampled.rank for each in told] == [0] + [1] * (len(token_ids) - 1)
    tokens = [each.sampled.token for each in told]
    text = b"".join(tokens).decode(errors="replace")
    assert len({each.text_offset for each in told}) < len(token_ids), "some begin inside a character"
    whole = [each for each, token in zip(told, tokens, strict=True) if is_utf8(token)]
    assert whole
    for each in whole:
        assert text[each.text_offset :].startswith(each.sampled.token.decode())


def test_one_token_has_an_entry_too(tokenizer: Tokenizer) -> None:
    [told] = message_of(tokenizer, [504]).prompt_logprobs
    assert (told.sampled.token_id, told.sampled.rank, told.text_offset) == (504, 0, 0)
    assert told.sampled.token
    assert not message_of(tokenizer, [504], tells_prompt=False).prompt_logprobs


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("Well <tool_ca", "Well <tool_ca", None),
        ('Well <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> ', "Well", '{"a": 1}'),
    ],
)
def test_content_and_calls_add_up_to_what_was_said(
    tokenizer: Tokenizer, text: str, content: str, arguments: str | None
) -> None:
    """Also for an answer that is resumed in the middle."""
    token_ids = tokenizer.encode(text)
    for num_before in range(len(token_ids)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        calls = ToolCallParser(FORMATS["hermes"], {"f": Schema(None)}, str)
        said = []
        if num_before:
            told = calls.push(detokenizer.push(token_ids[:num_before]).text)
            said.append(pb.GenerateResponse(text=told.content, tool_calls=told.calls))
        asked = AskedAnswer(
            request_id="r", name="r", prompt_token_ids=[1], sampling_params=pb.SamplingParams(), arrived_s=0.0,
            detokenizer=detokenizer, reader=calls, resumption=Resumption(token_ids=token_ids[:num_before]),
        )  # fmt: skip
        messages = AnswerMessages(asked)
        said.append(messages.delta(Emit(num_before, token_ids[num_before:], (), ()))[0])
        said.append(messages.last(pb.FINISH_REASON_STOP, num_cached_tokens=0, timings=pb.Timings()))
        assert "".join(each.text for each in said) == content
        pieces = [piece for each in said for piece in each.tool_calls]
        assert ("".join(piece.arguments for piece in pieces) or None) == arguments
        assert [piece.name for piece in pieces if piece.id] == ([] if arguments is None else ["f"])


@pytest.mark.parametrize("num_before", [0, 2])
def test_the_first_message_alone_says_how_long_the_prompt_is(tokenizer: Tokenizer, num_before: int) -> None:
    """Also if the answer is resumed in the middle."""
    asked = AskedAnswer(
        request_id="r", name="r", prompt_token_ids=[1, 2, 3], sampling_params=pb.SamplingParams(), arrived_s=0.0,
        detokenizer=IncrementalDetokenizer(tokenizer), resumption=Resumption(token_ids=[5] * num_before),
    )  # fmt: skip
    messages = AnswerMessages(asked)
    said = [messages.delta(Emit(num_before + number, [5], (), ()))[0] for number in range(2)]
    assert [each.prompt_tokens for each in said] == [3, 0]


STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("before", "new", "finish_reason", "own_end", "named"),
    [
        ([], [5, 7], STOP, 2, 7),
        ([5, 7], [], STOP, 2, 7),
        ([], [5, 7], STOP, None, 7),
        ([], [5, 7], STOP, 7, None),
        ([5], [7], LENGTH, 2, None),
        ([5], [504, 7], STOP, 2, None),  # token 504 contains the stop string
    ],
)
def test_a_token_that_ended_an_answer_is_named_unless_it_is_the_models_own_end(
    tokenizer: Tokenizer,
    before: list[int],
    new: list[int],
    finish_reason: pb.FinishReason,
    own_end: int | None,
    named: int | None,
) -> None:
    stop = StopStrings([tokenizer.decode([504])])
    asked = AskedAnswer(
        request_id="r", name="r", prompt_token_ids=[1], sampling_params=pb.SamplingParams(), arrived_s=0.0,
        detokenizer=IncrementalDetokenizer(tokenizer, stop=stop), resumption=Resumption(token_ids=before),
        eos_token_id=own_end,
    )  # fmt: skip
    messages = AnswerMessages(asked)
    messages.delta(Emit(len(before), new, (), ()))
    last = messages.last(finish_reason, num_cached_tokens=0, timings=pb.Timings())
    assert (last.stop_token_id if last.HasField("stop_token_id") else None) == named


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
