"""A request through the gateway, as OpenAI's clients send it: its body, its events, and what its end means.

Beside OpenAI's fields, it sets vLLM's `return_token_ids`, so that tokens can be compared, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tandem.chaos.asked import Asked, EndedAs, Ending, Way
from tandem.chaos.http_stream import HttpAway, HttpCut, HttpNonsense, HttpRefused, post

PATHS = {Way.COMPLETIONS: "/v1/completions", Way.CHATS: "/v1/chat/completions"}
DONE = "[DONE]"


async def read_over_http(address: str, asked: Asked) -> None:
    """Send the request, and read all its answers. Raises `EndedAs` if they do not come completely."""
    headers = {"x-request-id": asked.request_id, "x-request-timeout-ms": str(round(1000 * asked.deadline_s))}
    try:
        async with asyncio.timeout(asked.deadline_s):
            async with aclosing(post(address, PATHS[asked.way], body_of(asked), headers)) as events:
                await _take(asked, events)
    except TimeoutError as error:
        raise EndedAs(Ending.HUNG, f"not complete after {asked.deadline_s:g} s") from error
    except HttpAway as error:
        raise EndedAs(Ending.NO_GATEWAY, str(error)) from error
    except HttpCut as error:
        raise EndedAs(Ending.CUT, str(error)) from error
    except HttpRefused as error:
        raise EndedAs(_meaning_of(_error_in(error.body), 0), str(error)) from error
    except (HttpNonsense, ValueError, LookupError, TypeError) as error:
        raise EndedAs(Ending.WRONG, f"what came is no answer of OpenAI's API: {error!r}") from error


def body_of(asked: Asked) -> dict[str, Any]:
    """The request's body. The wire's names of sampling parameters are the same as OpenAI's and vLLM's."""
    body: dict[str, Any] = {**asked.sampling, "n": asked.n, "stream": True, "return_token_ids": True}
    if asked.model:
        body["model"] = asked.model
    if asked.way is Way.CHATS:
        return {**body, "messages": asked.prompt}
    # Logprobs name tokens by id, so that they can be compared with the answer's tokens.
    return {**body, "prompt": asked.prompt, "return_tokens_as_token_ids": True}


async def _take(asked: Asked, events: AsyncIterator[str]) -> None:
    is_done = False
    try:
        async for data in events:
            if is_done:
                raise EndedAs(Ending.WRONG, f"behind the end came {data[:200]}")
            is_done = data == DONE
            if not is_done:
                _accept(asked, json.loads(data))
    except HttpCut:
        if not is_done:  # otherwise, everything has come except the last chunk, which is empty
            raise
    if len(asked.answers) != asked.n or not all(heard.finish_reason for heard in asked.answers.values()):
        raise EndedAs(Ending.WRONG, "the stream is complete, and not all of its answers are")
    if not is_done:
        raise EndedAs(Ending.WRONG, f"the stream ended without {DONE}")


def _accept(asked: Asked, event: dict[str, Any]) -> None:
    if (error := event.get("error")) is not None:
        raise EndedAs(_meaning_of(error, asked.num_tokens), f"{error}")
    for choice in event["choices"]:
        heard = asked.heard(choice["index"])
        if heard.finish_reason:
            raise EndedAs(Ending.WRONG, f"behind the end of answer {choice['index']} came {choice}")
        # A chat's first event only has the role.
        token_ids = choice.get("token_ids", [])
        heard.token_ids += token_ids
        heard.text += choice["text"] if asked.way is Way.COMPLETIONS else choice["delta"].get("content", "")
        heard.finish_reason = choice["finish_reason"] or ""
        if "logprobs" in asked.sampling and token_ids:
            heard.logprobs += _numbers_of(choice["logprobs"], token_ids)
    timings = event.get("timings", {})
    asked.num_attempts = max(asked.num_attempts, timings.get("attempts", 0))
    asked.num_moves += timings.get("moves", 0)


def _numbers_of(logprobs: dict[str, Any], token_ids: list[int]) -> list[tuple[float, int]]:
    """The logprobs of a completion's piece. Raises `EndedAs` if they are not those of its tokens."""
    if logprobs["tokens"] != [f"token_id:{token_id}" for token_id in token_ids]:
        raise EndedAs(Ending.WRONG, f"with tokens {token_ids} came logprobs of {logprobs['tokens']}")
    return list(zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        error: dict[str, Any] = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return {}
    return error


def _meaning_of(error: dict[str, Any], num_tokens: int) -> Ending:
    """The ending that OpenAI's `error` after `num_tokens` tokens means to a client."""
    match error.get("code"):
        case "deadline_exceeded":
            return Ending.HUNG
        case "rate_limit_exceeded" if not num_tokens:
            return Ending.OVERLOADED
        case "unavailable":
            return Ending.GIVEN_UP if num_tokens else Ending.UNAVAILABLE
        case _:
            return Ending.WRONG
