"""Logprobs in OpenAI's two formats, and a prompt's in vLLM's. Pure.

A token's text is what it stands for by itself, even if the answer leaves it out (special tokens, a stop string). The
text of a part of a character is U+FFFD in chats, where `bytes` has it exactly, and "bytes:\\xe4\\xbd" in completions.
With `by_id`, the text of a token is "token_id:504".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, Logprob, TokenLogprobs

LEAST = -9999.0
"""As OpenAI, in place of minus infinity, which JSON cannot represent."""
PARAGRAPH = b"\n\n"
"""A router puts this between messages of gpt-oss; no token stands for it."""


class OfContent:
    """Finds the tokens that make up the content of one answer. Leaves out the tokens of thoughts and calls, and of the
    words that delimit them.

        token ──> waits ── content comes ──> the waiting tokens from its beginning on belong to it
                     └─ a thought or a call comes ──> left out

    Tokens behind content that have no text, such as the one that ends the answer, belong to the content, too.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprobs] = []
        self._is_apart = False
        """The last text was no content."""
        self._has_begun = False

    def accept(self, message: GenerateResponse) -> list[TokenLogprobs]:
        """The logprobs to report with `message`, the answer's next one. In a message that has several parts, the open
        call comes first, then the thought, the text, and new calls."""
        self._waiting += message.logprobs
        told: list[TokenLogprobs] = []
        is_other = bool(message.reasoning or message.tool_calls)
        self._is_apart |= is_other
        if message.text and self._waiting:
            begin, end = _place(self._waiting, message.text, is_apart=self._is_apart, is_first=not self._has_begun)
            told, self._waiting = self._waiting[begin:end], self._waiting[end:]
        if message.text:
            self._has_begun = True
            self._is_apart = is_other = any(call.id for call in message.tool_calls)
        if is_other:  # tokens of a message without text may wait for content, as the beginning of a stop string does
            self._waiting = []
        # If the answer was cut off before there was content, the waiting tokens are not content.
        may_end = self._has_begun or message.finish_reason == FinishReason.FINISH_REASON_STOP
        if message.finish_reason and may_end and not self._is_apart:
            told += self._waiting
        return told


def _place(logprobs: Sequence[TokenLogprobs], text: str, *, is_apart: bool, is_first: bool) -> tuple[int, int]:
    """The range [first, end) of the tokens that write `text`. They are the first tokens, and the others are kept back,
    unless others may precede them: if something else than content came last, if `text` begins a new message, or if no
    content came yet and the tokens do not merely repeat `text`. Then they are the last tokens that write it."""
    said, data = b"".join(each.sampled.token for each in logprobs), text.encode()
    is_message = data.startswith(PARAGRAPH) and not said.startswith(data)
    may_follow = is_apart or is_message or (is_first and not _repeats(said, data))
    are_first = said.startswith(data) and not may_follow
    begin, end = (0, len(data)) if are_first else _last_that_say(data, said, is_message=is_message)
    ends = list(accumulate(len(each.sampled.token) for each in logprobs))
    # In continuing content, tokens before it have no text of their own: special tokens, parts of characters.
    first = bisect_right(ends, begin) if may_follow else 0
    return first, min(len(ends), bisect_left(ends, end) + 1)


def _last_that_say(data: bytes, said: bytes, *, is_message: bool) -> tuple[int, int]:
    """Begin and end of the last occurrence of `data` in `said`. A message begins with a paragraph break that no token
    writes."""
    spoken = data.removeprefix(PARAGRAPH) if is_message and data != PARAGRAPH else data
    for each in (data, spoken):
        if (begin := said.rfind(each)) >= 0:
            return begin, begin + len(each)
    begin = max(0, len(said) - len(spoken))  # invalid bytes became other bytes in the text, so it is not found
    return begin, begin + len(spoken)


def _repeats(said: bytes, data: bytes) -> bool:
    return said == (data * (len(said) // len(data) + 1))[: len(said)]


def of_chat(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": entries_of(logprobs, by_id=by_id), "refusal": None}


def entries_of(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> list[dict[str, Any]]:
    """One entry for each token, in the format of chats and responses."""
    return [
        {**_entry(each.sampled, by_id), "top_logprobs": [_entry(top, by_id) for top in each.top]} for each in logprobs
    ]


def of_completion(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. The first token of an echoed prompt has no numbers."""
    name = _id_as_text if by_id else _text_or_bytes
    return {
        "tokens": [name(each.sampled) for each in logprobs],
        "token_logprobs": [_number(each.sampled) if each.sampled.rank else None for each in logprobs],
        "top_logprobs": [_alternatives(each, name) if each.sampled.rank else None for each in logprobs],
        "text_offset": [each.text_offset for each in logprobs],
    }


def of_prompt(prompt_logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, by id, the token itself and the `num_top` likeliest. None
    for the first token."""
    return [
        {str(each.token_id): _with_rank(each) for each in (told.sampled, *told.top[:num_top])}
        if told.sampled.rank
        else None
        for told in prompt_logprobs
    ]


def _with_rank(logprob: Logprob) -> dict[str, Any]:
    decoded = logprob.token.decode(errors="replace")
    return {"logprob": _number(logprob), "rank": logprob.rank, "decoded_token": decoded}


def _alternatives(logprobs: TokenLogprobs, name: Callable[[Logprob], str]) -> dict[str, float]:
    """Logprobs by text, the likeliest first, with the sampled token. Of other tokens with equal text, the likeliest
    counts."""
    numbers: dict[str, float] = {}
    for each in (*logprobs.top, logprobs.sampled):
        numbers.setdefault(name(each), _number(each))
    numbers[name(logprobs.sampled)] = _number(logprobs.sampled)
    return numbers


def _text_or_bytes(logprob: Logprob) -> str:
    try:
        return logprob.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.token)


def _id_as_text(logprob: Logprob) -> str:
    return f"token_id:{logprob.token_id}"


def _entry(logprob: Logprob, by_id: bool) -> dict[str, Any]:
    token = _id_as_text(logprob) if by_id else logprob.token.decode(errors="replace")
    return {"token": token, "logprob": _number(logprob), "bytes": list(logprob.token)}


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
