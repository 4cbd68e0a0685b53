"""How likely tokens were, in OpenAI's two ways of saying it, and in vLLM's for a prompt's. Pure.

A token's text is what it stands for by itself, also where the answer leaves it out (special tokens, a stop string). Of
a part of a character it is U+FFFD in chats, whose `bytes` have it exactly, and "bytes:\\xe4\\xbd" in completions. Named
`by_id` it is "token_id:504".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from protos.tandem_inference_pb2 import FinishReason, GenerateResponse, Logprob, TokenLogprobs

LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for: OpenAI's."""
PARAGRAPH = b"\n\n"
"""That a router tells between messages of gpt-oss, and no token says."""


class OfContent:
    """Of one answer: which tokens its content is made of. Others are left out: those of a thought or of a call, and of
    the words that tell it apart.

        token ──> waits ── content is told ──> from where that begins on, they are its
                     └─ a thought or a call is told ──> left out

    Those that follow content and tell nothing, as one that ends the answer, are the content's as well.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogprobs] = []
        self._is_apart = False
        """What was told last is no content."""
        self._has_begun = False

    def accept(self, message: GenerateResponse) -> list[TokenLogprobs]:
        """Those that are told with `message`, the answer's next one. Of what one has at once, the call that is open
        comes first, then the thought, the text, and new calls."""
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
        if is_other:  # what tells nothing may be content that waits, as the beginning of a stop string does
            self._waiting = []
        # Of an answer that was cut off before there was content, they are none of it.
        may_end = self._has_begun or message.finish_reason == FinishReason.FINISH_REASON_STOP
        if message.finish_reason and may_end and not self._is_apart:
            told += self._waiting
        return told


def _place(logprobs: Sequence[TokenLogprobs], text: str, *, is_apart: bool, is_first: bool) -> tuple[int, int]:
    """Of the tokens that say `text`: the first, and the one behind them. They are the first of all, unless others may
    be before them: where something else was told last, or nothing yet, or `text` is a message of its own. Then they are
    the last that say it, unless it is said again and again, and nothing else: of that, the last ones are kept back."""
    said, data = b"".join(each.sampled.token for each in logprobs), text.encode()
    is_message = data.startswith(PARAGRAPH) and not said.startswith(data)
    may_follow = is_apart or is_message or (is_first and not _repeats(said, data))
    are_first = said.startswith(data) and not may_follow
    begin, end = (0, len(data)) if are_first else _last_that_say(data, said, is_message=is_message)
    ends = list(accumulate(len(each.sampled.token) for each in logprobs))
    # What is before it in an answer that goes on says nothing, as special tokens and parts of characters do.
    first = bisect_right(ends, begin) if may_follow else 0
    return first, min(len(ends), bisect_left(ends, end) + 1)


def _last_that_say(data: bytes, said: bytes, *, is_message: bool) -> tuple[int, int]:
    """Where the last of `said` that is `data` begins and ends. Before a message is a paragraph that no token says."""
    spoken = data.removeprefix(PARAGRAPH) if is_message and data != PARAGRAPH else data
    for each in (data, spoken):
        if (begin := said.rfind(each)) >= 0:
            return begin, begin + len(each)
    begin = max(0, len(said) - len(spoken))  # bytes that are no characters are others in a text, and fewer
    return begin, begin + len(spoken)


def _repeats(said: bytes, data: bytes) -> bool:
    return said == (data * (len(said) // len(data) + 1))[: len(said)]


def of_chat(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": entries_of(logprobs, by_id=by_id), "refusal": None}


def entries_of(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> list[dict[str, Any]]:
    """One for each token, as chats and responses have them."""
    return [
        {**_entry(each.sampled, by_id), "top_logprobs": [_entry(top, by_id) for top in each.top]} for each in logprobs
    ]


def of_completion(logprobs: Sequence[TokenLogprobs], *, by_id: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. A prompt's first token, where it is echoed, has no numbers."""
    name = _id_as_text if by_id else _text_or_bytes
    return {
        "tokens": [name(each.sampled) for each in logprobs],
        "token_logprobs": [_number(each.sampled) if each.sampled.rank else None for each in logprobs],
        "top_logprobs": [_alternatives(each, name) if each.sampled.rank else None for each in logprobs],
        "text_offset": [each.text_offset for each in logprobs],
    }


def of_prompt(prompt_logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt what stands there, and the `num_top` likeliest, by id.
    None for the first."""
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
    """By text, the likeliest first. The sampled token is among them; of others that read the same, the likeliest is."""
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
