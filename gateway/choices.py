"""Renders the answers of completions and chats: a run's messages as one object of choices, or as server-sent events.

A failure after the first event is an event {"error": …}, and no [DONE] follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from gateway.answers import ChatStyle, CompletionStyle, Style
from gateway.requests import AskedForChoices, ChatRequest, CompletionRequest
from gateway.run import Run
from gateway.streams import COMMENT, DONE, Begun, event, to_json
from protos.tandem_inference_pb2 import GenerateResponse, TokenLogprobs, Usage
from tandem.answer import AnswersStream


class Choices:
    """Renders the choices of one request."""

    keep_alive = COMMENT

    def __init__(self, run: Run, body: AskedForChoices, model: str) -> None:
        """`model`: the model's name in the answer."""
        self._run = run
        self._body = body
        self._style = _style_of(body, run.request_id, model)

    async def whole(self) -> bytes:
        """All answers as one JSON object."""
        streams = [AnswersStream(self._run.n) for _ in self._run.prompts]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(len(streams) * self._run.n)]
        async with aclosing(self._run.messages()) as messages:
            async for choice, message in messages:
                streams[choice // self._run.n].accept(message)
                logprobs[choice] += self._style.told_logprobs(choice, message)
        answers = [answer for stream in streams for answer in stream.answers()]

        def render() -> bytes:
            return to_json(self._style.whole(answers, logprobs))

        # Rendering logprobs takes milliseconds for every hundred tokens: in a thread, other requests go on meanwhile.
        if any(answer.logprobs or answer.prompt_logprobs or answer.prompt_token_ids for answer in answers):
            return await asyncio.to_thread(render)
        return render()

    async def events(self, messages: Begun[tuple[int, GenerateResponse]]) -> AsyncGenerator[bytes, None]:
        """The events of the run's `messages`, which it closes."""
        usages = [Usage() for _ in range(len(self._run.prompts) * self._run.n)]
        opened: set[int] = set()
        tells_prompt = self._body.return_token_ids or "prompt_logprobs" in self._run.sampling
        try:
            async for choice, message in messages:
                is_first = choice not in opened
                opened.add(choice)
                render = partial(self._events_of, choice, message, usages[choice], is_first=is_first)
                # A prompt's token ids and logprobs, which come first in each choice, may take long to render.
                if told := await asyncio.to_thread(render) if is_first and tells_prompt else render():
                    yield told
        except Exception as error:
            yield event(self._run.failed(error).body)
            return
        finally:
            await messages.aclose()
        if self._body.includes_usage:
            yield event(self._style.usage(usages))
        yield DONE

    def _events_of(self, choice: int, message: GenerateResponse, usage: Usage, *, is_first: bool) -> bytes:
        """The events of `message`; empty if it has nothing to report. Updates `usage`, the choice's usage so far."""
        told, opening = b"", None
        if is_first:
            usage.prompt_tokens = message.prompt_tokens or message.usage.prompt_tokens
            self._style.note_prompt(choice, message)
            if (opening := self._style.opening(choice)) is not None:
                told = self._event(opening, usage)
        usage.completion_tokens += len(message.token_ids)
        if message.HasField("usage"):
            usage.CopyFrom(message.usage)
        logprobs = self._style.told_logprobs(choice, message)
        is_news = (
            message.text
            or message.reasoning
            or message.finish_reason
            or message.tool_calls
            or logprobs
            or message.prompt_logprobs
            or (message.prompt_token_ids and opening is None)  # which tells them
            or (self._body.return_token_ids and message.token_ids)
        )
        if is_news or self._body.includes_usage_always:
            piece = self._style.first_piece if is_first else self._style.piece
            told += self._event(piece(choice, message, logprobs), usage)
        return told

    def _event(self, told: dict[str, Any], usage: Usage) -> bytes:
        if self._body.includes_usage_always:
            told["usage"] = self._style.usage_so_far(usage)
        return event(told)


def _style_of(body: AskedForChoices, request_id: str, model: str) -> Style:
    head = {"created": int(time.time()), "model": model}
    if isinstance(body, ChatRequest):
        return ChatStyle(body, {"id": f"chatcmpl-{request_id}", **head})
    assert isinstance(body, CompletionRequest)
    return CompletionStyle(body, {"id": f"cmpl-{request_id}", **head})
