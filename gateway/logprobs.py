"""How likely tokens were, in OpenAI's two ways of saying it, and in vLLM's for a prompt's. Pure.

A token's text is what it stands for by itself, also where the answer leaves it out (special tokens, a stop string). Of
a part of a character it is U+FFFD in chats, whose `bytes` have it exactly, and "bytes:\\xe4\\xbd" in completions.
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
    return {"content": entries_of(logprobs), "refusal": None}


def entries_of(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One for each token, as chats and responses have them."""
    return [{**_entry(each.sampled), "top_logprobs": [_entry(top) for top in each.top]} for each in logprobs]


def of_completion(logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a completion. A prompt's first token, where it is echoed, has no numbers."""
    if not logprobs:
        return None
    return {
        "tokens": [_text_or_bytes(each.sampled) for each in logprobs],
        "token_logprobs": [_number(each.sampled) if each.sampled.rank else None for each in logprobs],
        "top_logprobs": [_alternatives(each) if each.sampled.rank else None for each in logprobs],
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


def _alternatives(logprobs: TokenLogprobs) -> dict[str, float]:
    """By text, the likeliest first. The sampled token is among them; of others that read the same, the likeliest is."""
    numbers: dict[str, float] = {}
    for each in (*logprobs.top, logprobs.sampled):
        numbers.setdefault(_text_or_bytes(each), _number(each))
    numbers[_text_or_bytes(logprobs.sampled)] = _number(logprobs.sampled)
    return numbers


def _text_or_bytes(logprob: Logprob) -> str:
    try:
        return logprob.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in logprob.token)


def _entry(logprob: Logprob) -> dict[str, Any]:
    return {"token": logprob.token.decode(errors="replace"), "logprob": _number(logprob), "bytes": list(logprob.token)}


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
