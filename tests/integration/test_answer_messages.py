"""What a prompt's tokens stand for, and where that begins in its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import tandem_inference_pb2 as pb
from router.answer_messages import AnswerMessages
from router.detokenizer import IncrementalDetokenizer
from router.request_events import Emit
from router.tokenizer import Tokenizer

WORD = "Hi \U0001f9ec\u4f60\u597d x"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


def message_of(tokenizer: Tokenizer, prompt_token_ids: list[int], *, tells_prompt: bool = True) -> pb.GenerateResponse:
    messages = AnswerMessages(
        request_id="r", sequence=0, prompt_token_ids=prompt_token_ids, detokenizer=IncrementalDetokenizer(tokenizer),
        tells_prompt=tells_prompt,
    )  # fmt: skip
    told = [pb.TokenLogprobs(sampled=pb.Logprob(token_id=i, rank=1)) for i in prompt_token_ids[1:]]
    message, _ = messages.delta(Emit(0, [5], (), told if tells_prompt else ()))
    return message


@pytest.mark.parametrize("num_left_out", [0, 2, 3])
def test_offsets_are_those_of_the_text(tokenizer: Tokenizer, num_left_out: int) -> None:
    """Also where the prompt begins inside a character, whose rest is U+FFFD for each byte."""
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


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
