"""How likely tokens were, in OpenAI's two ways of saying it. Pure.

A token's text is what it stands for by itself: with U+FFFD where it is a part of a character (`bytes`, of chats, has it
exactly), and also where the answer leaves it out (special tokens, a stop string).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protos.tandem_inference_pb2 import Logprob, TokenLogprobs

LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for: OpenAI's."""


def of_chat(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat. None where nothing was asked for."""
    if not logprobs:
        return None
    content = [{**_entry(each.sampled), "top_logprobs": [_entry(top) for top in each.top]} for each in logprobs]
    return {"content": content, "refusal": None}


def of_completion(logprobs: Sequence[TokenLogprobs], text_offset: int) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion. `text_offset`: of the first token, in characters of the tokens before."""
    if not logprobs:
        return None
    tokens = [text_of(each.sampled) for each in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_number(each.sampled) for each in logprobs],
        "top_logprobs": [_alternatives(each) for each in logprobs],
        "text_offset": offsets,
    }


def text_of(logprob: Logprob) -> str:
    return logprob.token.decode(errors="replace")


def _alternatives(logprobs: TokenLogprobs) -> dict[str, float]:
    """By text, the likelier one of equal texts; the sampled token is always among them."""
    numbers: dict[str, float] = {}
    for each in (*logprobs.top, logprobs.sampled):
        numbers.setdefault(text_of(each), _number(each))
    return numbers


def _entry(logprob: Logprob) -> dict[str, Any]:
    return {"token": text_of(logprob), "logprob": _number(logprob), "bytes": list(logprob.token)}


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
